"""Checkpoints: what is kept, what is believed, and that nothing damaged is."""

from __future__ import annotations

import json
import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from p3o_jax.devices.sharding import MeshShape, make_mesh
from p3o_jax.runs import integrity
from p3o_jax.runs.checkpoint import CheckpointError, Checkpoints, best_step, newest_step, newest_whole_step, steps_in

NAN = float("nan")
ROWS, WHOLE = PartitionSpec("fsdp"), PartitionSpec()


def arrays(step: int, mesh=None, spec=WHOLE):
    """What is saved at a step: a state and the policies of two versions."""
    state = {"w": jnp.arange(4096.0).reshape(64, 64) + step, "n": jnp.asarray(step, jnp.int32)}
    past = {version: {"w": jnp.full((64, 8), version, jnp.bfloat16)} for version in (step - 1, step)}
    if mesh is None:
        return state, past
    place = lambda leaf: NamedSharding(mesh, spec if leaf.ndim else WHOLE)  # noqa: E731
    return jax.tree.map(lambda leaf: jax.device_put(leaf, place(leaf)), (state, past))


def abstract(mesh=None, spec=WHOLE):
    state, past = arrays(1, mesh, spec)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), (state, past)
    )
    return shapes[0], shapes[1][1]


def save(checkpoints: Checkpoints, *steps: int, score: float = NAN) -> None:
    for step in steps:
        checkpoints.save(step, *arrays(step), {"prompt_position": 8 * step}, score)


def assert_is(restored, step: int) -> None:
    state, past = arrays(step)
    assert restored.step == step and restored.loop == {"prompt_position": 8 * step}
    assert restored.past.keys() == past.keys()
    jax.tree.map(np.testing.assert_array_equal, (restored.state, restored.past), (state, past))


def test_without_older_policies_there_is_nothing_of_them(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, arrays(1)[0], {}, {}, NAN)
        checkpoints.wait()
        assert {path.name for path in (tmp_path / "1").iterdir() if path.is_dir()} == {"state", "meta"}
        restored = checkpoints.restore(*abstract())
    assert restored.past == {}
    jax.tree.map(np.testing.assert_array_equal, restored.state, arrays(1)[0])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A directory with the checkpoints of steps 2 and 4."""
    directory = tmp_path_factory.mktemp("two") / "checkpoints"
    with Checkpoints(directory) as checkpoints:
        save(checkpoints, 2, 4)
    return directory


@pytest.fixture
def directory(two, tmp_path):
    return shutil.copytree(two, tmp_path / "checkpoints")


def files(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.glob("*/**/*") if path.is_file())


def test_what_was_saved_is_restored(directory):
    with Checkpoints(directory) as checkpoints:
        assert_is(checkpoints.restore(*abstract()), 4)
    assert newest_step(directory) == 4


def test_without_a_checkpoint_there_is_nothing_to_restore(tmp_path):
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.restore(*abstract()) is None


@pytest.mark.parametrize("how", ["missing", "truncated", "garbage"])
def test_a_damaged_file_of_any_item_is_noticed(directory, how, capsys):
    """Every single file, one after another; then a fall back, which says what and where."""
    newest = directory / "4"
    names = [*files(newest), "files.json"]
    assert {name.split("/")[0] for name in names} == {"state", "past", "meta", "files.json"}
    for name in names:
        path = newest / name
        whole = path.read_bytes()
        if how == "missing":
            path.unlink()
        else:
            path.write_bytes(whole[: len(whole) // 2] if how == "truncated" else os.urandom(len(whole)))
        found = integrity.damage(newest)
        assert found is not None and name in found
        path.write_bytes(whole)
    assert integrity.damage(newest) is None

    (newest / "state" / "manifest.ocdbt").unlink()
    with Checkpoints(directory) as checkpoints:
        assert_is(checkpoints.restore(*abstract()), 2)
        save(checkpoints, 4)  # made again
    said = capsys.readouterr().err
    assert f"checkpoint {newest} is damaged: state/manifest.ocdbt is missing" in said
    assert f"continuing from {directory / '2'}" in said
    assert (directory / "4.damaged").is_dir()  # kept for whoever wants to look
    with Checkpoints(directory) as checkpoints:
        assert_is(checkpoints.restore(*abstract()), 4)


def test_values_that_changed_are_noticed_though_every_file_is_whole(directory, capsys):
    """As by a fault of memory or of the network: the manifest is right, the number is not."""
    meta = directory / "4" / "meta" / "metadata"
    recorded = json.loads(meta.read_text())
    recorded["past"]["3"][0] ^= 1
    meta.write_text(json.dumps(recorded))
    integrity.write_manifest(directory / "4")
    with Checkpoints(directory) as checkpoints:
        assert_is(checkpoints.restore(*abstract()), 2)
    assert "past policy 3: ['w'] is not what was saved" in capsys.readouterr().err


def test_none_left_is_refused_and_nothing_is_touched(directory):
    for step in ("2", "4"):
        (directory / step / "meta" / "metadata").write_text("{")
    before = files(directory)
    with Checkpoints(directory) as checkpoints, pytest.raises(CheckpointError) as caught:
        checkpoints.restore(*abstract())
    assert str(caught.value).startswith(
        f"no checkpoint in {directory} can be restored (4: meta/metadata has 1 bytes of"
    )
    assert "; 2: meta/metadata has 1 bytes of" in str(caught.value)
    assert files(directory) == before


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(directory):
    state, weights = abstract()
    other = {**state, "more": state["n"]}
    with Checkpoints(directory) as checkpoints, pytest.raises(CheckpointError, match="more"):
        checkpoints.restore(other, weights)
    assert steps_in(directory) == [2, 4]


def test_a_save_that_was_cut_short_is_not_a_checkpoint_and_is_cleared_away(directory):
    (directory / "4").rename(directory / "4.orbax-checkpoint-tmp")
    with Checkpoints(directory) as checkpoints:
        assert_is(checkpoints.restore(*abstract()), 2)
        save(checkpoints, 3)
    assert sorted(path.name for path in directory.iterdir()) == ["2", "3"]


def test_it_is_restored_onto_another_mesh(tmp_path):
    eight = make_mesh(MeshShape(data=2, fsdp=4))
    one = make_mesh(MeshShape(), jax.devices()[:1])
    for name, (source, spec), (target, other) in (
        ("scattered", (one, WHOLE), (eight, ROWS)),
        ("gathered", (eight, ROWS), (one, WHOLE)),
    ):
        with Checkpoints(tmp_path / name) as checkpoints:
            checkpoints.save(3, *arrays(3, source, spec), {"prompt_position": 24}, NAN)
            restored = checkpoints.restore(*abstract(target, other))
        assert_is(restored, 3)
        assert restored.state["w"].sharding == NamedSharding(target, other)


def test_what_is_kept(tmp_path):
    """The newest two, multiples of four, and the best."""
    with Checkpoints(tmp_path, keep=2, keep_every=4) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2, score=0.5)
        save(checkpoints, 3, score=0.25)
        save(checkpoints, 4, 5, 6)
    assert steps_in(tmp_path) == [2, 4, 5, 6]
    assert best_step(tmp_path) == 2
    with Checkpoints(tmp_path, keep=1) as checkpoints:  # which knows the scores of those before it
        save(checkpoints, 7, score=0.75)
        save(checkpoints, 9, score=0.5)
    assert steps_in(tmp_path) == [7, 9]
    assert best_step(tmp_path) == 7


def test_going_back_forgets_the_steps_after(directory):
    with Checkpoints(directory) as checkpoints:
        restored = checkpoints.restore(*abstract(), lambda loop: loop["prompt_position"] < 32)
        assert_is(restored, 2)
        assert steps_in(directory) == [2]
        save(checkpoints, 4)


def test_saving_returns_before_anything_is_committed(directory, monkeypatch):
    """The disk is as slow as can be: what is saved is what was there when it was, whatever happens to the arrays."""
    disk, write = threading.Event(), integrity.write_manifest
    monkeypatch.setattr(integrity, "write_manifest", lambda unfinished: disk.wait(60) and write(unfinished))
    with Checkpoints(directory) as checkpoints:
        state, past = arrays(6)
        checkpoints.save(6, state, past, {"prompt_position": 48}, NAN)
        assert checkpoints.busy and steps_in(directory) == [2, 4]
        checkpoints.check()  # does not wait either
        jax.tree.map(lambda leaf: leaf.delete(), state)  # as a donated buffer is, in the next update
        disk.set()
        checkpoints.wait()
        assert not checkpoints.busy and steps_in(directory) == [4, 6]
        assert_is(checkpoints.restore(*abstract()), 6)


def test_a_checkpoint_that_does_not_fit_is_not_begun(directory, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**30, 2**30, 2**18))
    with Checkpoints(directory) as checkpoints:
        with pytest.raises(CheckpointError) as caught:
            save(checkpoints, 6)
        assert str(caught.value) == (
            f"cannot write checkpoint {directory / '6'}: No space left on device: it needs about 0.3 MiB of 0.2 MiB; "
            "the newest whole one is that of step 4"
        )
        assert_is(checkpoints.restore(*abstract()), 4)


def test_a_save_that_fails_in_its_middle_is_one_line_and_leaves_nothing(directory, monkeypatch):
    def fail(unfinished):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(integrity, "write_manifest", fail)
    with Checkpoints(directory) as checkpoints:
        save(checkpoints, 6)
        with pytest.raises(CheckpointError, match=r"cannot write .*6: No space left on device; the newest .* step 4"):
            checkpoints.wait()
        assert sorted(path.name for path in directory.iterdir()) == ["2", "4"]
        checkpoints.check()  # said once
        monkeypatch.undo()
        save(checkpoints, 6)
    assert steps_in(directory) == [4, 6]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_a_fingerprint_sees_any_change_and_no_mesh(dtype):
    values = np.random.default_rng(0).integers(0, 2, (8, 6)).astype(dtype)
    changed = values.copy()
    changed[3, 2] = 1 - changed[3, 2]
    eight = NamedSharding(make_mesh(MeshShape(fsdp=8)), ROWS)
    (whole,) = integrity.fingerprints(values)
    assert integrity.fingerprints(jax.device_put(values, eight)) == [whole]
    assert integrity.fingerprints(changed) != [whole]
    assert integrity.fingerprints(values[::-1]) != [whole]
    elsewhere = jax.device_put(values, jax.devices()[1])
    assert integrity.fingerprints({"a": elsewhere, "b": changed, "c": values})[::2] == [whole, whole]


def test_the_newest_whole_step_passes_over_what_is_damaged(tmp_path):
    for step in (3, 12, 40):
        (tmp_path / str(step) / "state").mkdir(parents=True)
        (tmp_path / str(step) / "state" / "array").write_bytes(b"x" * step)
        integrity.write_manifest(tmp_path / str(step))
    assert newest_whole_step(tmp_path) == 40
    (tmp_path / "40" / "state" / "array").write_bytes(b"")
    (tmp_path / "12" / "files.json").unlink()
    assert newest_whole_step(tmp_path) == 3
    assert newest_whole_step(tmp_path / "none") == 0
