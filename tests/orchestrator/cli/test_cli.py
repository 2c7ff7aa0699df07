"""The command line as a user meets it: messages, exit codes, what is left behind."""

import json
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from configs import CONFIGS
from orchestrator.cli.main import main
from orchestrator.errors import ExitCode
from orchestrator.planning.planner import Plan
from tests.support import sweeps


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("command", main.commands)
def test_every_command_has_an_example_and_json(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"tune-cluster {command}" in result.stdout
    assert "Example" in result.stdout
    assert "--json" in result.stdout
    codes = [int(code) for code in re.findall(r"\d+", result.stdout.partition("Exit codes")[2])[:6]]
    assert codes == [0, 1, 2, 3, 4, 130]


def test_the_summaries_of_all_commands_fit_in_80_columns():
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(main, ["--help"]).stdout
    assert all(re.search(rf"^  {command}  +\w.*\w\.$", shown, re.M) for command in main.commands)


def test_the_table_of_exit_codes_is_complete():
    text = (CONFIGS.parent / "docs/troubleshooting.md").read_text(encoding="utf-8")
    table = text.partition("## Exit codes")[2].partition("\n## ")[0]
    assert [int(number) for number in re.findall(r"^\| (\d+) \|", table, re.M)] == list(ExitCode)


def test_an_unreachable_ray_address_is_reported_at_once_and_leaves_nothing(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    home = tmp_path / "home"
    file = sweeps.write(tmp_path, cluster={"kind": "ray", "address": address, "devices_per_node": None})
    result = run("submit", file, "--home", home)
    assert result.exit_code == ExitCode.INFRASTRUCTURE, result.output
    assert address in result.stderr
    assert "Traceback" not in result.stderr
    assert not (home / "sweeps").exists() or not any((home / "sweeps").rglob("ledger.sqlite"))


@pytest.mark.slow
def test_a_full_disk_stops_with_one_message(tmp_path):
    """A limit on file sizes stands in for the disk: the ledger's first write already fails."""
    file = sweeps.write(tmp_path)
    done = subprocess.run(
        [Path(sys.executable).with_name("tune-cluster"), "submit", file, "--home", tmp_path / "home"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048)),
    )
    assert done.returncode == ExitCode.INFRASTRUCTURE, done.stderr
    assert "ledger.sqlite" in done.stderr
    assert "free space" in done.stderr
    assert "Traceback" not in done.stderr
    again = run("submit", sweeps.write(tmp_path, budget={"max_trials": 1}), "--home", tmp_path / "home", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["trials"]["measured"] == 1


def test_plan_lists_candidates_and_reasons_as_text_and_json(tmp_path):
    file = sweeps.write(tmp_path, space={"tp": [1, 2], "dp_replicate": [1, 2, 4]})
    shown = run("plan", file)
    assert shown.exit_code == 0, shown.output
    assert "legal candidates" in shown.stdout
    assert "fits-lease" in shown.stdout
    body = json.loads(run("plan", file, "--json").stdout)
    assert body["num_legal"] == len(body["candidates"]) > 0
    assert {row["rule"] for row in body["rejected"]} >= {"fits-lease"}
    total = body["num_legal"] + body["num_duplicates"] + sum(row["count"] for row in body["rejected"])
    assert total == body["product_size"]


def test_single_candidates_are_listed_only_in_json(tmp_path, monkeypatch):
    described = []
    monkeypatch.setattr(Plan, "to_json", lambda plan: described.append(len(plan.candidates)) or {})
    file = sweeps.write(tmp_path)
    assert "legal candidates" in run("plan", file).stdout
    assert not described, "a million candidates would be put in words for a table of ten"
    assert run("plan", file, "--json").exit_code == 0
    assert len(described) == 1


@pytest.mark.representative("quickstart", "llama2-13b-ascend", "script", "resnet")
@pytest.mark.parametrize("name", [file.stem for file in sorted((CONFIGS / "sweeps").glob("*.yaml"))])
def test_the_shipped_sweeps_can_be_planned(name):
    file = CONFIGS / "sweeps" / f"{name}.yaml"
    assert yaml.safe_load(file.read_text(encoding="utf-8"))["name"] == name
    result = run("plan", file, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_legal"] >= 8, "there is nothing to choose from"
