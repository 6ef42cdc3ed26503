"""What others wrote, quoted in one line, and their JSON and numbers by kind."""

from __future__ import annotations

import pytest

from p3o_jax.inputs.errors import one_line, refused, shown, some
from p3o_jax.inputs.json_files import parse_json, read_json
from p3o_jax.inputs.kinds import ListOf, Maybe, OneOf, Real, Whole, checked, flag, text


def test_whatever_is_quoted_is_short_and_of_one_line():
    assert shown("a\nb") == "'a\\nb'"
    assert one_line("a\n\t b\x00\u2028c") == "a b c"
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 10**8, 10**5000, deep, [0] * 10**6, {"a": "x" * 10**6}):
        assert len(shown(value)) <= 60
    assert some(["a", "b", "c", "d"]) == "a, b, c and 1 more"
    while deep:  # from the outside in: nested so deep, it would be freed by recursion
        deep = deep[0]


def test_what_another_package_raises_names_the_file():
    with pytest.raises(ValueError, match=r"^a.bin: KeyError: 'x y'$"), refused("a.bin"):
        raise KeyError("x y")
    with pytest.raises(ValueError, match=r"^a.bin: bad$"), refused("a.bin"):
        raise ValueError("bad\n")
    with pytest.raises(ImportError), refused("a.bin", ImportError):
        raise ImportError("b")
    with pytest.raises(KeyboardInterrupt), refused("a.bin"):
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (Whole(1, 9), [1, 9], [0, 10, True, 2.0, "1", None, float("nan")]),
        (Real(0, 9), [0, 0.5, 9], [-1, float("nan"), float("inf"), False, "1", 10**400]),
        (flag, [True, False], [0, 1, "true", None]),
        (text, ["", "a"], [0, None, ["a"]]),
        (OneOf(("a", "b")), ["a"], ["c", ["a"], None]),
        (ListOf(Whole(0, 1), "numbers"), [[], [0, 1]], [None, "01", [2], {0: 1}]),
        (Maybe(text), [None, "a"], [0]),
    ],
)
def test_kinds(kind, good, bad):
    for value in good:
        assert checked(value, kind, "file", "field") == (tuple(value) if isinstance(value, list) else value)
    for value in bad:
        with pytest.raises(ValueError, match=r"^file(: field is .*, not| has no field: it is null, not) "):
            checked(value, kind, "file", "field")


def test_json_is_read_whole_or_refused(tmp_path):
    file = tmp_path / "a.json"
    for data, message in (
        (b"{", "is not valid JSON"),
        (b'{"a":' * 10**5, "nested too deep"),
        (b"\xff", "is not UTF-8"),
        (b"[]", "is not a JSON object"),
        (b'{"b": {"a": 1, "a": true}}', "'a' is there twice, as 1 and as True"),
    ):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=rf"a\.json .*{message}"):
            read_json(file)
    file.write_text('{"a": [1], "a": [1]}')
    assert read_json(file) == {"a": [1]}
    assert parse_json(b'{"a": 1, "a": 2}') == {"a": 2}
    assert read_json(tmp_path / "b.json", missing={"c": 1}) == {"c": 1}
    with pytest.raises(FileNotFoundError, match=r"has no b\.json"):
        read_json(tmp_path / "b.json")
