"""What people meet when they operate sweeps: logs of a sweep in a terminal, what to do next, what Ctrl-C leaves."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from orchestrator.sweep.snapshot import Home
from orchestrator.terminal.sweep_screen import LiveView
from tests.support import long_story
from tests.support.cli_homes import keep, run
from tests.support.sweep_files import SIMULATED, write


def test_a_sweep_in_a_terminal_keeps_a_log_and_one_that_is_refused_keeps_nothing(tmp_path):
    cluster = {"kind": "simulated", "devices_per_node": 1, "simulation": {"accelerator": "a100-80"}}
    file = write(tmp_path, {**SIMULATED, "cluster": cluster, "budget": {"max_trials": 1}, "confirm": "off"})
    home = Home(tmp_path / "home")
    text = file.read_text()
    write(tmp_path, {**SIMULATED, "space": {"tp": [3, 5]}})
    assert run("submit", file, "--home", home.path).exit_code == 2
    assert not home.sweep_folder("simulated").exists()
    file.write_text(text)
    assert run("submit", file, "--home", home.path).exit_code == 0
    first, *lines, last = run("logs", "simulated", "--home", home.path).stdout.splitlines()
    assert "started in a terminal" in first
    assert any(line.startswith("t000 ") and line.endswith("baseline") for line in lines)
    assert last.startswith("finished: ")


def test_a_trial_without_a_sweep_refers_to_the_latest_sweep(tmp_path):
    keep(tmp_path, "older", long_story.events(long_story.speeds(0.1), name="older"))
    keep(tmp_path, "newer", long_story.events(long_story.speeds(0.1), name="newer"))
    shown = run("logs", "best", "--home", tmp_path)
    assert "best of the latest sweep, newer:" in shown.stderr
    keep(tmp_path, "best", long_story.events([]))
    assert "latest sweep" not in run("logs", "best", "--home", tmp_path).stderr, "a sweep may be called so"
    assert "no sweep 'bset'" in run("logs", "bset", "--home", tmp_path).stderr


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_ctrl_c_leaves_the_table_on_the_screen(is_interrupted):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    try:
        with LiveView(console) as view:
            view.on_state(long_story.state(long_story.speeds(0.1, 0.08), finished=False))
            if is_interrupted:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    erased = screen.getvalue().rpartition("\x1b[2K")[2]
    assert ("t001" in erased) == is_interrupted, "what comes after the last line that was erased"


EVERY_COMMAND = """
import sys
from click.testing import CliRunner
from orchestrator.cli.main import main
home, commands = sys.argv[1], [["--help"], *([name, "--help"] for name in main.commands)]
commands += [["--home", home, *words.split()] for words in ("ps", "report story", "status story", "explain story")]
for words in commands:
    try:
        main(words, prog_name="tune-cluster")
    except SystemExit as ended:
        assert not ended.code, words
    sys.stdout.flush()
"""


def test_output_survives_an_encoding_without_its_characters(tmp_path):
    keep(tmp_path, "story", long_story.events(long_story.all_kinds(), finished=True)).close()
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0", "COLUMNS": "80"}
    child = [sys.executable, "-P", "-c", EVERY_COMMAND, str(tmp_path)]
    shown = subprocess.run(child, env=environment, capture_output=True, timeout=150)
    assert shown.returncode == 0, shown.stderr.decode("latin-1")
    text = shown.stdout.decode("latin-1")
    assert all(sign in text for sign in ("Usage: tune-cluster submit", "+-----", "| "))
    assert "???" not in text
