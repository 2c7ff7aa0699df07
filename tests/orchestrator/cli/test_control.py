"""Pause, drain and cancel from the command line, with and without a controller at work."""

import json
import threading

import pytest

from orchestrator.controller.step import apply_requests
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from tests.support import long_story
from tests.support.cli_homes import controller, keep, run, running

GOALS = {"pause": "paused", "drain": "paused", "cancel": "cancelled"}


def left_alone(folder):
    return keep(folder, "story", long_story.events(long_story.speeds(0.1, 0.08), finished=False))


@pytest.mark.parametrize("action", GOALS)
def test_without_a_controller_it_is_done_at_once(tmp_path, action):
    left_alone(tmp_path)
    result = run(action, "story", "--home", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert (body["state"], body["done"], body["action"], body["request"]) == (GOALS[action], True, action, 1)
    assert json.loads(run("ps", "--home", tmp_path, "--json").stdout)[0]["state"] == GOALS[action]


def test_a_sweep_that_is_over_is_refused(tmp_path):
    left_alone(tmp_path)
    assert run("cancel", "story", "--home", tmp_path).exit_code == 0
    again = run("pause", "story", "--home", tmp_path)
    assert (again.exit_code, again.stdout) == (2, "")
    assert "already cancelled" in again.stderr


class Controller(threading.Thread):
    """Holds the sweep until a request comes; then complies, after a while, or dies."""

    def __init__(self, home, name, *, complies):
        super().__init__()
        self._folder, self._complies = Home(home).sweep_folder(name), complies
        self._is_held, self._pause = threading.Event(), threading.Event()
        self.start()
        self._is_held.wait(30.0)

    def run(self):
        with Ledger(self._folder) as ledger, ledger.hold():
            self._is_held.set()
            while not ledger.requests(0):
                self._pause.wait(0.01)
            self._pause.wait(0.5)
            if self._complies:
                apply_requests(ledger, ledger.folder)


@pytest.mark.parametrize("action", GOALS)
def test_with_a_controller_it_is_waited_for(tmp_path, action):
    left_alone(tmp_path).close()
    at_work = Controller(tmp_path, "story", complies=True)
    result = run(action, "story", "--home", tmp_path, "--json")
    at_work.join()
    assert result.exit_code == 0, result.output
    body = json.loads(result.stdout)
    assert (body["state"], body["done"]) == (GOALS[action], True)
    assert "story is running" in result.stderr


def test_a_request_without_waiting_is_left_to_the_controller(tmp_path):
    ledger = keep(tmp_path, "busy", running("busy"), controller=controller())
    with ledger.hold():
        result = run("drain", "busy", "--home", tmp_path, "--no-wait", "--json")
    body = json.loads(result.stdout)
    assert (result.exit_code, body["state"], body["done"]) == (0, "running", False)
    assert [request.body["action"] for request in ledger.requests(0)] == ["drain"]


def test_waiting_ends_when_the_controller_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr("orchestrator.status.overview.GONE_S", 0.0)
    left_alone(tmp_path).close()
    at_work = Controller(tmp_path, "story", complies=False)
    result = run("cancel", "story", "--home", tmp_path, "--json")
    at_work.join()
    assert result.exit_code == 1, result.output
    body = json.loads(result.stdout)
    assert (body["state"], body["done"]) == ("interrupted", False)
