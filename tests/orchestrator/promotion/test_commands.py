"""The commands on production, as they are typed."""

import json
import re
from pathlib import Path

from click.testing import CliRunner, Result

from orchestrator.cli.main import main
from orchestrator.promotion.release import Releases
from orchestrator.tracking.mlflow_tracker import Tracker
from tests.orchestrator.promotion.proven import manifest, proven_home


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words], env={"COLUMNS": "200"})


def ok(*words: str | Path) -> str:
    done = run(*words)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_configuration_goes_to_production_and_back(tmp_path: Path):
    proven_home(tmp_path)
    home = ("--home", tmp_path)
    first_run = run("promote", "story", "--name", "llama", "--reason", "[bold]new[/bold] drivers", *home)
    assert first_run.exit_code == 0, first_run.output
    phases = [line[6:].strip() for line in first_run.stderr.splitlines()]
    assert phases[0] == "checking the evidence for 'story'" and phases[-1] == "adding it to the sweep's report"
    first = first_run.stdout
    assert "llama@production is now version 1" in first and "confirmed: t001 is faster" in first
    assert "loss gate: passed" in first
    assert "already" in ok("promote", "story", "--name", "llama", *home)
    refused = run("promote", "story", "--name", "llama", "--trial", "2", *home)
    assert refused.exit_code == 2 and "the confirmed winner is t001" in refused.stderr
    second = json.loads(
        ok(
            "promote",
            "story",
            "--name",
            "llama",
            "--trial",
            "t002",
            "--force",
            "--expect-current",
            "1",
            "--json",
            *home,
        )
    )
    assert (second["version"], second["previous_version"], second["forced"]) == ("2", "1", True)
    late = run("rollback", "llama", "--expect-current", "1", *home)
    assert late.exit_code == 2 and "llama@production is version 2, not 1" in late.stderr
    assert "llama@production is version 1 again" in ok("rollback", "llama", "--reason", "slower", *home)
    assert json.loads(ok("rollback", "llama", "--to", "2", "--json", *home))["version"] == "2"
    listed = json.loads(ok("history", "llama", "--json", *home))
    moves = [(record["action"], record["from_version"], record["to_version"]) for record in listed["records"]]
    assert moves == [("rollback", "1", "2"), ("rollback", "2", "1"), ("promote", "1", "2"), ("promote", "", "1")]
    shown = ok("history", "llama", *home)
    assert "[bold]new[/bold] drivers" in shown and "forced: the confirmed winner is t001" in shown
    assert "llama version 2  @production" in ok("show", "llama", *home)
    assert json.loads(ok("show", "llama@1", "--json", *home))["aliases"] == ["previous"]


def test_impossible_commands_are_refused_with_a_reason(tmp_path: Path):
    home = ("--home", tmp_path)
    own = proven_home(tmp_path)
    Releases(Tracker(own.default_tracking_uri)).promote("llama", manifest(own, 1))
    for words, part in {
        ("rollback", "llama"): "llama has no version before the one in production",
        ("rollback", "llama", "--to", "1"): "llama@production is already version 1",
        ("rollback", "llama", "--to", "7"): "llama has no version 7",
        ("history", "other"): "nothing has been promoted as other",
        ("show", "llama@7"): "the registry has no llama@7",
        ("diff", "llama", "story:40"): "no trial '40'",
        ("verify", "llama"): "was not promoted from a sweep file",
    }.items():
        done = run(*words, *home)
        assert done.exit_code == 2 and part in done.stderr, done.output


def test_differences_are_shown_by_part(tmp_path: Path):
    own = proven_home(tmp_path)
    releases = Releases(Tracker(own.default_tracking_uri))
    for trial in (2, 1):
        releases.promote("llama", manifest(own, trial))
    home = ("--home", tmp_path)
    found = json.loads(ok("diff", "llama@previous", "story:winner", "--json", *home))
    assert found["knobs"] == {"micro_batch_size": ["2", "1"]} and not found["same"]
    assert found["workload"] == found["environment"] == {}
    assert found["evidence"]["verdict"] == ["not confirmed", "confirmed"]
    assert json.loads(ok("diff", "llama", "story:1", "--json", *home))["same"]
    shown = ok("diff", "llama@1", "story:baseline", *home)
    assert re.search(r"zero_stage\s+2\s+0", shown) and "no difference" in shown


def test_an_unfinished_change_is_shown_as_such(tmp_path: Path):
    own = proven_home(tmp_path)
    releases = Releases(Tracker(own.default_tracking_uri))
    record = releases.promote("llama", manifest(own, 1)).record
    releases.registry.client.update_run(record.record_id, status="RUNNING")
    shown = ok("history", "llama", "--home", tmp_path)
    assert "a change was interrupted" in shown and "the next promote or rollback resolves it" in shown
