"""Why a trial was proposed, waits, or failed, from real ledgers."""

import io
import json
import time
from dataclasses import replace

import pytest
from rich.console import Console

from cluster.hardware.topology import Device
from orchestrator.status.explanation import explain
from orchestrator.sweep.events import (
    Asked,
    Budget,
    CandidatesPruned,
    FinishCause,
    LeaseChanged,
    PredictedResult,
    SweepFinished,
    SweepPaused,
    TrialsRetried,
)
from orchestrator.sweep.snapshot import Home
from orchestrator.terminal.explain_screen import render_explanation
from tests.support import long_story
from tests.support.cli_homes import LEASE, controller, keep, keep_running, run, running
from tests.support.story import created, ended, evidence, failures, launched, measured, proposed
from trials.outcome import Crashed, GangLost, HostOutOfMemory, StoppedEarly, TimedOut

EXPECTED = PredictedResult(step_time_s=0.05, log_spread=0.1, peak_bytes=2.0**30, probability_fits=0.9)


def on(node, event, num_ranks=1):
    return replace(event, ranks=tuple(Device(node=node, index=i) for i in range(num_ranks)), num_devices=num_ranks)


def explained(folder, text, name="story"):
    result = run("explain", name, text, "--home", folder, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def lost(node, cause="infrastructure"):
    return GangLost(evidence=replace(evidence(f"{node} went away"), rank=None, node=node), cause=cause)


def test_every_launch_is_told_with_its_blame_and_what_followed(tmp_path):
    """Two losses on one node, one hang there: quarantine. Then a retry by hand, which is measured."""
    hang = TimedOut(phase="measuring", evidence=replace(evidence("no progress"), rank=1, node="bad", exit_code=-9))
    story = [
        created(budget=Budget(max_trials=9, lost_attempts_per_trial=3, strikes_per_node=3)),
        replace(proposed(0), expected=EXPECTED),
        on("bad", launched(0, at_s=10.0)),
        ended(0, lost("bad"), at_s=15.0),
        on("bad", launched(0, attempt=1, at_s=20.0)),
        ended(0, lost("bad", cause="preempted"), attempt=1, at_s=21.0),
        on("bad", launched(0, attempt=2, at_s=30.0)),
        ended(0, lost("bad"), attempt=2, at_s=31.0),
        on("bad", launched(0, attempt=3, at_s=40.0)),
        ended(0, hang, attempt=3, at_s=70.0),
        TrialsRetried(at_s=80.0, request=1, trials=(0,), by="anna@desk"),
        on("good", launched(0, attempt=4, at_s=90.0)),
        ended(0, measured(0.1), attempt=4, at_s=95.0),
    ]
    keep(tmp_path, "story", story)
    body = explained(tmp_path, "t000")
    first, preempted, second, hung, last = body["attempts"]
    assert [first["nodes"], first["duration_s"], first["device_seconds"]] == [["bad"], 5.0, 1.0]
    assert first["made_of_it"][1:] == ["to be launched again: that was number 1 of 3", "strike 1 of 3 against bad"]
    assert preempted["made_of_it"][1:] == ["to be launched again"]
    assert "another sweep" in preempted["made_of_it"][0]
    assert [first["cause"], preempted["cause"], hung["cause"]] == ["infrastructure", "preempted", None]
    assert second["made_of_it"][2] == "strike 2 of 3 against bad"
    assert [hung["evidence"][key] for key in ("rank", "node", "signal")] == [1, "bad", "SIGKILL"]
    assert hung["evidence"]["log_tail"] == ["last words", "no progress"]
    assert hung["made_of_it"][1:] == [
        "strike 3 of 3 against bad",
        "bad is in quarantine since: nothing is placed there any more",
        "launched again because anna@desk asked for it",
    ]
    assert (last["outcome"], last["consequence"], last["made_of_it"]) == (
        "measured",
        "objective",
        ["told to the search"],
    )
    assert (body["pending"], body["measured_over_expected"]) == ([], pytest.approx(2.0))
    assert body["measured"]["step_time_s"] == pytest.approx(0.1)


def test_each_kind_of_end_says_what_the_sweep_made_of_it(tmp_path):
    slow = StoppedEarly(
        step_times_s=(1.0,), at_least_s=1.0, incumbent=0, saved_device_seconds=90.0, evidence=evidence("too slow")
    )
    host = HostOutOfMemory(evidence=evidence("killed by the kernel"))
    outcomes = [*long_story.speeds(0.1, 0.08), *failures().values(), slow, host]
    story = long_story.events(outcomes, finished=False)
    oom = 2
    story.append(CandidatesPruned(at_s=story[-1].at_s, witness=oom, rules={"oom-micro_batch_size": 3}))
    keep(tmp_path, "story", story)
    said = [explained(tmp_path, str(i))["attempts"][0]["made_of_it"] for i in range(len(outcomes))]
    assert said[1] == ["told to the search", "the fastest until then"]
    for trial, words in enumerate(
        (
            "search",
            "search",
            "constraint",
            "constraint",
            "constraint",
            "a fault of",
            "a fault of",
            "given up",
            "t000",
            "memory",
        )
    ):
        assert words in "; ".join(said[trial]), trial
    assert explained(tmp_path, "2")["ruled_out"] == {"oom-micro_batch_size": 3}
    assert explained(tmp_path, "3")["ruled_out"] == {}
    assert explained(tmp_path, "best")["trial"] == 1
    assert explained(tmp_path, "1")["changed"]["zero_stage"] == {"baseline": 0, "candidate": 2}


def test_a_trial_that_waits_for_devices_is_told_who_has_them(tmp_path):
    with keep_running(tmp_path).hold():
        first, second = explained(tmp_path, "7", "busy")["pending"]
        assert explained(tmp_path, "5", "busy")["pending"] == []
    assert first == "it needs 2 devices on 1 node; the lease holds 2 nodes with 4 devices, 4 busy with t005 t006"
    assert second == "2 of 4 nodes are held: 2 more nodes are busy"


def test_a_trial_that_waits_to_be_launched_again_avoids_the_node_and_says_so(tmp_path):
    loss = [ended(5, lost("n1"), at_s=time.time()), LeaseChanged(at_s=time.time(), nodes=("n2",))]
    story = [replace(running("busy")[0], budget=Budget(strikes_per_node=1)), *running("busy")[1:], *loss]
    lease = {**LEASE, "nodes": ["n1", "n2"], "waiting": ""}
    with keep(tmp_path, "busy", story, controller=controller(), lease=lease).hold():
        reasons = explained(tmp_path, "5", "busy")["pending"]
    assert reasons == [
        "it needs 2 devices on 1 node; the lease holds 1 node with 2 devices, 2 busy with t006",
        "nothing is placed on n1 any more: in quarantine",
        "other nodes than n1 are preferred: it failed there",
    ]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "the sweep is interrupted: its controller is gone; `resume` goes on with it"),
        ([SweepPaused(at_s=9e9, reason="paused by anna")], "the sweep is paused: paused by anna; `resume`"),
        (
            [SweepFinished(at_s=9e9, status="cancelled", reason="cancelled by anna", cause=FinishCause.CANCELLED)],
            "the sweep was cancelled",
        ),
        ([Asked(at_s=1.0, request=1, action="drain", by="anna@desk")], "the sweep is draining: asked by anna@desk"),
    ],
)
def test_a_sweep_that_begins_nothing_is_why_a_trial_waits(tmp_path, more, words):
    ledger = keep(tmp_path, "busy", [*running("busy"), *more], controller=controller(), lease=LEASE)
    if "draining" in words:
        with ledger.hold():
            reasons = explained(tmp_path, "7", "busy")["pending"]
    else:
        reasons = explained(tmp_path, "7", "busy")["pending"]
    assert len(reasons) == 1
    assert reasons[0].startswith(words)


def test_a_spent_budget_is_why_a_trial_waits(tmp_path):
    story = running("busy")
    story[0] = replace(story[0], budget=Budget(device_hours=0.01))
    with keep(tmp_path, "busy", story, controller=controller(), lease=LEASE).hold():
        assert explained(tmp_path, "7", "busy")["pending"] == [
            "the budget of 0.01 device-hours is spent: nothing is launched any more"
        ]


def test_the_explanation_for_people_fits_and_is_harmless(tmp_path):
    crash = Crashed(
        evidence=replace(
            evidence("x\x1b[2J" * 40), node="n1", exit_code=-11, collateral=tuple(f"rank {i}: gone" for i in range(9))
        )
    )
    keep(tmp_path, "story", long_story.events([measured(0.1, world_size=2), crash]))
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(render_explanation(explain("story", "t001", Home(tmp_path))))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    for words in (
        "crashed",
        "rank 0 on n1, ValueError, SIGSEGV",
        "last words",
        "and 5 more",
        "5 in a row stop the sweep",
    ):
        assert words in " ".join(shown.split())
    assert "\x1b" not in shown
