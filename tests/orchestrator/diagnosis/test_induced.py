"""Slow programs, unchanged: what is put into them is what `explain` names, with the answer that goes with it.

Programs that CPUs can make slow are run under the hook. ``FROM_ACCELERATORS`` are facts in the form in which the hook
reports them there, which no CPU can produce.
"""

import json
from dataclasses import replace

import pytest

from cluster.gang.gang_outcome import fold as fold_gang
from cluster.gang.messages import RankSuccess
from orchestrator.diagnosis.explain import Basis, explain_sweep
from orchestrator.terminal.explain_screen import render_sweep_explanation
from tests.orchestrator.diagnosis.diagnosed import (
    MODEL,
    ONE_NODE,
    UNKNOWN,
    WORKLOAD,
    basis,
    full,
    llama,
    pipeline,
    simulate,
    sweep,
)
from tests.orchestrator.terminal.test_report import text
from tests.support.story import measured
from tests.trials.script.hooked import launch
from trials.health import DeviceMemory
from trials.outcome import StepBreakdown
from trials.reports import Findings, GraphReport, ScriptFacts, ScriptReport
from trials.script.command import ScriptCommand, ScriptRank
from trials.script.judge import Judge
from trials.script.report_lines import StepBook
from trials.script.runner import _report  # what a rank of a trial makes of its judge
from trials.spec import Candidate, CustomChoice, Layout, Precision, Protocol

STEPS = 10
COMMAND = ScriptCommand(
    argv=("train.py",),
    cwd="/",
    protocol=Protocol(min_warmup_steps=2, max_warmup_steps=2, num_steps=STEPS - 2, max_steps=STEPS - 2),
    num_devices=1,
    tokens_per_step=8,
    samples_per_step=8,
)


def trained(argv, folder, ranks=1):
    """What a gang that ran ``slow.py`` measured."""
    runs = launch(["slow.py", *argv, "--steps", str(STEPS)], folder, ranks=ranks)
    successes = []
    for rank, one in enumerate(runs):
        assert one.code == 0, one.errors
        command = replace(COMMAND, num_devices=ranks)
        book = StepBook(command)
        for line in one.lines:
            book.add_report_line(json.dumps(line), origin=f"rank{rank}.jsonl", arrived_s=line["t"])
        who = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        judge = Judge(command, book)
        report = _report(command, ScriptRank.from_env(who), judge, judge.times(), 0)
        successes.append(RankSuccess(rank=rank, report=report))
    return fold_gang(successes)


ONE = (Candidate(),)


def diagnosed(*outcomes, candidates=ONE, roles=None):
    state = sweep(list(candidates), list(outcomes))
    return explain_sweep(state, Basis(candidates=tuple(candidates), roles=roles or {}, topology=UNKNOWN))


RUN = {
    "slow samples": (["--sample-s", "0.005"], 1, "io", "no data loader workers"),
    "slow storage with jitter": (["--sample-s", "0.001", "--jitter-s", "0.02"], 1, "io", "no data loader workers"),
    "tiny operators": (["--model", "tiny"], 1, "dispatch", "operators per step"),
    "too much recompute": (["--model", "again", "--batch", "2048"], 1, "memory", "recompute takes"),
    "recompile storm": (["--model", "changing"], 1, "compilation", "recompiled"),
    "a slow rank": (["--model", "late"], 2, "imbalance", "rank 1 is the slowest"),
    "waiting for collectives": (["--model", "talking"], 2, "communication", "collectives called from Python"),
    "a large optimiser": (["--batch", "1", "--optimizer", "Adam"], 1, "optimizer", "larger micro-batches"),
    "nothing but a model": (["--batch", "512"], 1, "passes", "forward"),
}
"""Arguments, ranks, the bottleneck, and words of its evidence."""


@pytest.mark.slow
@pytest.mark.representative("a slow rank")
@pytest.mark.parametrize("name", RUN)
def test_what_slows_a_program_is_named(name, tmp_path):
    argv, ranks, kind, words = RUN[name]
    outcome = trained(argv, tmp_path, ranks)
    found = diagnosed(outcome).baseline
    assert found.bottleneck.kind == kind, (outcome.measurement.breakdown, [b.kind for b in found.bottlenecks])
    assert any(words in line for line in found.bottleneck.evidence), found.bottleneck.evidence
    assert found.parts.share("other") < 0.5, "the step was taken apart"
    assert not any(one.kind == "compute" for one in found.bottlenecks), (
        "nothing here distinguishes computation from waiting"
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_tiny_buckets_are_advised_against(tmp_path):
    found = diagnosed(trained(["--bucket", "0.0001", "--model", "again"], tmp_path, 2)).baseline
    assert any("a larger `bucket_cap_mb`" in line for line in found.advice), found.advice


STEP = StepBreakdown(forward_s=0.03, backward_s=0.05, optimizer_s=0.01, other_s=0.01)


def program(facts, breakdown=STEP, **changes):
    script = ScriptReport(facts=ScriptFacts(**facts))
    return measured(0.1, breakdown=breakdown, findings=Findings(script=script), **changes)


BUSY = {"operators": 2000, "launch_s": 5e-6, "ahead_s": 0.06}
FROM_ACCELERATORS = {
    "the device waits for the host": ({**BUSY, "ahead_s": 0.0}, {}, "dispatch", None),
    "host sync per step": (
        {**BUSY, "ahead_s": 1e-4, "host_syncs": 1, "sync_site": "train.py:42"},
        {},
        "dispatch",
        "1 value from the device in each step (train.py:42)",
    ),
    "vocabulary of 32,003": ({**BUSY, "vocab_size": 32003}, {}, "passes", "by 61 rows to 32,064"),
    "odd products": ({**BUSY, "unaligned_products": 3}, {}, "passes", "3 matrix products"),
    "casts": ({**BUSY, "casts": 700, "cast_bytes": 1 << 30}, {}, "passes", "700 of 2000 operators"),
    "pageable copies": (
        {**BUSY, "pageable_copies": 2, "pageable_bytes": 1 << 20},
        {},
        "passes",
        "2 transfers per step, 1 MiB",
    ),
    "graph breaks": (
        {**BUSY, "graph_breaks": 12, "break_reason": "call to print (model.py:7)"},
        {},
        "passes",
        "12 graph breaks: call to print (model.py:7)",
    ),
    "channels first": ({**BUSY, "nchw_convolutions": 20}, {}, "passes", "20 convolutions"),
    "a mask that grows with the square": ({**BUSY, "mask_bytes": 1 << 26}, {}, "passes", "64 MiB"),
    "fp16 underflow": (BUSY, {"num_skipped_steps": 3}, "passes", "skipped 3 of 3 steps"),
    "memory nearly full": (
        BUSY,
        {
            "device_memory": DeviceMemory(total_bytes=1 << 30, outside_bytes=0, num_retries=4),
            "peak_allocated_bytes": (79 * 10**9,),
        },
        "passes",
        "freed its cache and retried 4 times",
    ),
}
"""Facts, the rest of the measurement, the bottleneck, and words of the advice."""


@pytest.mark.parametrize("name", FROM_ACCELERATORS)
def test_facts_of_accelerators_lead_to_the_bottleneck_and_the_advice(name):
    facts, changes, kind, words = FROM_ACCELERATORS[name]
    found = diagnosed(program(facts, **changes)).baseline
    assert found.bottleneck.kind == kind
    assert words is None or any(words in line for line in found.advice), found.advice
    quiet = diagnosed(program(BUSY)).baseline
    assert quiet.advice == (), "nothing is advised where nothing was seen"


def test_a_bubble_is_answered_by_what_makes_it_smaller():
    """By two micro-batches a schedule with the same bubble was once measured to be faster: that is noise."""
    layout = pipeline(4, 4)
    candidates = [
        llama(layout, micro_batch_size=32),
        llama(replace(layout, schedule="gpipe"), micro_batch_size=32),
        llama(layout, micro_batch_size=8),
    ]
    clock = StepBreakdown(forward_s=0.03, backward_s=0.03, bubble_s=0.04)
    state = sweep(candidates, [measured(s, breakdown=clock) for s in (0.1, 0.056, 0.075)], WORKLOAD)
    found = explain_sweep(state, Basis(candidates=tuple(candidates))).baseline.bottleneck
    assert (found.kind, set(found.remedy.changed)) == ("bubble", {"micro_batch_size"})
    assert found.gain <= found.at_most


def test_uneven_stages_get_the_even_split_as_advice():
    candidates = [llama(pipeline(7, 1))]
    workload = replace(WORKLOAD, model=replace(MODEL, num_layers=8))
    state = sweep(candidates, simulate(candidates, workload), workload)
    found = explain_sweep(state, basis(candidates)).baseline.bottleneck
    assert found.kind == "imbalance" and "even stages have 4,4 layers" in found.evidence


def test_unneeded_recompute_is_a_bottleneck_of_the_measured_size():
    """The cost model has 4% for it, and computation for the rest: the trial without is twice as fast."""
    layout = Layout(dp_shard=8, zero_stage=3)
    candidates = [llama(layout, recompute=full(layout)), llama(layout)]
    clock = StepBreakdown(forward_s=0.5, backward_s=0.5)
    state = sweep(candidates, [measured(s, breakdown=clock) for s in (1.0, 0.5)], WORKLOAD)
    found = explain_sweep(state, basis(candidates, ONE_NODE)).baseline.bottleneck
    assert (found.kind, found.source, found.share) == ("memory", "measured", pytest.approx(0.5, abs=0.02))
    assert "recompute" in found.remedy.changed


def test_graph_mode_that_gave_up_comes_first():
    graph = GraphReport(num_graphs=8, num_recompilations=7, compile_s=4.0, reasons=("self.k == 0 # slow.py:52",))
    clock = StepBreakdown(forward_s=0.05, backward_s=0.05)
    found = diagnosed(measured(0.1, breakdown=clock, findings=Findings(graph=graph))).baseline.bottleneck
    assert found.kind == "compilation" and "slow.py:52" in found.evidence[0]


def test_another_micro_batch_changes_training_with_batch_norm():
    candidates = [Candidate(micro_batch_size=8), Candidate(micro_batch_size=16)]
    found = diagnosed(program({"batch_norms": 5}), program({"batch_norms": 5}), candidates=candidates)
    one = explain_sweep(sweep(candidates, [program({"batch_norms": 5})] * 2), Basis(), trial=1).chosen
    assert found.baseline.advice == ()
    assert any("5 batch-norm layers with 16 samples per micro-batch instead of 8" in line for line in one.advice)


def test_a_custom_knob_is_recommended_by_its_declared_role():
    workers = [Candidate(own=(CustomChoice(name="--nw", value=value),)) for value in (0, 4)]
    clock = StepBreakdown(data_s=0.05, forward_s=0.02, backward_s=0.02, other_s=0.01)
    script = Findings(script=ScriptReport())
    outcomes = [measured(s, breakdown=clock, findings=script) for s in (0.1, 0.07)]
    for roles, changed in ({}, None), ({"--nw": "num_workers"}, {"--nw": (0, 4)}):
        found = diagnosed(*outcomes, candidates=workers, roles=roles).baseline.bottleneck
        assert found.kind == "io"
        assert (found.remedy.changed if found.remedy else None) == changed


def test_without_a_profile_a_program_gets_the_known_split_and_a_hint_to_profile():
    explained = diagnosed(program(BUSY), program(BUSY), candidates=(Candidate(), Candidate(precision=Precision())))
    screen = text(render_sweep_explanation(explained), 200)
    assert "forward and backward, 80% of the step" in screen and "only a profile can distinguish them" in screen
    shares = {part.name: part.seconds for part in explained.baseline.parts.parts}
    assert shares == pytest.approx({"forward": 0.03, "backward": 0.05, "optimizer": 0.01, "other": 0.01})
