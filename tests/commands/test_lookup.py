"""Experiments, tasks and trusted modules by name, from any directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from p3o_jax.commands.lookup import configuration, find_experiment, task_named
from p3o_jax.commands.trust import make_findable
from p3o_jax.tasks import SortDigits

EXPERIMENT = '''"""Some experiment.

More of it."""
from p3o_jax.config import Config
from p3o_jax.tasks import SortDigits
VARIANTS = {"a": Config(task=SortDigits(length=3)), "b": Config(task=SortDigits(length=4))}
def five():
    return SortDigits(length=5)
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory; what is imported there is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("of_mine.py", "of_mine"),
        ("of_mine.py", "of_mine.py"),
        ("of_mine.py", "./of_mine.py"),
        ("below/of_mine.py", "below/of_mine.py"),
        ("below/of_mine.py", "below.of_mine"),
    ],
)
def test_a_file_of_ones_own(here, file, name):
    path = here / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(EXPERIMENT)
    assert find_experiment(name).description == "Some experiment."
    assert configuration(name).task == SortDigits(length=3)
    assert configuration(f"{name}:b").task == SortDigits(length=4)


def test_a_name_in_the_package(here):
    assert list(find_experiment("quickstart").variants) == ["p3o", "grpo"]


@pytest.mark.parametrize(
    ("files", "name", "message"),
    [
        (
            {},
            "nothing",
            r"'nothing': looked for .*/nothing\.py, .*/experiments/nothing\.py, an installed experiments\.nothing",
        ),
        ({}, "nothing.py", r"no experiment 'nothing\.py': looked for [^,]*/nothing\.py$"),
        ({}, "a.b.nothing", r"looked for .*/a/b/nothing\.py, .*/experiments/a/b/nothing\.py, an installed"),
        ({}, "below/nothing", r"no experiment 'below/nothing': give the path of a file that ends in \.py, or"),
        ({}, "", "no experiment '': give the path"),
        ({"empty_one.py": ""}, "empty_one", r"empty_one\.py has no VARIANTS"),
        ({"broken_one.py": "def"}, "broken_one", "broken_one cannot be imported: .*syntax"),
        ({"lacking.py": "import no_such_module"}, "lacking", "cannot be imported: No module named 'no_such_module'"),
        ({"json.py": EXPERIMENT}, "json", r"another module is called json, too: rename .*/json\.py"),
        ({"of_mine.py": EXPERIMENT}, "of_mine:c", "unknown variant 'c' of of_mine; choose from a, b"),
    ],
)
def test_what_is_not_there_is_said_in_a_line(here, files, name, message):
    for file, text in files.items():
        (here / file).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        configuration(name)
    assert "\n" not in str(error.value)


def test_tasks_by_name(here):
    (here / "of_mine.py").write_text(EXPERIMENT)
    assert task_named("of_mine").length == 3
    assert task_named("of_mine:b").length == 4
    assert task_named("of_mine:five").length == 5
    assert task_named("p3o_jax.tasks:SortDigits").length == 10
    with pytest.raises(ValueError, match=r"give LAYOUT:FILE .*, EXPERIMENT\[:VARIANT\]"):
        task_named("nothing")


def recorded(run_dir: Path, directory) -> Path:
    run_dir.mkdir()
    (run_dir / "environment.json").write_text(json.dumps([{}, {"program": {"directory": directory}}]))
    return run_dir


def test_a_trusted_module_is_found_where_the_run_found_it(here, capsys):
    elsewhere = here / "elsewhere"
    elsewhere.mkdir()
    run_dir = recorded(here / "run", str(elsewhere))
    make_findable((), run_dir)
    make_findable(("json", "p3o_jax.tasks"), run_dir)  # which are found anyway
    assert str(elsewhere) not in sys.path
    make_findable(("found_there",), run_dir)
    assert sys.path[-2:] == [str(here), str(elsewhere)]
    assert capsys.readouterr().err == f"found_there: looked for in {elsewhere}, as the run did\n"


@pytest.mark.parametrize("directory", ["elsewhere", "/no/such", 3, None, ["/"]])
def test_a_record_that_names_no_directory_is_passed_over(here, directory):
    (here / "elsewhere").mkdir()
    make_findable(("found_there",), recorded(here / "run", directory))
    assert sys.path[-1] == str(here)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_a_record_that_cannot_be_read_is_passed_over(here, text):
    (here / "environment.json").write_text(text)
    make_findable(("found_there",), here)
    assert sys.path[-1] == str(here)
