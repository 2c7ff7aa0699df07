"""Whether speed lasts: the last thirds of longer runs."""

import random
import sys
from dataclasses import replace

import pytest

from cluster.base import Deadlines
from cluster.hardware.discovery import discover_node
from cluster.local import LocalCluster
from cluster.node.agent import SCRIPT_PRELOAD
from orchestrator.objective import Objective
from orchestrator.proof.confirmation import MAX_PAIRS, MAX_STEPS, MIN_STEPS, judge_soak, num_steps, soak_memory
from tests.cluster import gangs, scripts
from tests.support.story import measured
from trials.files import to_json
from trials.outcome import Measured
from trials.reports import Findings, ScriptReport
from trials.script.command import ScriptCommand
from trials.spec import Protocol

SLOW_START = Deadlines(starting_s=110.0)


def run(step_time_s, *, slowdown=lambda place: 1.0, noise=0.02, seed=0, steps=90, **changes):
    """A run whose step times are multiplied with ``slowdown`` of their place, from 0 to 1."""
    rng = random.Random(seed)
    times = tuple(step_time_s * slowdown(i / steps) * rng.lognormvariate(0.0, noise) for i in range(steps))
    return measured(step_time_s, step_times_s=times, **changes).measurement


def judged(pairs, noise=0.02):
    return judge_soak(1, pairs, (noise, 4), Objective())


def test_a_speed_that_lasts_passes_with_one_pair():
    report = judged([(run(0.07), run(0.1, seed=1))])
    assert report.answer == "passed" and report.num_steps == 90 and report.seconds == pytest.approx(6.3, rel=0.02)
    assert report.first.value == pytest.approx(1.43, rel=0.02) and report.last.low > 1.3


@pytest.mark.parametrize(
    "slowdown",
    [lambda place: 2.0 if place > 0.6 else 1.0, lambda place: 1.01 ** (90 * place)],
    ids=["half as fast", "1% per step"],
)
def test_a_fading_speed_is_detected_despite_noise_between_runs(slowdown):
    report = judged([(run(0.07, slowdown=slowdown), run(0.1, seed=1))], noise=0.5)
    assert report.answer == "failed" and report.reason.startswith("it slows down: 1.")
    assert "x in the first third of a longer run of 90 steps (" in report.reason


def test_an_equal_slowdown_of_the_baseline_changes_nothing():
    both = {"slowdown": lambda place: 1 + place}
    assert judged([(run(0.07, **both), run(0.1, seed=1, **both))]).answer == "passed"


def test_a_pair_explained_by_noise_is_repeated():
    slow, base = run(0.101), run(0.1, seed=1)
    assert judged([(slow, base)], noise=0.05) is None
    assert judged([(slow, base), (run(0.09, seed=2), base)], noise=0.05).answer == "passed"
    assert judged([(slow, base)] * MAX_PAIRS, noise=0.05).answer == "failed"
    assert judged([(run(0.12), base)], noise=0.01).answer == "failed"


def test_steps_that_vary_too_much_settle_nothing_and_digits_do_not_matter():
    wild = [
        (run(0.09, noise=2.0, seed=10 * i, steps=15), run(0.1, noise=2.0, seed=10 * i + 5, steps=15)) for i in range(60)
    ]
    reports = [judged(wild[i : i + MAX_PAIRS], noise=3.0) for i in range(0, 60, MAX_PAIRS)]
    vague = [report for report in reports if report.answer == "inconclusive"]
    assert vague and all(report.last.low < 1 < report.last.value for report in vague)
    coarse = {"step_time_resolution_s": 0.1}
    assert judged([(run(0.07, **coarse), run(0.1, seed=1, **coarse))]).answer == "passed"


MIB = 1 << 20
GROWS = tuple(100 * MIB + step * MIB for step in range(92))
SHAPES = {
    "grows": GROWS,
    "levels off": tuple(max(GROWS[: 1 + min(step, 40)]) for step in range(92)),
    "once": (100 * MIB,) * 12 + (120 * MIB,) * 80,
    "flat": (100 * MIB,) * 92,
}


@pytest.mark.parametrize(
    ("own", "base", "limit", "answer", "full_at", "note"),
    [
        ("grows", "flat", 300 * MIB, "failed", 201, "memory grows"),
        ("grows", "flat", None, "passed", None, "memory grows"),
        ("grows", "flat", 1 << 50, "passed", 2**30 - 99, "memory grows"),
        ("grows", "grows", 300 * MIB, "passed", 201, "memory grows"),  # the present configuration does so as well
        ("levels off", "flat", 300 * MIB, "passed", None, None),
        ("once", "flat", 300 * MIB, "passed", None, None),
    ],
)
def test_memory_that_would_be_full_later_disqualifies(own, base, limit, answer, full_at, note):
    pair = run(0.07, step_memory_bytes=SHAPES[own]), run(0.1, seed=1, step_memory_bytes=SHAPES[base])
    report = judge_soak(1, [pair], (0.02, 4), Objective(), limit_bytes=limit)
    assert report.answer == answer, report.reason
    assert report.memory.full_at_step == (None if full_at is None else pytest.approx(full_at, abs=4))
    assert [note in one for one in report.notes] == [True] * (note is not None)
    if answer == "failed":
        assert (
            "grows by 1 MiB per step" in report.reason and "300 MiB per rank would be reached at step" in report.reason
        )


def test_fragmentation_and_longer_samples_are_noted():
    script = [Findings(script=ScriptReport(longest_sample=length)) for length in (512, 900)]
    own = run(0.07, step_memory_bytes=SHAPES["flat"], peak_allocated_bytes=(60,), peak_reserved_bytes=(100,))
    assert soak_memory(own, None, None, on_cpu=True).fragmentation is None, "a CPU has no caching allocator"
    own = replace(own, findings=script[1])
    searched = replace(own, findings=script[0])
    report = judge_soak(1, [(own, run(0.1, seed=1))], (0.02, 4), Objective(), searched=searched)
    assert report.memory.fragmentation == pytest.approx(0.4)
    assert [word in note for word, note in zip(("40%", "900 tokens"), report.notes, strict=True)] == [True, True]


LEAK = """
import time, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.utils.data.TensorDataset(torch.ones(64, {length}, dtype=torch.long))
held = []
for (batch,) in torch.utils.data.DataLoader(tokens, batch_size=1):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    if len(held) < {most}:
        held.append(bytearray(4 << 20))
    time.sleep(0.06)  # memory is read at most every 50 ms
"""


@pytest.mark.slow
def test_a_real_program_that_leaks_is_not_promoted_and_one_that_fills_a_cache_is(tmp_path):
    found = {}
    with LocalCluster(tmp_path / "work", discover_node(num_devices=1), preload=SCRIPT_PRELOAD) as cluster:
        for name, most in (("leaks", 1000), ("fills", 8)):
            path = tmp_path / f"{name}.py"
            path.write_text(LEAK.format(length=32, most=most))
            command = ScriptCommand(
                argv=(sys.executable, str(path)),
                cwd=str(tmp_path),
                protocol=Protocol(min_warmup_steps=1, max_warmup_steps=1, num_steps=40, max_steps=40),
                num_devices=1,
                tokens_per_step=2,
                samples_per_step=2,
            )
            end = gangs.run(cluster, scripts.RUNNER, world_size=1, spec=to_json(command), deadlines=SLOW_START)
            assert isinstance(end.outcome, Measured), end.outcome
            seen = end.outcome.measurement
            found[name] = run(0.07, step_memory_bytes=seen.step_memory_bytes, findings=seen.findings)
    for name, answer in (("leaks", "failed"), ("fills", "passed")):
        report = judge_soak(1, [(found[name], run(0.1))], (0.02, 4), Objective(), limit_bytes=4 << 30)
        assert report.answer == answer, (report, found[name].step_memory_bytes)
        assert report.memory.longest_sample == 32
        if name == "leaks":
            assert report.memory.growth_bytes == pytest.approx(4 << 20, rel=0.1)


def test_steps_follow_from_the_length():
    assert [num_steps(30.0, step) for step in (0.1, 60.0, 1e-4)] == [300, MIN_STEPS, MAX_STEPS]
