"""Which sweeps there are and where one stands, seen from outside while others run them."""

import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from cluster.base import GangProgress
from orchestrator.controller.observer import Heartbeat
from orchestrator.live.live_pages import SweepView
from orchestrator.process_support import PLAIN
from orchestrator.status.overview import budgets, changes, follow, show, summary_of
from orchestrator.sweep.events import ActionRequested, FinishCause, SweepFinished, SweepPaused
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home, read_snapshot
from orchestrator.terminal.sweep_screen import LiveView
from tests.support import long_story, virtual_sweeps
from tests.support.cli_homes import LEASE, controller, keep, keep_running, run, running
from tests.support.story import ended, measured


def test_all_figures_of_a_running_sweep_are_of_now(tmp_path):
    """Its last event was 50 min ago."""
    story = [replace(event, at_s=event.at_s - 3000.0) for event in running("busy")]
    home = Home(tmp_path)
    with keep(tmp_path, "busy", story, lease=LEASE, controller=controller()) as ledger, ledger.hold():
        sweep = home.read("busy")
        summary, used = summary_of(sweep, home), {spent.name: spent.used for spent in budgets(sweep)}
        result = json.loads(run("report", "busy", "--home", tmp_path, "--json").stdout)
        parts = SweepView(home, "busy", PLAIN, lambda _sweep: {}).parts()
    assert summary is not None and summary.device_hours == used["device_hours"] > 3.0
    assert summary.duration_s == pytest.approx(used["wall_time_s"], abs=15.0) and summary.duration_s > 3000.0
    assert result["duration_s"] > 3000.0 and result["device_hours"] > 3.0
    assert f"{used['device_hours']:.2f} of 3.00" in parts["html/spending"]
    assert f"{used['device_hours']:.2f} device-hours; in 55 min" in parts["html/spending"]
    assert "device-seconds" not in parts["html/verdict"]


def rows(folder):
    result = run("ps", "--home", folder, "--json")
    assert result.exit_code == 0, result.output
    return {row["sweep"]: row for row in json.loads(result.stdout)}


def last_at_s(events):
    return events[-1].at_s + 1.0


def test_ps_shows_running_waiting_paused_and_interrupted_sweeps(tmp_path):
    story = long_story.events(long_story.speeds(0.1, 0.08), finished=False)
    at_s = last_at_s(story)
    drain_request = ActionRequested(at_s=at_s, request=1, action="drain", by="anna@desk")
    keep(tmp_path, "done", long_story.events(long_story.all_kinds()))
    keep(tmp_path, "left", story, controller=controller(), lease=LEASE)
    keep(tmp_path, "paused", [*story, SweepPaused(at_s=at_s, reason="paused by anna@desk")])
    keep(
        tmp_path,
        "failed",
        [
            *story,
            SweepFinished(
                at_s=at_s, status="failed", reason="always the same error", cause=FinishCause.FAULTS_IN_A_ROW
            ),
        ],
    )
    keep(tmp_path, "debris")
    draining = keep(
        tmp_path, "draining", [*story, drain_request], controller=controller(job="tune-draining", mode="ray job")
    )
    busy, spec = keep_running(tmp_path), {"cluster": {"num_nodes": 8, "priority": 5}}
    waits = {"nodes": [], "waiting": "needs 8 nodes, 3 are free", "at_s": 0.0}
    waiting = keep(tmp_path, "waiting", controller=controller(), lease=waits, spec=spec)
    with busy.hold(), waiting.hold(), draining.hold():
        found, shown = rows(tmp_path), run("ps", "--home", tmp_path).stdout
    assert {name: row["state"] for name, row in found.items()} == {
        "busy": "running",
        "waiting": "waiting",
        "draining": "draining",
        "left": "interrupted",
        "paused": "paused",
        "done": "finished",
        "failed": "failed",
    }
    assert list(found)[-3:] != sorted(found)[-3:], "those at work come first"
    assert [found["waiting"][key] for key in ("reason", "priority")] == ["needs 8 nodes, 3 are free", 5]
    assert found["busy"]["trials"] | {"done": 5, "running": 2, "waiting": 1, "total": 8} == found["busy"]["trials"]
    assert found["busy"]["device_hours"] * 3600 == pytest.approx(5.0 + 2 * 2 * 90.0, abs=20.0)
    assert found["busy"]["age_s"] == pytest.approx(300.0, abs=20.0)
    assert (found["busy"]["controller"]["pid"], found["left"]["controller"]) == (4242, None)
    best = found["done"]["best_of_search"]
    assert (best["speedup"]["verdict"], best["trial"]) == ("faster", 1)
    assert re.search(r"busy +running +5/40 +2 +1 +1.25x t001 +0\.10/3 +5 min", shown)
    assert "needs 8 nodes, 3 are free; priority 5" in shown
    assert "Ray job tune-draining" in shown
    assert "always the same error" in shown


LOOK = """
import sys
from orchestrator.cli.main import main
for line in ("ps", "status busy", "explain busy 3", "logs busy 3"):
    try:
        main([*line.split(), "--home", sys.argv[1]], prog_name="tune-cluster")
    except SystemExit as ended:
        assert not ended.code, line
"""


def test_a_read_only_home_can_be_shown(tmp_path):
    """A real read-only mount: root may write anywhere else."""
    ledger = keep_running(tmp_path)
    ledger.close()
    steps = ["mount --bind $0 $0", "mount -o remount,bind,ro $0", "! touch $0/sweeps/busy/x", '$1 -c "$2" $0']
    words = ["unshare", "-m", "sh", "-c", " && ".join(steps), tmp_path, sys.executable, LOOK]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("interrupted") >= 2


class Recorder:
    """A console to look back at."""

    def __init__(self):
        self.file = io.StringIO()
        self.view = LiveView(Console(file=self.file, width=120))


def test_watch_follows_a_sweep_that_another_thread_writes_to_its_end(tmp_path):
    story = running("busy")
    at_s = last_at_s(story)
    more = [ended(5, measured(0.05), at_s=at_s), ended(6, measured(0.2), at_s=at_s)]
    end = SweepFinished(at_s=at_s + 1.0, status="finished", reason="enough", cause=FinishCause.EXHAUSTED)
    is_watched = threading.Event()
    keep_running(tmp_path).close()

    def go_on():
        with Ledger(Home(tmp_path).sweep_folder("busy")) as ledger, ledger.hold():
            is_held.set()
            is_watched.wait(30.0)
            for event in (*more, end):
                ledger.append(event)

    is_held = threading.Event()
    thread = threading.Thread(target=go_on)
    thread.start()
    is_held.wait(30.0)
    before, lines, plain_lines = None, [], Recorder()
    with Ledger(Home(tmp_path).sweep_folder("busy"), read_only=True) as ledger, plain_lines.view as view:
        for seen in follow(ledger, Home(tmp_path), poll_s=0.01):
            lines += changes(seen, before)
            show(view, seen, before)
            before = seen
            is_watched.set()
    thread.join()
    trials = [line for line in lines if line["change"] == "trial"]
    assert [(line["trial"], line["state"]) for line in trials[:8]][5:] == [
        (5, "running"),
        (6, "running"),
        (7, "proposed"),
    ]
    assert [(line["trial"], line["state"]) for line in trials[8:]] == [(5, "measured"), (6, "measured")]
    assert {line["change"] for line in lines} == {"sweep", "lease", "trial", "progress"}
    assert lines[-1] | {"change": "sweep", "state": "finished", "reason": "enough"} == lines[-1]
    printed = plain_lines.file.getvalue()
    assert "2 more nodes are busy" in printed
    assert re.search(r"t005 .* best so far", printed)


def test_watch_ends_with_the_state_and_fails_by_exit_code(tmp_path):
    story = long_story.events(long_story.speeds(0.1), finished=False)
    keep(tmp_path, "paused", [*story, SweepPaused(at_s=last_at_s(story), reason="drained")])
    keep(
        tmp_path,
        "failed",
        [
            *story,
            SweepFinished(
                at_s=last_at_s(story), status="failed", reason="always crashes", cause=FinishCause.FAULTS_IN_A_ROW
            ),
        ],
    )
    for name, code in (("paused", 0), ("failed", 1)):
        assert run("watch", name, "--home", tmp_path).exit_code == code
        lines = [json.loads(line) for line in run("watch", name, "--home", tmp_path, "--json").stdout.splitlines()]
        assert [line["change"] for line in lines] == ["lease", "trial", "sweep"]
        assert lines[-1]["state"] == name


def test_interrupting_a_watch_leaves_the_sweep_alone(tmp_path):
    ledger = keep_running(tmp_path)
    tool = Path(sys.executable).with_name("tune-cluster")
    with ledger.hold():
        watching = subprocess.Popen([tool, "watch", "busy", "--home", tmp_path], stderr=subprocess.PIPE, text=True)
        first = watching.stderr.readline()
        watching.send_signal(signal.SIGINT)
        _, rest = watching.communicate(timeout=60)
        assert ledger.is_held()
    assert (first, watching.returncode) == ("busy: running, 2 more nodes are busy\n", 130)
    assert (
        f"no longer watching; the sweep busy keeps running. To watch it again: {tool} watch busy --home {tmp_path}\n"
        in rest
    )
    assert ledger.requests(0) == []


def test_a_sweep_left_alone_is_not_watched_forever(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.status.overview.GONE_S", 0.0)
    ledger = keep(tmp_path, "left", long_story.events(long_story.speeds(0.1), finished=False))
    assert [seen.phase for seen in follow(ledger, Home(tmp_path), poll_s=0.0)] == ["interrupted"]


def test_the_status_of_a_controller_is_shown_as_written(tmp_path, monkeypatch):
    monkeypatch.setenv("TUNE_CLUSTER_CONTROLLER_MODE", "ray job")
    monkeypatch.setenv("TUNE_CLUSTER_JOB", "tune-busy")
    ledger = keep(tmp_path, "busy", running("busy"))
    beat = Heartbeat(ledger, address="head:6379")
    beat.on_lease(("n1", "n2"), "one more is busy")
    beat.on_progress(6, GangProgress(attempt_id="a", token="t", phase="warmup", step=3, step_time_s=0.5))
    with ledger.hold():
        seen = Home(tmp_path).read("busy")
    assert seen.controller is not None
    assert (seen.controller.mode, seen.controller.job, seen.controller.address) == ("ray job", "tune-busy", "head:6379")
    assert (seen.lease.nodes, seen.lease.waiting) == (("n1", "n2"), "one more is busy")
    assert [(number, progress.phase, progress.step) for number, progress in seen.live.items()] == [(6, "warmup", 3)]


def test_a_second_read_reads_only_new_events(tmp_path):
    ledger = keep(tmp_path, "story", running("story"))
    first = read_snapshot(ledger)
    ledger.append(ended(5, measured(0.05), at_s=time.time()))
    second = read_snapshot(ledger, first)
    assert len(second.news) == 1
    assert second.state == read_snapshot(ledger).state


def test_a_real_simulated_sweep_looks_the_same_from_outside(tmp_path):
    result = virtual_sweeps.submit(tmp_path, virtual_sweeps.SWEEP)
    home = virtual_sweeps.home(tmp_path)
    row = rows(home.path)["first"]
    assert row["state"] == "finished"
    assert row["best_of_search"] == result.summary.to_json()["best_of_search"]
    assert row["trials"]["done"] == len(result.state.trials)
    assert row["device_hours"] == result.summary.device_hours
    seen = home.read("first")
    assert (seen.state, seen.live, seen.requests) == (result.state, {}, ())
    refused = run("logs", "first", "0", "--home", home.path)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "its cluster is simulated" in refused.stderr
