"""Pause, drain, cancel and retry of whole sweeps in virtual time: with a controller at work, and without one."""

import threading
import time

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import main
from orchestrator.commands import steering
from orchestrator.controller import controller
from orchestrator.errors import ConfigError
from orchestrator.sweep.events import ActionRequested, AttemptEnded, ControllerStarted
from orchestrator.sweep.ledger import Ledger
from tests.support.sweep_files import write
from tests.support.virtual_sweeps import SWEEP, Quiet, home, resume, submit_file
from trials.outcome import Measured

NAME = SWEEP["name"]


class AskAfter(Quiet):
    """Sends a request, as another process would, once so many trials have ended."""

    def __init__(self, found, action, num_ended):
        self.found, self.action, self.num_ended = found, action, num_ended
        self.answer = None

    def on_state(self, state):
        if self.answer is None and len(state.end_order) >= self.num_ended and state.running:
            self.answer = steering.request_action(NAME, self.found, self.action)


def sweep(**changes):
    content = {**SWEEP, **changes}
    return {
        **content,
        "search": {"sampler": "random", "transfer": False, "early_stop": "off", **changes.get("search", {})},
    }


def events_of(found):
    with found.open(NAME) as ledger:
        return list(ledger.events())


def measurements(events):
    ends = [event for event in events if isinstance(event, AttemptEnded) and isinstance(event.outcome, Measured)]
    return {event.trial: event.outcome for event in ends}, len(ends)


@pytest.mark.parametrize("action", ["pause", "drain"])
def test_a_stopped_sweep_resumes_and_ends_as_if_undisturbed(tmp_path, action):
    undisturbed = submit_file(write(tmp_path, sweep()), home(tmp_path / "a"))
    found = home(tmp_path / "b")
    watch = AskAfter(found, action, num_ended=2)
    paused = submit_file(write(tmp_path, sweep()), found, watch)
    assert watch.answer.is_controlled
    assert paused.state.status == "paused"
    assert not paused.state.running
    num_lost = sum(trial.status == "gang_lost" for trial in paused.state.trials)
    assert num_lost == (1 if action == "pause" else 0)
    ended = resume(NAME, found)
    assert ended.state.status == "finished"
    assert [trial.candidate for trial in ended.state.trials] == [t.candidate for t in undisturbed.state.trials]
    assert ended.state.best.number == undisturbed.state.best.number
    once, num_measured = measurements(events_of(found))
    assert len(once) == num_measured
    assert all(trial.num_lost == 0 for trial in ended.state.trials)
    with pytest.raises(ConfigError, match="already finished"):
        steering.request_action(NAME, found, "pause")
    with pytest.raises(ConfigError, match=r"has ended \(finished"):
        resume(NAME, found)


def test_a_cancelled_sweep_stays_cancelled(tmp_path):
    found = home(tmp_path)
    file = write(tmp_path, sweep())
    ended = submit_file(file, found, AskAfter(found, "cancel", num_ended=2))
    assert ended.state.status == "cancelled"
    assert submit_file(file, found).state == ended.state
    for again in (lambda: resume(NAME, found), lambda: steering.retry(NAME, found, ["gang_lost"])):
        with pytest.raises(ConfigError, match="cancelled"):
            again()


class KilledError(Exception):
    """The controller dies here."""


class KillAfter(Quiet):
    def __init__(self, num_ended):
        self.num_ended = num_ended

    def on_state(self, state):
        if len(state.end_order) >= self.num_ended and state.running:
            raise KilledError


def test_without_a_controller_the_command_acts_itself(tmp_path):
    found, file = home(tmp_path), write(tmp_path, sweep())
    with pytest.raises(KilledError):
        submit_file(file, found, KillAfter(2))
    assert controller.load(NAME, found).state.status == "running"
    answer = steering.request_action(NAME, found, "pause")
    assert (answer.is_controlled, answer.state) == (False, "paused")
    state = controller.load(NAME, found).state
    assert not state.running, "what the dead controller left is settled"
    assert steering.request_action(NAME, found, "cancel").state == "cancelled"
    assert [event.action for event in events_of(found) if isinstance(event, ActionRequested)] == ["pause", "cancel"]


def test_a_request_to_a_dead_controller_does_not_stop_the_next(tmp_path):
    found, file = home(tmp_path), write(tmp_path, sweep())
    with pytest.raises(KilledError):
        submit_file(file, found, KillAfter(1))
    with Ledger.open_existing(found.sweep_folder(NAME)) as ledger:
        ledger.add_request({"action": "pause"}, by="eve", at_s=0.0)  # and its controller died before it took it up
    assert resume(NAME, found).state.status == "finished"


def test_a_pause_requested_during_creation_counts(tmp_path, monkeypatch):
    found, file = home(tmp_path), write(tmp_path, sweep())
    create = controller.create

    def slowly(ledger, *args):
        ledger.add_request({"action": "pause"}, by="eve", at_s=0.0)
        return create(ledger, *args)

    monkeypatch.setattr(controller, "create", slowly)
    paused = submit_file(file, found).state
    assert (paused.status, len(paused.trials)) == ("paused", 0)


def test_only_failed_trials_are_retried(tmp_path):
    simulation = {**SWEEP["cluster"]["simulation"], "faults": {"crash": 0.5}, "seed": 1}
    found = home(tmp_path)
    budget = {"max_trials": 8, "consecutive_failures": 50}
    file = write(tmp_path, sweep(cluster={**SWEEP["cluster"], "simulation": simulation}, budget=budget))
    first = submit_file(file, found).state
    crashed = [trial.number for trial in first.trials if trial.status == "crashed"]
    assert 0 < len(crashed) < 8
    with pytest.raises(ConfigError, match="the sweep 'first' has no trial that ended as host_oom"):
        steering.retry(NAME, found, ["host_oom"])
    answer = steering.retry(NAME, found, ["crashed", "timed_out"])
    assert (answer.trials, answer.state) == (tuple(crashed), "running")
    again = resume(NAME, found).state
    assert again.status == "finished"
    assert {t.number for t in again.trials if len(t.attempts) == 2} == set(crashed)
    assert len(again.trials) == 8
    once, num_measured = measurements(events_of(found))
    assert len(once) == num_measured


def test_a_second_controller_is_refused_and_does_not_stop_the_first(tmp_path):
    found, file = home(tmp_path), write(tmp_path, sweep())
    refused = []

    class SubmitAgain(Quiet):
        def on_state(self, state):
            if len(state.end_order) == 1 and not refused:
                thread = threading.Thread(target=self.again)
                thread.start()
                thread.join()

        def again(self):
            try:
                submit_file(file, found)
            except Exception as error:
                refused.append(str(error))

    assert submit_file(file, found, SubmitAgain()).state.status == "finished"
    assert "another controller is running the sweep first" in refused[0] and "tune-cluster watch first" in refused[0]
    assert [event.epoch for event in events_of(found) if isinstance(event, ControllerStarted)] == [1]


def test_submitting_a_running_sweep_follows_it_and_shows_its_result(tmp_path):
    found, file = home(tmp_path), write(tmp_path, sweep())
    ended = []

    def again():
        ended.append(CliRunner().invoke(main, ["submit", str(file), "--home", str(found.path)]))

    class SubmitAgain(Quiet):
        thread = None

        def on_state(self, state):
            if len(state.end_order) == 1 and self.thread is None:
                self.thread = threading.Thread(target=again)
                self.thread.start()
                time.sleep(2.0)  # it has to see that a controller is at work

    observer = SubmitAgain()
    assert submit_file(file, found, observer).state.status == "finished"
    observer.thread.join(60)
    (result,) = ended
    assert result.exit_code == 0, result.output
    assert "The sweep first is already running" in result.stderr
    assert "first on" in result.stdout and "finished" in result.stdout
    assert [event.epoch for event in events_of(found) if isinstance(event, ControllerStarted)] == [1]
