"""Homes with sweeps run by another user, for tests of the commands that look at them."""

import time
from dataclasses import replace

from click.testing import CliRunner

from cluster.hardware.topology import Device
from orchestrator.cli.main import main
from orchestrator.sweep.events import Budget, LeaseChanged
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from tests.support import long_story
from tests.support.story import launched, proposed


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def keep(folder, name, events=(), **documents):
    """The ledger of a sweep of the home ``folder``, open for more."""
    ledger = Ledger(Home(folder).sweep_folder(name))
    for event in events:
        ledger.append(event)
    for key, body in {"tracking": {"uri": None}, "spec": SPEC, **documents}.items():
        ledger.put_document(key, body)
    return ledger


def controller(**changes):
    body = {"host": "head", "pid": 4242, "mode": "detached", "job": None, "address": None}
    return {**body, "started_at_s": time.time() - 60.0, **changes}


def running(name):
    """Five trials have ended, t005 and t006 run on a node of two devices each, t007 waits."""
    now_s = time.time()
    story = long_story.events(long_story.all_kinds()[:5], finished=False, name=name)
    shift_s = now_s - 300.0 - story[0].at_s
    story = [replace(event, at_s=event.at_s + shift_s) for event in story]
    budget = Budget(max_trials=40, device_hours=3.0, wall_time_s=7200.0)
    story[0] = replace(story[0], budget=budget, hardware="2x2 test CPU", devices=replace(story[0].devices, num_nodes=2))
    story.append(LeaseChanged(at_s=now_s - 200.0, nodes=("n1", "n2")))
    for trial, node in ((5, "n1"), (6, "n2")):
        story.append(proposed(trial, long_story.candidate(trial), at_s=now_s - 100.0))
        ranks = tuple(Device(node=node, index=i) for i in range(2))
        story.append(replace(launched(trial, at_s=now_s - 90.0), ranks=ranks, num_devices=2))
    return [*story, proposed(7, long_story.candidate(7), at_s=now_s - 50.0)]


SPEC = {"cluster": {"num_nodes": 4}}
LEASE = {"nodes": ["n1", "n2"], "waiting": "2 more nodes are busy", "at_s": 0.0}
RUNNING = {"attempt_id": "a", "token": "token", "phase": "measuring", "step": 7, "step_time_s": 0.2}
LIVE = {"trials": {"5": RUNNING}}


def keep_running(folder, name="busy"):
    return keep(folder, name, running(name), controller=controller(), lease=LEASE, live=LIVE)
