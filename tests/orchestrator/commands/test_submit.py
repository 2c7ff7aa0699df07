"""Who runs a sweep already, while its controllers come and go."""

import threading
from contextlib import contextmanager

import pytest

from orchestrator import process_support
from orchestrator.commands import submission
from orchestrator.commands.submission import CONTROLLER_LOG, find_running
from orchestrator.sweep.snapshot import Home
from tests.support.cli_homes import keep_running


@contextmanager
def supervised(home):
    """A supervisor of the sweep ``busy`` lives until what is given is called."""
    with (home.sweep_folder("busy") / CONTROLLER_LOG).open("ab") as log:
        assert process_support.take(log)
        yield log.close


def test_a_controller_at_work_is_found(tmp_path):
    ledger = keep_running(tmp_path)
    with supervised(Home(tmp_path)), ledger.hold():
        found = find_running(Home(tmp_path), "busy")
    assert found is not None and found.is_attached and found.mode == "detached"


def test_a_supervisor_that_is_about_to_leave_an_opened_sweep_is_no_controller(tmp_path):
    keep_running(tmp_path).close()
    with supervised(Home(tmp_path)) as leave:
        leaving = threading.Timer(1.0, leave)
        leaving.start()
        assert find_running(Home(tmp_path), "busy") is None
        leaving.join()


def test_a_supervisor_that_starts_another_controller_is_attached_to(tmp_path):
    ledger = keep_running(tmp_path)
    with supervised(Home(tmp_path)):
        held = ledger.hold()
        starting = threading.Timer(1.0, held.__enter__)
        starting.start()
        found = find_running(Home(tmp_path), "busy")
        starting.join()
        held.__exit__(None, None, None)
    assert found is not None and found.is_attached


def test_a_supervisor_that_waits_for_long_is_attached_to(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(submission, "ENDING_S", 1.0)
    keep_running(tmp_path).close()
    with supervised(Home(tmp_path)):
        found = find_running(Home(tmp_path), "busy")
    assert found is not None and found.is_attached
