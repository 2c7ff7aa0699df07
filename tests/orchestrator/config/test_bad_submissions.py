"""Hundreds of wrong files through ``submit``: exit 2, one message that names file, line and key, and no side effect."""

import copy
import re

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import main
from tests.goldens import answers
from tests.orchestrator.config.bad_files import ALL_PATHS, MAPPINGS, MARK, at, dotted
from tests.orchestrator.config.test_bad_input import LEAVES, WRONG, is_meant
from tests.support.sweep_files import FULL, changed, write


def unknown_keys():
    for path in MAPPINGS:
        yield changed(FULL, (*path, MARK), 1), dotted((*path, MARK))


def wrong_values():
    for number, path in enumerate(ALL_PATHS[::2]):
        bad = WRONG[number % len(WRONG)]
        if not is_meant(path, bad):
            yield changed(FULL, path, bad), dotted(path)


def wrong_kinds_of_scalars():
    for path in LEAVES[1::2]:
        value = at(FULL, path)
        wrong = "true" if isinstance(value, bool) else "8" if isinstance(value, int | float) else 8
        yield changed(FULL, path, wrong), dotted(path)


def missing_keys():
    for path in (("name",), ("workload",), ("workload", "model"), ("workload", "seq_length"), ("space",)):
        content = copy.deepcopy(FULL)
        del at(content, path[:-1])[path[-1]]
        yield content, dotted(path)


GENERATED = [*unknown_keys(), *wrong_values(), *wrong_kinds_of_scalars(), *missing_keys()]


def test_there_are_enough_files():
    assert len({repr(content) for content, _ in GENERATED}) >= 150


def submit(folder, content):
    """Exit code and message; nothing else is to be seen or left."""
    file, home = write(folder, content), folder / "home"
    before = snapshot(folder)
    result = CliRunner().invoke(main, ["submit", str(file), "--home", str(home)])
    assert snapshot(folder) == before
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error: ") == 1 and result.stderr.startswith("error: ")
    return result.exit_code, result.stderr.removeprefix("error: ")


def snapshot(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def check(folder, content, key):
    exit_code, message = submit(folder, content)
    assert exit_code == 2
    named = {m["key"]: m["line"] for m in re.finditer(r"sweep\.yaml(:(?P<line>\d+))?: (?P<key>\S+): ", message)}
    assert re.match(rf"{re.escape(str(folder / 'sweep.yaml'))}(:\d+)?: ", message), message
    if key is not None:
        assert any(name.startswith(key) and line for name, line in named.items()), f"{key} is not in {message}"


@pytest.mark.parametrize("kind", [unknown_keys, wrong_values, wrong_kinds_of_scalars, missing_keys])
def test_generated_files(kind, tmp_path):
    for content, key in kind():
        check(tmp_path, content, key)


def test_files_written_by_hand(tmp_path):
    """Every fourth of those of the goldens, with the same message."""
    wrong = {one: answer for one, answer in answers.read("sweep_files").items() if not answer.startswith("accepted")}
    for question, answer in list(wrong.items())[::4]:
        exit_code, message = submit(tmp_path, answers.content_of(question))
        shown = message.replace(f"{tmp_path}/", "").replace(str(tmp_path), "/folder")
        assert (exit_code, shown.rstrip()) == (2, answer), question


def test_the_message_depends_on_the_error(tmp_path):
    """The messages above come from what is wrong, not from everything."""
    exit_code, message = submit(tmp_path, changed(FULL, ("baseline",), {"dp_replicate": 10**6}))
    assert (exit_code, "baseline" in message) == (2, True)
