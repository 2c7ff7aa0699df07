"""Notifications: a real HTTP server that is down, slow and failing in turn, a real command, a real ledger."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.hardware.topology import Device
from orchestrator import notifications
from orchestrator import notifications as notify
from orchestrator.config.settings import EVENTS, NotifySection
from orchestrator.controller.step import decide
from orchestrator.errors import ConfigError
from orchestrator.notifications import Notifier, check_notify, notification
from orchestrator.sweep.events import AttemptLaunched, Budget, Event, Finish, FinishCause, SweepFinished, SweepPaused
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from tests.support import ROOT
from tests.support.story import created, ended, evidence, failures, launched, measured, proposed
from trials.outcome import GangLost, Outcome

SECRET = "hunter2-hunter2"


@dataclass
class Receiver:
    """What a webhook got, and how it answers."""

    port: int
    answer: Callable[[], int] = lambda: 200
    got: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/hook/{SECRET}"

    @property
    def events(self) -> list[str]:
        return [body["event"] for body in self.got]


def serve(receiver: Receiver) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.paths.append(self.path)
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = receiver.answer()
            if status == 200:
                receiver.got.append(body)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", f"http://127.0.0.1:{receiver.port}/elsewhere")
            self.end_headers()

        def log_message(self, *_args: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", receiver.port), Handler)
    receiver.port = server.server_port
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    receiver = Receiver(port=0)
    server = serve(receiver)
    monkeypatch.setenv("TEST_WEBHOOK", receiver.url)
    monkeypatch.setattr(notify, "FIRST_RETRY_S", 0.01)
    yield receiver
    server.shutdown()
    server.server_close()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "story") as opened:
        yield opened


def trial(number: int, outcome: Outcome) -> list[Event]:
    return [proposed(number), launched(number), ended(number, outcome)]


FAULT = failures()["crashed"]
FINISHED = SweepFinished(
    at_s=9.0, status="finished", reason="every legal candidate was tried", cause=FinishCause.EXHAUSTED
)


def write(ledger: Ledger, *events: Event) -> None:
    for event in events:
        ledger.append(event)  # type: ignore[arg-type]  # no ticks here


def sync_until(notifier: Notifier, ledger: Ledger, is_done: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < deadline_s
        notifier.sync(ledger, fold(ledger.events()))
        time.sleep(0.02)


# ---- what is reported ----


def reported(*events: Event, after_failures: int = 3) -> list[str | None]:
    """What each event calls for."""
    found = []
    for i, event in enumerate(events):
        entry = type("Entry", (), {"seq": i + 1, "event": event})()
        found.append(notification(entry, fold(events[: i + 1]), reversed(events[:i]), after_failures=after_failures))
    return found


def test_a_sweep_ended_by_its_budget_is_reported_as_budget() -> None:
    events = [created(budget=Budget(max_trials=1)), *trial(0, measured())]
    (finish,) = decide(fold(events))
    assert isinstance(finish, Finish)
    end = SweepFinished(at_s=9.0, status=finish.status, reason=finish.reason, cause=finish.cause)
    assert reported(*events, end)[-1] == "budget"
    assert reported(*events, FINISHED)[-1] == "finished"
    for status in ("failed", "cancelled"):
        assert (
            reported(*events, SweepFinished(at_s=9.0, status=status, reason="x", cause=FinishCause.EXHAUSTED))[-1]
            == status
        )  # type: ignore[arg-type]
    assert reported(*events, SweepPaused(at_s=9.0, reason="x"))[-1] == "paused"


def test_consecutive_faults_are_reported_once_without_deliberate_kills() -> None:
    killed = GangLost(evidence=evidence(), cause="controller")
    outcomes = [FAULT, killed, FAULT, measured(), FAULT, FAULT, killed, FAULT, FAULT, FAULT]
    events = [created(), *(event for number, outcome in enumerate(outcomes) for event in trial(number, outcome))]
    numbers = [(i - 1) // 3 for i, what in enumerate(reported(*events)) if what == "repeated_failure"]
    assert numbers == [7]


def test_a_node_out_of_service_is_reported_once() -> None:
    events: list[Event] = [created(budget=Budget(strikes_per_node=2))]
    for attempt in range(3):
        place = (Device(node="host", index=0),)
        where = AttemptLaunched(at_s=2.0, trial=0, attempt=attempt, token=f"t{attempt}", ranks=place, num_devices=1)
        lost = ended(0, GangLost(evidence=evidence()), token=f"t{attempt}")
        events += [*([proposed(0)] if attempt == 0 else []), where, lost]
    assert [i for i, what in enumerate(reported(*events, after_failures=99)) if what] == [5]


# ---- how it is delivered ----


def test_an_unreliable_webhook_gets_everything_in_order_once_it_is_up(
    webhook: Receiver, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    answers = iter([500, 302, 200, 404])
    webhook.answer = lambda: next(answers, 200)
    notifier = Notifier(NotifySection(webhook_env="TEST_WEBHOOK", after_failures=1))
    write(ledger, created(), *trial(0, measured()), *trial(1, FAULT))
    sync_until(notifier, ledger, lambda: len(webhook.got) == 1)
    write(ledger, *trial(2, measured(0.05)), FINISHED)
    sync_until(notifier, ledger, lambda: len(webhook.got) == 2)
    assert webhook.events == ["repeated_failure", "finished"]
    assert set(webhook.paths) == {f"/hook/{SECRET}"}, "no redirect was followed"
    ids = [body["id"] for body in webhook.got]
    assert len(set(ids)) == 2
    failed, finished = webhook.got
    assert failed["failures"] == [{"trial": 1, "kind": "crashed", "message": "rank 0 on host: boom"}]
    assert finished["state"] == "finished"
    assert finished["best_of_search"]["trial"] == 2
    assert finished["best_of_search"]["speedup"]["value"] > 1
    assert ledger.cursor("notify-webhook") == ledger.last_seq()
    notifier.sync(ledger, fold(ledger.events()))
    assert len(webhook.got) == 2
    assert SECRET not in caplog.text
    assert "responded with 500" in caplog.text


def test_a_slow_webhook_blocks_neither_sweep_nor_command_and_is_served_later(
    webhook: Receiver, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = threading.Event()
    webhook.answer = lambda: 200 if may_answer.wait(60) else 500
    output_file = tmp_path / "received"
    script = "import os, sys; open(sys.argv[1], 'w').write(os.environ['TUNE_CLUSTER_EVENT'] + ' ' + sys.stdin.read())"
    command = [sys.executable, "-c", script, str(output_file)]
    section = NotifySection(webhook_env="TEST_WEBHOOK", command=command, after_failures=1)
    notifier = Notifier(section)
    write(ledger, created(), *trial(0, FAULT))
    sync_until(notifier, ledger, lambda: output_file.exists() and output_file.read_text() != "")
    assert webhook.got == []
    event, _, body = output_file.read_text().partition(" ")
    assert event == "repeated_failure"
    assert json.loads(body)["sweep"] == "story"

    monkeypatch.setattr(notify, "FLUSH_S", 0.5)
    write(ledger, *trial(1, measured()), FINISHED)
    notifier.sync(ledger, fold(ledger.events()))  # returns without an answer
    assert webhook.got == []

    may_answer.set()  # the next controller, or `submit` again, delivers what is left, the first ones first
    monkeypatch.setattr(notify, "FLUSH_S", 60.0)
    Notifier(section).sync(ledger, fold(ledger.events()))
    assert webhook.events[-2:] == ["repeated_failure", "finished"]


def test_a_failing_command_is_reported_once_without_secrets(
    ledger: Ledger, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_SECRET", SECRET)
    monkeypatch.setenv("TUNE_CLUSTER_WEBHOOK", SECRET)
    monkeypatch.setattr(notify, "FIRST_RETRY_S", 0.0)
    words = "import os, sys; sys.exit(f\"{os.environ['TEAM_SECRET']} {os.environ.get('TUNE_CLUSTER_WEBHOOK')}\")"
    notifier = Notifier(NotifySection(command=[sys.executable, "-c", words], on=["finished"]))
    write(ledger, created(), *trial(0, measured()), FINISHED)
    for _ in range(2):
        notifier.sync(ledger, fold(ledger.events()))
    (record,) = caplog.records
    assert "exited with code 1: *** None" in record.message
    assert ledger.cursor("notify-command") == ledger.last_seq() - 1


def test_a_hanging_command_is_killed_at_its_deadline_with_its_children(
    ledger: Ledger, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "TIMEOUT_S", 1.0)
    pids = tmp_path / "pids"
    notifier = Notifier(NotifySection(command=["sh", "-c", f"sleep 300 & echo $$ $! > {pids}; wait"], on=["finished"]))
    write(ledger, created(), *trial(0, measured()), FINISHED)
    notifier.sync(ledger, fold(ledger.events()))
    (record,) = caplog.records
    assert "did not end within 1 s" in record.message
    give_up_s = time.monotonic() + 30.0  # the kernel takes a moment on a busy machine
    while any(_is_alive(int(pid)) for pid in pids.read_text().split()):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    assert ledger.cursor("notify-command") == ledger.last_seq() - 1


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_delivery_that_hangs_is_abandoned_and_does_not_touch_the_cursor_of_the_next_one(
    webhook: Receiver, ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    first, now_s = threading.Event(), [0.0]
    answers = iter([lambda: 200 if first.wait(60) else 500])
    webhook.answer = lambda: next(answers, lambda: 200)()
    notifier = Notifier(NotifySection(webhook_env="TEST_WEBHOOK", after_failures=1), clock=lambda: now_s[0])
    write(ledger, created(), *trial(0, FAULT))
    sync_until(notifier, ledger, lambda: len(webhook.paths) == 1)
    hanging = notifier._feeds[0]._delivery
    assert hanging is not None
    now_s[0] += notify.DELIVERY_LIMIT_S + 1.0
    sync_until(notifier, ledger, lambda: not notifier._feeds[0].is_busy)
    assert "in time" in caplog.text
    now_s[0] += notify.LAST_RETRY_S
    write(ledger, *trial(1, FAULT))
    sync_until(notifier, ledger, lambda: ledger.cursor("notify-webhook") == ledger.last_seq())
    first.set()  # it is answered after all
    hanging._thread.join(30.0)
    assert ledger.cursor("notify-webhook") == ledger.last_seq()
    assert {body["failures"][0]["trial"] for body in webhook.got} == {0}
    assert len(caplog.records) == 1


def test_undelivered_events_of_a_killed_controller_are_delivered_by_the_next(
    webhook: Receiver, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies while the first of two events is delivered."""
    script = (
        "import sys, time; from pathlib import Path; from orchestrator.config.settings import NotifySection; "
        "from orchestrator.notifications import Notifier; from orchestrator.sweep.ledger import Ledger; "
        "from orchestrator.sweep.fold import fold; ledger = Ledger(Path(sys.argv[1])); "
        "Notifier(NotifySection(webhook_env='TEST_WEBHOOK', after_failures=1)).sync(ledger, fold(ledger.events())); "
        "time.sleep(600)"
    )
    may_answer = threading.Event()
    webhook.answer = lambda: 200 if may_answer.wait(60) else 500
    write(ledger, created(), *trial(0, FAULT), *trial(1, measured()))
    command = [sys.executable, "-c", script, str(ledger.folder)]
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        deadline_s = time.monotonic() + 60
        while not webhook.paths:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    finally:
        child.kill()
        child.wait()
    assert SECRET not in " ".join(command)
    may_answer.set()
    write(ledger, FINISHED)
    Notifier(NotifySection(webhook_env="TEST_WEBHOOK", after_failures=1)).sync(ledger, fold(ledger.events()))
    assert webhook.events[-2:] == ["repeated_failure", "finished"]


def test_nothing_is_started_for_successful_trials(webhook: Receiver, ledger: Ledger) -> None:
    notifier = Notifier(NotifySection(webhook_env="TEST_WEBHOOK"))
    write(ledger, created(), *trial(0, measured()), *trial(1, failures()["oom"]))
    assert notifier.sync(ledger, fold(ledger.events())) == 0
    assert not any(feed.is_busy for feed in notifier._feeds)


def test_two_runs_of_one_file_have_different_ids() -> None:
    ids = [notify.payload("paused", 3, fold([created(at_s=at_s)]))["id"] for at_s in (1.0, 2.0, 2.0)]
    assert ids[0] != ids[1] == ids[2]


def test_payload_holds_no_secret_of_a_failing_trial(
    webhook: Receiver, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEAM_TOKEN", "sesame-sesame")
    notifier = Notifier(NotifySection(webhook_env="TEST_WEBHOOK"))
    write(ledger, created(), *trial(0, failures("cannot open with sesame-sesame")["crashed"]), FINISHED)
    notifier.sync(ledger, fold(ledger.events()))
    assert webhook.events == ["finished"]
    assert "sesame" not in json.dumps(webhook.got)


# ---- the section ----


@pytest.mark.parametrize(
    ("data", "word"),
    [
        ({"webhook_env": "https://hooks.example/T0/abc"}, "name of the environment variable"),
        ({"webhook_env": "MY_URL"}, "does not look like"),
        ({"webhook_env": "A_WEBHOOK", "webhook_file": "x"}, "mutually exclusive"),
        ({"on": ["finished"]}, "no receiver"),
        ({"command": []}, "at least 1"),
        ({"command": "mail me"}, "list"),
        ({"command": ["mail"], "on": ["done"]}, "finished"),
        ({"command": ["mail"], "on": ["failed", "failed"]}, "twice"),
    ],
)
def test_section_refuses(data: dict[str, Any], word: str) -> None:
    with pytest.raises(ValidationError, match=word) as caught:
        NotifySection.model_validate(data)
    assert "T0/abc" not in "".join(error["msg"] for error in caught.value.errors())


def test_all_events_are_reported_unless_configured_otherwise() -> None:
    assert tuple(NotifySection(command=["cat"]).on) == EVENTS
    with pytest.raises(ValidationError, match="no receiver"):
        NotifySection()


def test_check_names_missing_settings_without_showing_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="TEST_WEBHOOK is not set"):
        check_notify(NotifySection(webhook_env="TEST_WEBHOOK"))
    monkeypatch.setenv("TEST_WEBHOOK", f"{SECRET}/no-url")
    with pytest.raises(ConfigError, match="contains no URL") as caught:
        check_notify(NotifySection(webhook_env="TEST_WEBHOOK"))
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match="webhook_file"):
        check_notify(NotifySection(webhook_file=str(tmp_path / "missing")))
    with pytest.raises(ConfigError, match="not found"):
        check_notify(NotifySection(command=["/no/such/program"]))
    (tmp_path / "url").write_text("https://hooks.example/x\n")
    check_notify(NotifySection(webhook_file=str(tmp_path / "url"), command=["true"]))
