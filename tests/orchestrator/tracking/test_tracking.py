import json
import logging
import os
import re
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import sweep_links
from orchestrator.process_support import user_name
from orchestrator.report.summary import summarize
from orchestrator.sweep.events import LedgerEvent
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import PLAN, Ledger, MeasuredProgram, Recorded
from orchestrator.sweep.snapshot import attempt_folder
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.tracking import run_records
from orchestrator.tracking.mlflow_tracker import CURSOR, ClientWriter, Tracker
from orchestrator.tracking.run_writer import SqliteWriter
from tests.support.long_story import START_S, all_kinds, events, fill, speeds
from tests.support.mlflow_store import new_store
from tests.support.story import created, ended, evidence, failures, launched, measured, proposed
from tests.support.virtual_sweeps import SWEEP, home, submit
from trials.files import from_json
from trials.health import Disturbance, Usage
from trials.outcome import Crashed
from trials.spec import Candidate, CustomChoice, LinearModel, RandomData, ResNetModel, Workload


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "sweep") as opened:
        yield opened


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return new_store(tmp_path)


class Recording:
    """What a store holds, read back with MLflow's own client."""

    def __init__(self, uri: str) -> None:
        self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self.experiments = [e for e in self.client.search_experiments() if e.name != "Default"]
        runs = list(self.client.search_runs([e.experiment_id for e in self.experiments]))
        self.sweeps = [run for run in runs if run.data.tags["tc.kind"] == "sweep"]
        self.trials, self.checks = (
            sorted(
                (run for run in runs if run.data.tags["tc.kind"] == kind), key=lambda r: int(r.data.tags["tc.trial"])
            )
            for kind in ("trial", "check")
        )

    def artifact(self, run: Run, name: str, folder: Path) -> str:
        return Path(self.client.download_artifacts(run.info.run_id, name, str(folder))).read_text(encoding="utf-8")

    def everything(self) -> Any:
        """All runs with the whole history of their metrics, comparable."""
        return [
            (
                run.to_dictionary(),
                {
                    key: [m.to_dictionary() for m in self.client.get_metric_history(run.info.run_id, key)]
                    for key in run.data.metrics
                },
            )
            for run in (*self.sweeps, *self.trials, *self.checks)
        ]


NODE_USAGE = (
    Usage(kind="cpu_percent", period_s=2.0, values=(50.0, 100.0)),
    Usage(kind="device_power_w", device="3", period_s=5.0, values=(410.25,)),
)


def test_usage_of_nodes_fills_mlflows_system_metrics(ledger: Ledger, uri: str):
    """Under MLflow's own names and at the time of each sample; nodes are kept apart where there are several."""
    nodes = [Disturbance(node=name, seconds=9.0, usage=NODE_USAGE) for name in ("n1", "n2")]
    story = [created(), proposed(0), launched(0), ended(0, measured(disturbances=tuple(nodes[:1])))]
    story += [proposed(1), launched(1), ended(1, measured(disturbances=tuple(nodes)))]
    recording, _ = synced(ledger, uri, story)
    one, two = recording.trials
    assert {name for name in one.data.metrics if name.startswith("system/")} == {
        "system/cpu_utilization_percentage",
        "system/gpu_3_power_usage_watts",
    }
    history = recording.client.get_metric_history(one.info.run_id, "system/cpu_utilization_percentage")
    began_ms = 2000  # of ``launched``
    assert [(point.value, point.timestamp - began_ms) for point in history] == [(50.0, 2000), (100.0, 4000)]
    assert two.data.metrics["system/n2/gpu_3_power_usage_watts"] == 410.25


def synced(ledger: Ledger, uri: str, story: list[LedgerEvent]) -> tuple[Recording, SweepState]:
    state = fill(ledger, story)
    tracker = Tracker(uri)
    assert sum(iter(lambda: tracker.sync(ledger, state), 0)) == len(story)  # a slow machine gets some at a time
    return Recording(uri), state


def test_importing_tracking_does_not_import_mlflow():
    code = "import sys, orchestrator.tracking.mlflow_tracker, orchestrator.promotion; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_writing_everything_again_changes_nothing(ledger: Ledger, uri: str, tmp_path: Path):
    ledger.put_document("sweep_yaml", {"text": "name: story\n"})
    MeasuredProgram(sha256="0" * 64, commit="abc123+").put(ledger)
    rule = {"rule": "r", "count": 2, "examples": []}
    counts = {"num_legal": 9, "product_size": 11, "num_duplicates": 0}
    ledger.put_document(PLAN, {**counts, "too_large": "", "rejected": [rule]})
    recording, state = synced(ledger, uri, events(all_kinds()))
    (sweep,) = recording.sweeps
    tags = sweep.data.tags
    assert (tags["mlflow.user"], tags["mlflow.source.git.commit"]) == (user_name(), "abc123")
    assert Recorded.read(ledger) == Recorded(experiment_id=sweep.info.experiment_id, run_id=sweep.info.run_id)
    assert {run.data.tags["mlflow.parentRunId"] for run in recording.trials} == {sweep.info.run_id}
    assert json.loads(recording.artifact(sweep, "summary.json", tmp_path)) == summarize(state, uri).to_json()
    assert recording.artifact(sweep, "rejected.csv", tmp_path).endswith("r,2,,\n")
    assert recording.artifact(sweep, "sweep.yaml", tmp_path) == "name: story\n"
    record = json.loads(recording.artifact(recording.trials[1], "trial.json", tmp_path))
    assert from_json(Candidate, record["candidate"]) == state.trials[1].candidate
    before = recording.everything()
    ledger.advance(CURSOR, 0)
    Tracker(uri).sync(ledger, state)
    assert Recording(uri).everything() == before


def test_the_log_of_the_failed_rank_is_attached_whole(ledger: Ledger, uri: str, tmp_path: Path):
    folder = attempt_folder(ledger.folder, 1, 0, "token-1-0")
    folder.mkdir(parents=True)
    (folder / "rank0.log").write_text("a line\nwith http://me:pw123@host\n")
    recording, _ = synced(ledger, uri, events([measured(0.1), failures()["crashed"]]))
    log = recording.artifact(recording.trials[1], "logs/attempt0-rank0.log", tmp_path)
    assert log.startswith("a line\n")
    assert "pw123" not in log


def test_the_run_table_opens_with_its_columns_order_and_charts(ledger: Ledger, uri: str):
    recording, _ = synced(ledger, uri, events(all_kinds()))
    (experiment,), (sweep,) = recording.experiments, recording.sweeps
    links = sweep_links("http://host:5000/", experiment.experiment_id, sweep.info.run_id, "story")
    for what in ("trials", "charts"):
        view = re.search(r"viewStateShareKey=([\w-]+)", links[what])
        assert view is not None
        assert links[what].endswith("workflowType=machine_learning")
        saved = json.loads(experiment.tags[f"mlflow.sharedViewState.{view[1]}"])
        shown = json.loads(saved["state"])
        assert saved["name"] == f"story: {what}"
        assert shown["selectedColumns"][:2] == ["tags.`tc.role`", "tags.`tc.outcome`"]
        assert shown["selectedColumns"][2] == "metrics.`tokens_per_s_per_device`"
        assert (shown["orderByKey"], shown["orderByAsc"]) == ("metrics.`rank`", True)
        assert {"params.`micro_batch_size`", "params.`zero_stage`"} <= set(shown["selectedColumns"])
        found = recording.client.search_runs([experiment.experiment_id], shown["searchFilter"])
        assert {run.info.run_id for run in found} == {run.info.run_id for run in recording.trials}
    charts = {chart["type"]: chart for chart in shown["compareRunCharts"]}
    assert shown["isAccordionReordered"], "MLflow would sort sections of its own before these"
    assert shown["compareRunSections"][0]["name"] == "Knobs against speed"
    assert charts["PARALLEL"]["metricSectionId"] == shown["compareRunSections"][0]["uuid"]
    assert charts["PARALLEL"]["selectedParams"] == ["micro_batch_size", "dp_replicate", "dp_shard", "zero_stage"]


def test_the_result_does_not_depend_on_when_it_was_written(ledger: Ledger, tmp_path: Path):
    story = events(all_kinds())
    (tmp_path / "late").mkdir()
    (tmp_path / "live").mkdir()
    late, live = new_store(tmp_path / "late"), new_store(tmp_path / "live")
    for i, event in enumerate(story):
        ledger.append(event)
        if i % 2:  # every other look comes from a controller that has just started
            assert Tracker(live).sync(ledger, fold(ledger.events())) > 0
    state = fold(ledger.events())
    Tracker(live).sync(ledger, state)
    ledger.advance(CURSOR, 0)
    Tracker(late).sync(ledger, state)
    one, other = Recording(late), Recording(live)
    assert len(one.sweeps) == len(other.sweeps) == 1
    assert [r.data.metrics for r in (*one.sweeps, *one.trials)] == [
        r.data.metrics for r in (*other.sweeps, *other.trials)
    ]
    assert [r.info.status for r in one.trials] == [r.info.status for r in other.trials]


def test_rows_of_the_database_equal_those_of_mlflows_client(ledger: Ledger, tmp_path: Path):
    """The client writes to a database whose tables have an unknown column."""
    story = events(all_kinds())
    again = [launched(0, attempt=1, at_s=START_S + 900), ended(0, measured(0.07), attempt=1, at_s=START_S + 940)]
    state = fill(ledger, [*story, *again])
    found = []
    for name in ("direct", "client"):
        (tmp_path / name).mkdir()
        uri = new_store(tmp_path / name)
        with closing(sqlite3.connect(tmp_path / name / "mlflow.db")) as db:
            if name == "client":
                db.execute("ALTER TABLE runs ADD COLUMN later INTEGER")
        ledger.advance(CURSOR, 0)
        tracker = Tracker(uri)
        tracker.sync(ledger, state)
        assert isinstance(tracker._runs_writer, ClientWriter if name == "client" else SqliteWriter)
        recording = Recording(uri)
        text = json.dumps(recording.everything(), sort_keys=True)
        for place, run in enumerate((*recording.sweeps, *recording.trials, *recording.checks)):
            files = [file.path for file in recording.client.list_artifacts(run.info.run_id)]
            text = f"{text}\n{run.info.run_id} {run.data.tags['tc.role']} {files}".replace(
                run.info.run_id, f"run {place}"
            )
        found.append(text.replace(str(tmp_path / name), ""))
    assert found[0] == found[1]


@pytest.mark.parametrize("writer", [SqliteWriter, ClientWriter])
def test_the_best_speed_is_the_latest_however_trials_end(ledger: Ledger, uri: str, tmp_path: Path, writer: type):
    """t002 ends before t001, which is faster."""
    if writer is ClientWriter:
        with closing(sqlite3.connect(tmp_path / "mlflow.db")) as db:
            db.execute("ALTER TABLE runs ADD COLUMN later INTEGER")
    story = [created(max_concurrent=2), proposed(0), launched(0), ended(0, measured(0.1))]
    story += [event for trial in (1, 2) for event in (proposed(trial), launched(trial))]
    story += [ended(2, measured(0.09), at_s=5.0), ended(1, measured(0.05), at_s=6.0)]
    recording, state = synced(ledger, uri, story)
    assert state.best is not None and state.best.number == 1
    (sweep,) = recording.sweeps
    assert sweep.data.metrics["best_tokens_per_s_per_device"] == state.score(state.best)


def test_a_deleted_run_or_store_is_not_written_to(ledger: Ledger, uri: str, tmp_path: Path):
    tracker = Tracker(uri)
    state = fill(ledger, [created(), proposed(0), launched(0)])
    assert tracker.sync(ledger, state) == 3
    run = tracker.find_run(state, 0)
    assert run is not None
    tracker.client().delete_run(run)
    state = fill(ledger, [ended(0, measured())])
    assert tracker.sync(ledger, state) == 0
    assert tracker.client().get_run(run).info.status == "RUNNING"
    (tmp_path / "mlflow.db").unlink()
    with pytest.raises(sqlite3.OperationalError):
        SqliteWriter(tmp_path / "mlflow.db", ClientWriter(tracker.client())).can_write()
    assert not (tmp_path / "mlflow.db").exists()


def test_another_experiment_takes_the_place_of_a_deleted_one(tmp_path: Path, uri: str):
    """Restoring it would restore the runs that were deleted with it."""
    client, story = Tracker(uri).client(), [created(), proposed(0), launched(0), ended(0, measured())]
    ids = []
    for place in range(4):
        with Ledger(tmp_path / f"sweep{place}") as ledger:
            state = fill(ledger, [replace(story[0], at_s=float(place)), *story[1:]])
            tracker = Tracker(uri)
            assert sum(iter(lambda t=tracker, s=state: t.sync(ledger, s), 0)) == len(story)
            found = tracker.recorded(state)
        assert found is not None and len(client.search_runs([found.experiment_id])) == 2 + 2 * (place == 3)
        ids.append(found.experiment_id)
        if place < 2:
            client.delete_experiment(found.experiment_id)
    assert ids[2] == ids[3] and len(set(ids)) == 3
    names = [client.get_experiment(one).name for one in ids]
    assert names[1:3] == [f"{names[0]} (2)", f"{names[0]} (3)"]


def test_another_attempt_stays_in_the_same_run(ledger: Ledger, uri: str):
    story = events([failures("node died")["gang_lost"]], finished=False)
    again = [launched(0, attempt=1, at_s=START_S + 30), ended(0, measured(0.1), attempt=1, at_s=START_S + 40)]
    recording, _ = synced(ledger, uri, [*story, again[0]])
    assert [run.info.status for run in recording.trials] == ["RUNNING"]
    Tracker(uri).sync(ledger, fill(ledger, again[1:]))
    (run,) = Recording(uri).trials
    assert (run.info.status, run.data.tags["tc.attempts"], run.data.tags["tc.state"]) == ("FINISHED", "2", "measured")
    assert run.data.tags["tc.attempt.0"] == "gang_lost: rank 0 on host: node died"
    assert run.data.metrics["device_min"] == 0.03333


def test_two_sweeps_of_one_name_do_not_mix(tmp_path: Path, uri: str):
    for folder, start_s in (("one", 0.0), ("two", 5000.0)):
        story = [*events(speeds(0.1))]
        story[0] = type(story[0])(
            **{**{f: getattr(story[0], f) for f in story[0].__slots__}, "at_s": START_S + start_s}
        )
        with Ledger(tmp_path / folder) as opened:
            Tracker(uri).sync(opened, fill(opened, story))
    recording = Recording(uri)
    assert (len(recording.sweeps), len(recording.trials)) == (2, 2)


def test_an_unavailable_mlflow_delays_and_loses_nothing(
    ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "store").write_text("a file where a folder should be")
    uri = f"sqlite:///{tmp_path / 'store' / 'mlflow.db'}"
    story = events(all_kinds())
    tracker = Tracker(uri)
    state = fill(ledger, story)
    with caplog.at_level(logging.WARNING):
        assert [tracker.sync(ledger, state) for _ in range(3)] == [0, 0, 0]
    assert len([r for r in caplog.records if "does not accept results" in r.message]) == 1
    assert ledger.cursor(CURSOR) == 0
    (tmp_path / "store").unlink()
    (tmp_path / "store").mkdir()
    new_store(tmp_path / "store")
    assert tracker.sync(ledger, state) == len(story)
    assert len(Recording(uri).trials) == len(state.trials)


def test_a_store_that_fails_is_one_message_and_no_traceback_of_mlflow(
    uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    tracker = Tracker(uri)
    tracker.prepare()
    (tmp_path / "mlflow.db").unlink()
    with pytest.raises(ConfigError, match=r"cannot use the MLflow store .*: "), tracker.reached():
        tracker.client().create_experiment("after it was deleted")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    owned = f"{tmp_path} belongs to {tmp_path.owner()}: sudo chown -R"
    with pytest.raises(ConfigError, match=re.escape(owned)), tracker.reached():
        raise PermissionError(13, "Permission denied", str(tmp_path / "missing"))


def test_a_dead_server_blocks_nothing(ledger: Ledger, caplog: pytest.LogCaptureFixture):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tracker = Tracker(f"http://user:secret@127.0.0.1:{port}")
    state = fill(ledger, events(speeds(0.1), finished=False))
    assert [tracker.sync(ledger, state) for _ in range(50)] == [0] * 50  # the pause keeps all but the first from trying
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text


def test_an_error_midway_keeps_what_was_written(ledger: Ledger, uri: str, monkeypatch: pytest.MonkeyPatch):
    """A store that fails now and then, at any call, ends up as if it had not."""
    story = events(all_kinds())
    state = fill(ledger, story)
    real, calls = SqliteWriter._write_rows, 0

    def flaky(self: SqliteWriter) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 1:
            raise OSError("database is locked")
        real(self)

    monkeypatch.setattr(SqliteWriter, "_write_rows", flaky)
    tracker, rounds = Tracker(uri), 0
    while ledger.cursor(CURSOR) < len(story) and rounds < 30:
        tracker.sync(ledger, state)
        rounds += 1
    recording = Recording(uri)
    assert rounds > 2
    assert (len(recording.sweeps), len(recording.trials)) == (1, len(state.trials))
    assert recording.trials[1].data.metrics["search_speedup"] == 1.25


def test_secrets_of_the_environment_stay_out(ledger: Ledger, uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_TOKEN", "hunter2hunter2")
    ledger.put_document("sweep_yaml", {"text": "tracking: {uri: 'http://me:pw123@host'}\n"})
    outcome = Crashed(evidence=evidence("cannot log in with hunter2hunter2 at http://me:pw123@host"))
    recording, _ = synced(ledger, uri, events([measured(0.1), outcome]))
    stored = json.dumps(recording.everything())
    for run in (*recording.sweeps, *recording.trials):
        for artifact in recording.client.list_artifacts(run.info.run_id):
            if not artifact.is_dir:
                stored += recording.artifact(run, artifact.path, tmp_path)
    assert "cannot log in with ***" in stored
    assert "hunter2" not in stored
    assert "pw123" not in stored


def test_names_are_safe_in_paths():
    assert run_records.slug("Llama on 1x2 / AMD: ../x") == "llama-on-1x2-amd-..-x"
    assert run_records.slug("../..") == ""


def test_experiments_of_other_models_are_named_after_their_shape():
    for model, name in (
        (ResNetModel(), "resnet50-w64-i224 on 1x2 test CPU"),
        (LinearModel(), "linear-8192-l9 on 1x2 test CPU"),
    ):
        workload = Workload(model=model, data=RandomData(), seq_length=1, global_batch_size=8)
        assert run_records.experiment_name(created(workload=workload)) == name


def test_a_guided_sweep_records_reason_and_prediction_of_every_trial(tmp_path: Path):
    state = submit(tmp_path, {**SWEEP, "search": {"early_stop": "off"}}).state
    recording = Recording(home(tmp_path).default_tracking_uri)
    assert len(recording.trials) == len(state.trials) > 3
    for run, trial in zip(recording.trials, state.trials, strict=True):
        assert run.data.tags["tc.reason"] == trial.reason
        assert trial.reason in run.data.tags["mlflow.note.content"]
        found = run.data.metrics
        world_size = trial.candidate.layout.world_size
        assert trial.expected is not None
        expected_s = trial.expected.step_time_s
        assert found["predicted/step_time_ms"] == float(f"{1000 * expected_s:.4g}")
        speed = state.sweep.workload.tokens_per_step / expected_s / world_size
        assert found["predicted/tokens_per_s_per_device"] == float(f"{speed:.4g}")
        assert found["predicted/peak_memory_gib"] > 0 and 0 < found["predicted/probability_fits"] <= 1
        if trial.number:
            assert f"{speed:,.0f} tokens/s/p expected" in trial.reason
        if trial.measurement:
            assert found["step_time_over_predicted"] == pytest.approx(
                trial.measurement.step_time_s / expected_s, rel=1e-3
            )


def test_names_of_custom_knobs_are_valid_in_mlflow():
    from mlflow.utils.validation import _validate_param

    names = ("$OMP_NUM_THREADS", "--tp-comm-overlap", "config:zero_optimization.overlap_comm", "width")
    own = tuple(CustomChoice(name=name, value=1) for name in names)
    trial = Trial(number=1, candidate=Candidate(own=own), origin="search", reason="", proposed_at_s=0.0)
    params = run_records.trial_params(trial)
    for name, value in params.items():
        _validate_param(name, value)
    assert {"env:OMP_NUM_THREADS", *names[1:]} <= set(params)


@pytest.mark.exhaustive
def test_two_sweeps_starting_in_an_empty_home_share_one_complete_store(tmp_path: Path):
    """MLflow's migrations take no lock: made twice at once, the store could never be used again."""
    uri = f"sqlite:///{tmp_path}/für alle/mlflow.db"
    code = f"from orchestrator.tracking.mlflow_tracker import Tracker; Tracker({uri!r}).client()"
    started = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(3)]
    errors = [one.communicate(timeout=180)[1] for one in started]
    assert [one.returncode for one in started] == [0, 0, 0], errors
    assert len(MlflowClient(tracking_uri=uri).search_experiments()) == 1
    assert sorted(path.name for path in (tmp_path / "für alle").iterdir() if path.suffix == ".db") == ["mlflow.db"]
