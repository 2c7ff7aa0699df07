"""Notes and tags on sweeps and trials, from the command line and Python: while a sweep is running, and afterwards."""

import json
import threading

import pytest
from mlflow import MlflowClient

from orchestrator.api import note, results
from orchestrator.commands import steering
from orchestrator.controller.runtime import Waiting, WithdrawnError
from orchestrator.controller.step import apply_requests
from orchestrator.sweep import checkpoint
from orchestrator.sweep.events import Budget
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from orchestrator.tracking.mlflow_tracker import Tracker
from tests.support import long_story, virtual_sweeps
from tests.support.cli_homes import controller, keep, keep_running, run
from tests.support.mlflow_store import new_store

TEXT = "first sweep after the driver update"


def finished(folder, name="story"):
    return keep(folder, name, long_story.events(long_story.speeds(0.1, 0.08), name=name))


def noted(folder, *words):
    result = run("note", "story", *words, "--home", folder, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def runs(folder):
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    found = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return {run.data.tags.get("tc.trial", "sweep"): run.data.tags for run in found}


def test_a_note_on_a_finished_sweep_is_recorded_at_once_and_shown_everywhere(tmp_path):
    finished(tmp_path)
    body = noted(tmp_path, TEXT)
    assert (body["sweep"], body["request"], body["controlled"], body["schema_version"]) == ("story", 1, False, 2)
    assert [(one["trial"], one["text"], one["tags"]) for one in body["notes"]] == [(None, TEXT, {})]
    noted(tmp_path, "t001", "near the limit", "--tag", "team=vision", "--tag", "ticket=HPC-12")
    (own, of_trial) = json.loads(run("report", "story", "--home", tmp_path, "--json").stdout)["notes"]
    assert own["text"] == TEXT and own["by"] == checkpoint.requester()
    assert of_trial["trial"] == 1 and of_trial["tags"] == {"team": "vision", "ticket": "HPC-12"}
    assert json.loads(run("status", "story", "--home", tmp_path, "--json").stdout)["notes"] == [own, of_trial]
    assert json.loads(run("explain", "story", "1", "--home", tmp_path, "--json").stdout)["note"] == of_trial
    words = "note: near the limit; team=vision ticket=HPC-12"
    shown = {name: run(name, "story", "--home", tmp_path).stdout for name in ("status", "report")}
    assert TEXT in shown["status"] and TEXT in shown["report"]
    assert words in shown["report"] and words in run("explain", "story", "t001", "--home", tmp_path).stdout
    page = tmp_path / "page.html"
    assert run("report", "story", "--html", page, "--home", tmp_path).exit_code == 0
    assert TEXT in page.read_text() and f"<small>{words}" in page.read_text()
    assert Home(tmp_path).read("story").phase == "finished", "a note does not reopen it"


def test_text_is_replaced_tags_are_merged_and_both_can_be_removed(tmp_path):
    finished(tmp_path)
    noted(tmp_path, "best", "one", "--tag", "a=1", "--tag", "b=2")
    again = run("note", "story", "best", "two", "--remove-tag", "a", "--remove-tag", "none", "--home", tmp_path)
    assert again.exit_code == 0 and "replaced: one" in again.stderr
    assert "note: two; b=2" in again.stdout
    assert noted(tmp_path, "t001")["notes"][0]["tags"] == {"b": "2"} and noted(tmp_path)["request"] is None
    assert noted(tmp_path, "best", "")["notes"][0]["text"] == ""
    assert noted(tmp_path, "best", "--remove-tag", "b")["notes"] == noted(tmp_path)["notes"] == []
    assert run("note", "story", "--home", tmp_path).stdout == "no notes in story\n"
    with Home(tmp_path).open("story") as ledger:
        kinds = [event.kind for event in ledger.events()]
        assert kinds.count("annotated") == 4, "every version stays in the ledger"
        assert fold(ledger.events()).noted == ()


def test_the_controller_of_a_running_sweep_records_it(tmp_path):
    ledger = keep_running(tmp_path, "story")
    with ledger.hold():
        result = run("note", "story", "t005", "slow node", "--home", tmp_path)
        assert result.exit_code == 0 and "The running controller will record it." in result.stderr
        assert ledger.last_seq() == len(list(ledger.events())), "nothing was written apart from the request"
        assert "note by" in run("status", "story", "--home", tmp_path).stdout
        before = fold(ledger.events())
        after = apply_requests(ledger, ledger.folder)
        assert (after.trials[5].note.text, after.running, after.waiting) == (
            "slow node",
            before.running,
            before.waiting,
        )
        assert after.now_s == before.now_s and after.num_requests == 1
        assert "note: slow node" in run("status", "story", "--home", tmp_path).stdout


def test_a_sweep_waiting_for_nodes_keeps_waiting(tmp_path):
    ledger = keep(tmp_path, "story", long_story.events([], finished=False, name="story"), controller=controller())
    waiting = Waiting(ledger, virtual_sweeps.Quiet())
    with ledger.hold():
        assert noted(tmp_path, TEXT)["controlled"]
    waiting("all nodes are busy")
    for body in (checkpoint.checks(confirm=[1]), checkpoint.budget(Budget(max_trials=9)), checkpoint.retry(["oom"])):
        ledger.add_request(body, by="me", at_s=0.0)
    waiting("all nodes are busy")
    ledger.add_request(checkpoint.action("pause"), by="me", at_s=0.0)
    with pytest.raises(WithdrawnError):
        waiting("all nodes are busy")


def test_secrets_are_masked_and_lines_are_joined(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    finished(tmp_path)
    body = noted(
        tmp_path,
        "uses 0123456789abcdef\n and\x1b[31m more",
        "--tag",
        "api_key=hunter22",
        "--tag",
        "url=http://me:pw12@host",
    )
    assert body["notes"][0]["text"] == "uses *** and more"
    assert body["notes"][0]["tags"] == {"api_key": "***", "url": "http://***@host"}
    stored = (Home(tmp_path).sweep_folder("story") / "ledger.sqlite").read_bytes()
    for path in Home(tmp_path).sweep_folder("story").glob("ledger.sqlite*"):
        stored += path.read_bytes()
    assert b"0123456789abcdef" not in stored and b"hunter22" not in stored and b"pw12" not in stored


BAD = {
    "no sweep": (("note", "strory", "x"), "Did you mean"),
    "no trial": (("note", "story", "t009", "x"), "Trials: t000 to t001."),
    "text first": (("note", "story", "x", "t001"), "Use a number (such as 3 or t003), 'baseline', 'best' or 'winner'."),
    "too long": (("note", "story", "x" * 1001), "the note has 1,001 characters; the limit is 1,000. Shorten the note."),
    "no value": (("note", "story", "--tag", "team"), "expected KEY=VALUE, got 'team'"),
    "empty value": (("note", "story", "--tag", "team="), "To remove the tag, use --remove-tag team"),
    "long value": (("note", "story", "--tag", f"team={'x' * 251}"), "expected 1 to 250"),
    "bad key": (("note", "story", "--tag", "my team=x"), "Tags have 1 to 64 letters, digits"),
    "reserved": (("note", "story", "--tag", "tc.role=x"), "the tag 'tc.role' is reserved"),
    "of MLflow": (("note", "story", "--remove-tag", "mlflow.user"), "the tag 'mlflow.user' is reserved"),
    "both": (("note", "story", "--tag", "a=b", "--remove-tag", "a"), "both set and removed"),
    "too many": (("note", "story", *(word for i in range(21) for word in ("--tag", f"t{i}=x"))), "the limit is 20"),
}


@pytest.mark.parametrize("case", BAD)
def test_invalid_notes_are_refused_with_a_remedy(tmp_path, case):
    words, message = BAD[case]
    finished(tmp_path)
    result = run(*words, "--home", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "") and message in result.stderr
    with Home(tmp_path).open("story") as ledger:
        assert ledger.requests(0) == []


def test_mlflow_has_the_note_in_addition_to_its_own_and_the_tags(tmp_path):
    new_store(tmp_path)
    ledger = finished(tmp_path)
    Tracker(f"sqlite:///{tmp_path}/mlflow.db").sync(ledger, fold(ledger.events()))
    before = runs(tmp_path)
    noted(tmp_path, TEXT, "--tag", "team=vision")
    noted(tmp_path, "t001", "near the limit", "--tag", "keep=1", "--tag", "drop=1")
    noted(tmp_path, "t001", "--remove-tag", "drop")
    assert ledger.cursor("mlflow") == ledger.last_seq(), "without a controller the command brings MLflow up to date"
    after, note_key = runs(tmp_path), "mlflow.note.content"
    by = checkpoint.requester()
    for run_name, text in (("sweep", f"{TEXT}; team=vision"), ("1", "near the limit; keep=1")):
        line = f"note: {text} ({by})\n\n"
        assert after[run_name][note_key].count(line) == 1
        assert after[run_name][note_key].replace(line, "") == before[run_name][note_key]
    assert after["sweep"]["team"] == "vision" and after["1"]["keep"] == "1" and "drop" not in after["1"]
    changed = {key for key in after["1"] if after["1"][key] != before["1"].get(key)}
    assert changed == {"mlflow.note.content", "keep"} and after["0"] == before["0"]
    noted(tmp_path, "t001", "", "--remove-tag", "keep")
    noted(tmp_path, "", "--remove-tag", "team")
    assert runs(tmp_path) == before


def test_a_replay_writes_the_same_and_a_late_run_has_the_note(tmp_path):
    """A note on a trial before its run exists, as with an MLflow that was away, comes with the run."""
    new_store(tmp_path)
    ledger = finished(tmp_path)
    noted(tmp_path, "t001", "near the limit", "--tag", "a=1", "--tag", "b=1")
    noted(tmp_path, "t001", "--remove-tag", "b")
    assert ledger.cursor("mlflow") == 0, "a sweep that MLflow does not have is not recorded by a note"
    tracker, state = Tracker(f"sqlite:///{tmp_path}/mlflow.db"), fold(ledger.events())
    tracker.sync(ledger, state)
    first = runs(tmp_path)
    assert first["1"]["a"] == "1" and "b" not in first["1"]
    ledger.advance("mlflow", 0)
    Tracker(tracker.uri).sync(ledger, state)
    assert runs(tmp_path) == first


def test_an_unreachable_mlflow_only_delays_it(tmp_path, caplog):
    new_store(tmp_path)
    ledger = finished(tmp_path)
    Tracker(f"sqlite:///{tmp_path}/mlflow.db").sync(ledger, fold(ledger.events()))
    (tmp_path / "mlflow.db").rename(tmp_path / "away.db")
    (tmp_path / "mlflow.db").write_text("no database")
    noted(tmp_path, TEXT)
    assert "they are recorded later" in caplog.text and ledger.cursor("mlflow") < ledger.last_seq()
    (tmp_path / "away.db").replace(tmp_path / "mlflow.db")
    noted(tmp_path, "--tag", "team=vision")
    assert TEXT in runs(tmp_path)["sweep"]["mlflow.note.content"] and runs(tmp_path)["sweep"]["team"] == "vision"


def test_a_real_sweep_takes_notes_from_python_while_it_is_running_and_later(tmp_path):
    """The controller reads its requests in a separate thread; the note is written through another connection."""
    home = virtual_sweeps.home(tmp_path)
    written = threading.Event()

    class Noting(virtual_sweeps.Quiet):
        def on_state(self, state):
            if len(state.trials) == 2 and not written.is_set():
                written.set()
                note("first", "slow so far", trial=0, tags={"team": "vision"}, home=home.path)

    result = virtual_sweeps.submit_file(virtual_sweeps.write(tmp_path, virtual_sweeps.SWEEP), home, observer=Noting())
    assert written.is_set() and result.state.trials[0].note.text == "slow so far"
    with Ledger(home.sweep_folder("first")) as ledger:
        places = [event.kind for event in ledger.events()]
    assert places.index("annotated") < len(places) - 1, "recorded by the controller, before the end"
    assert runs(home.path)["0"]["team"] == "vision"
    note("first", TEXT, home=home.path)
    found = results("first", home=home.path)
    assert [(one["trial"], one["text"]) for one in found.notes] == [(None, TEXT), (0, "slow so far")]
    assert TEXT in runs(home.path)["sweep"]["mlflow.note.content"]
    with pytest.raises(steering.ConfigError, match="t009"):
        note("first", "x", trial="t009", home=home.path)
