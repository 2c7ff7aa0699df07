"""The command ``export``, on a sweep that is over."""

import json

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import CommandGroup
from orchestrator.cli.production import export
from orchestrator.frameworks.catalog import formats, recipe
from tests.support import long_story
from tests.support.cli_homes import keep


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("home")
    keep(folder, "ended", long_story.events(long_story.all_kinds()[:5], finished=True, name="ended")).close()
    return folder


def run(home, *arguments):
    group = CommandGroup(commands=[export])
    return CliRunner().invoke(group, ["export", *map(str, arguments), "--home", str(home)])


def test_formats_are_listed(home):
    shown = run(home, "--formats", "--json")
    assert list(json.loads(shown.stdout)["formats"]) == formats()


def test_one_file_goes_to_stdout_and_everything_else_to_stderr(home):
    shown = run(home, "ended:t000", "--format", "torchtitan", "--allow-lossy")
    assert shown.exit_code == 0, shown.output
    printed = recipe("torchtitan").parse({"tune_cluster_recipe.py": shown.stdout})
    assert printed.values["layout.dp_replicate"] == long_story.candidate(0).layout.dp_replicate
    assert "warning: workload.data" in shown.stderr
    assert "ended:t000 for torchtitan; run in the directory with these files: torchrun" in shown.stderr


def test_files_go_into_a_folder_and_never_over_others(home, tmp_path):
    first = run(home, "ended:winner", "--format", "torchrun", "--out", tmp_path / "new", "--json")
    body = json.loads(first.stdout)
    assert (
        sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(body["files"]) == ["run.sh", "spec.json"]
    )
    assert (body["format"], body["command"], body["notes"]) == ("torchrun", "sh run.sh", [])
    assert run(home, "ended:winner", "--format", "torchrun", "--out", tmp_path / "new").exit_code == 0
    (tmp_path / "new" / "run.sh").write_text("mine\n")
    again = run(home, "ended:winner", "--format", "torchrun", "--out", tmp_path / "new")
    assert (again.exit_code, "with different content" in again.stderr) == (2, True)
    assert (tmp_path / "new" / "run.sh").read_text() == "mine\n"


@pytest.mark.parametrize("name", formats())
def test_every_format_writes_all_its_files_into_a_new_folder(home, tmp_path, name):
    shown = run(home, "ended:t000", "--format", name, "--allow-lossy", "--out", tmp_path / "a" / "b", "--json")
    assert shown.exit_code == 0, shown.output
    files = json.loads(shown.stdout)["files"]
    written = {path.relative_to(tmp_path / "a" / "b").as_posix(): path for path in (tmp_path / "a").rglob("*.*")}
    assert {name: path.read_text(encoding="utf-8") for name, path in written.items()} == files


def test_an_export_that_cannot_be_written_leaves_nothing_behind(home, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model").write_text("a file where paddlenlp has a folder\n")
    refused = run(home, "ended:t000", "--format", "paddlenlp", "--allow-lossy", "--out", tmp_path / "out")
    assert refused.exit_code == 2
    assert "model" in refused.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model"]
