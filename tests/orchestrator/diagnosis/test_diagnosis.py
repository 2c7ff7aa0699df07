"""Where the step time goes, and what holds a trial back: planted causes are found, and nothing is invented."""

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.candidate_table import CandidateTable
from cluster.cost.step_time import TIME_TERMS
from orchestrator.diagnosis.advice import Observed, advise
from orchestrator.diagnosis.bottlenecks import ProfileOf, split
from orchestrator.diagnosis.explain import Basis, explain_sweep
from orchestrator.diagnosis.explain import _changes as explain_changes
from orchestrator.errors import ConfigError
from orchestrator.planning.planner import make_plan
from orchestrator.proof.progress import confirmation
from orchestrator.space.notation import diff
from orchestrator.space.rules import check
from orchestrator.space.space import neighbours
from orchestrator.sweep.events import FinishCause, Verdict
from orchestrator.sweep.fold import fold
from orchestrator.sweep.state import ProofState
from orchestrator.terminal.explain_screen import render_sweep_explanation
from tests.orchestrator.diagnosis.diagnosed import (
    MODEL,
    ONE_NODE,
    TINY,
    TWO_NODES,
    UNKNOWN,
    WORKLOAD,
    basis,
    full,
    llama,
    measurement,
    pipeline,
    profiled,
    simulate,
    sweep,
)
from tests.orchestrator.space import test_large
from tests.orchestrator.terminal.test_report import text
from tests.support.proof_story import proof_events
from tests.support.story import measured
from trials.outcome import StepBreakdown
from trials.reports import (
    ExpertLoad,
    Findings,
    LengthReport,
    LoaderPoint,
    LoaderTuningReport,
    PatternEffect,
    ScriptReport,
)
from trials.sizes import expert_flops_share
from trials.spec import (
    Candidate,
    CustomChoice,
    Experts,
    Kernels,
    Layout,
    LinearModel,
    Loader,
    Precision,
    RandomData,
    ScriptData,
    ScriptModel,
    TextData,
    TrialSpec,
)

SHARDED = Layout(dp_shard=16, zero_stage=3)
EVEN = pipeline(8, 8, 8, 8, dp_replicate=2)
UNEVEN = pipeline(17, 5, 5, 5, dp_replicate=2)
MANY_STAGES = pipeline(*[4] * 8, dp_replicate=2)


def diagnosed(candidates, **where):
    """The diagnosis of the first of these candidates, the only one that was tried."""
    topology = where.get("topology", TWO_NODES)
    workload = where.get("workload", WORKLOAD)
    state = sweep(candidates[:1], simulate(candidates[:1], workload, topology), workload)
    return explain_sweep(state, basis(candidates, topology)).baseline


ONE_NODE_SHARDED = Layout(dp_shard=8, zero_stage=3)
FP32 = Precision()
PLANTED = {
    "compute": (
        [llama(ONE_NODE_SHARDED, precision=FP32), llama(ONE_NODE_SHARDED)],
        {"topology": ONE_NODE},
        "precision",
    ),
    "memory": (
        [llama(SHARDED, micro_batch_size=2, recompute=full(SHARDED)), llama(SHARDED, micro_batch_size=2)],
        {},
        "recompute",
    ),
    "communication": (
        [llama(Layout(tp=16), micro_batch_size=4), llama(Layout(tp=4, dp_shard=4, zero_stage=1), micro_batch_size=4)],
        {},
        "tp",
    ),
    "bubble": (
        [llama(MANY_STAGES, micro_batch_size=4), llama(MANY_STAGES, micro_batch_size=1)],
        {},
        "micro_batch_size",
    ),
    "imbalance": ([llama(UNEVEN), llama(EVEN)], {}, "stage_layers"),
    "dispatch": (
        [llama(Layout(dp_replicate=8)), llama(Layout(dp_replicate=8), kernels=Kernels(compile="block"))],
        {"topology": ONE_NODE, "workload": TINY},
        "compile",
    ),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_bottleneck_is_named_with_its_knob(kind):
    candidates, where, knob = PLANTED[kind]
    found = diagnosed(candidates, **where)
    assert found.bottleneck.kind == kind, [(one.kind, one.share) for one in found.bottlenecks]
    assert knob in found.bottleneck.remedy.changed
    assert found.bottleneck.remedy.gain > 1.05
    assert found.bottleneck.remedy.source == "modelled" and found.bottleneck.remedy.trial is None
    assert sum(part.seconds for part in found.parts.parts) == pytest.approx(found.parts.step_time_s)
    assert {part.source for part in found.parts.parts} == {"modelled"}


def test_waiting_for_data_is_named_from_the_clock_with_the_loaders_verdict():
    verdict = "Waiting for data is 60% of the step."
    point = LoaderPoint(num_workers=2, prefetch_factor=2, batch_time_s=0.06)
    report = LoaderTuningReport(points=(point,), chosen=point, tuning_time_s=1.0, verdict=verdict)
    taken = measured(
        0.1, breakdown=StepBreakdown(data_s=0.06, forward_s=0.02, backward_s=0.02), findings=Findings(loader=report)
    )
    found = explain_sweep(sweep([Candidate()], [taken]), Basis()).bottleneck
    assert (found.kind, found.source, found.share) == ("io", "measured", pytest.approx(0.6))
    assert found.evidence == (verdict,)
    assert found.at_most == pytest.approx(2.5)


def test_on_unknown_hardware_forward_and_backward_are_not_split_and_not_called_computation():
    taken = measured(0.1, breakdown=StepBreakdown(forward_s=0.05, backward_s=0.05))
    explained = explain_sweep(sweep([Candidate()], [taken]), basis([Candidate()], UNKNOWN))
    assert [(part.name, part.source) for part in explained.step_parts[0].parts] == [("forward_backward", "measured")]
    assert "unknown accelerator 'Frobnicator 9000'" in explained.unmodelled
    assert explained.unmodelled in explained.baseline.parts.notes[0]
    assert (explained.bottleneck.kind, explained.bottleneck.at_most) == ("passes", None)
    assert "only a profile can distinguish them" in text(render_sweep_explanation(explained), 200)


def test_a_profile_splits_what_the_clock_measured_even_on_unknown_hardware():
    """A quarter of the step is computation beyond the optimiser's tenth; the rest of the passes waits for peers."""
    taken = measured(1.0, breakdown=StepBreakdown(forward_s=0.5, backward_s=0.4, optimizer_s=0.1))
    state = sweep([Candidate()], [taken], checks=[profiled(0, (0.7, 1.0, 0.3), base=taken)])
    found = explain_sweep(state, basis([Candidate()], UNKNOWN)).baseline
    expected = {"compute": 0.25, "communication": 0.5, "dispatch": 0.15, "optimizer": 0.1}
    assert {part.name: part.seconds for part in found.parts.parts} == pytest.approx(expected)
    assert found.parts.parts[0].source == "profiled"
    assert (found.bottleneck.kind, found.bottlenecks[1].kind) == ("communication", "dispatch")


def test_profiled_ranks_that_compute_differently_are_an_imbalance():
    taken = measured(1.0, breakdown=StepBreakdown(forward_s=0.5, backward_s=0.5))
    check = profiled(0, (0.9, 0.05, 0.05), (0.3, 0.65, 0.05), base=taken)
    found = explain_sweep(sweep([Candidate()], [taken], checks=[check]), Basis()).bottleneck
    assert (found.kind, found.source, found.share) == ("imbalance", "profiled", pytest.approx(0.3))


def test_useless_mixed_precision_is_evidence_of_dispatch_overhead():
    candidates = [llama(Layout(dp_replicate=8)), llama(Layout(dp_replicate=8), precision=Precision())]
    clock = StepBreakdown(forward_s=0.05, backward_s=0.05)
    outcomes = [
        measurement(TrialSpec(workload=TINY, candidate=candidate), step_s, 10**9, clock)
        for candidate, step_s in zip(candidates, (0.1, 0.1005), strict=True)
    ]
    found = explain_sweep(sweep(candidates, outcomes, TINY), basis(candidates, ONE_NODE)).bottleneck
    assert found.kind == "dispatch"
    assert any("mixed precision helps little" in line for line in found.evidence)


def test_a_tried_change_is_reported_as_measured_and_one_that_exceeds_memory_as_such():
    small, large = llama(SHARDED, recompute=full(SHARDED)), llama(SHARDED)
    larger = llama(SHARDED, micro_batch_size=4)
    candidates = [small, large, larger]
    state = sweep(candidates, simulate(candidates, limit=60 * 10**9))
    found = explain_sweep(state, basis(candidates)).baseline
    assert found.bottleneck.kind == "memory"
    assert (found.bottleneck.remedy.source, found.bottleneck.remedy.trial) == ("measured", 1)
    assert found.bottleneck.remedy.gain == pytest.approx(
        state.trials[1].measurement.tokens_per_s_per_device / state.trials[0].measurement.tokens_per_s_per_device
    )
    assert any("t002 out of memory" in line for line in found.bottleneck.evidence)


def test_winner_and_baseline_stand_side_by_side_and_any_other_trial_can():
    candidates = [llama(SHARDED, recompute=full(SHARDED)), llama(SHARDED), llama(SHARDED, micro_batch_size=4)]
    state = sweep(candidates, simulate(candidates, limit=60 * 10**9))
    explained = explain_sweep(state, basis(candidates))
    assert (explained.baseline.trial, explained.chosen.trial, explained.chosen.role) == (0, 1, "fastest")
    assert explained.bottleneck == explained.chosen.bottleneck
    proven = Verdict(conclusion="confirmed", winner=1, reason="it is faster")
    proof = ProofState(finalists=(1,), reason="test", first_check=3, cause=FinishCause.EXHAUSTED, verdict=proven)
    assert explain_sweep(replace(state, proof=proof), basis(candidates)).chosen.role == "winner"
    kept = replace(proof, verdict=replace(proven, conclusion="keep", winner=None))
    assert explain_sweep(replace(state, proof=kept), basis(candidates)).chosen is None
    assert set(explained.step_parts) == {0, 1}
    assert explain_sweep(state, basis(candidates), trial=0).chosen is None
    with pytest.raises(ConfigError, match="t002 was not measured; its outcome is: out of memory"):
        explain_sweep(state, basis(candidates), trial=2)


def test_selective_recompute_is_as_the_runner_timed_it():
    effect = PatternEffect(pattern="silu", num_matches=8, saved_bytes=1, recompute_s=0.2)
    taken = measured(
        1.0, breakdown=StepBreakdown(forward_s=0.5, backward_s=0.5), findings=Findings(recompute=(effect,))
    )
    explained = explain_sweep(sweep([Candidate()], [taken]), Basis())
    parts = [(part.name, part.seconds, part.source) for part in explained.step_parts[0].parts]
    assert parts == [("recompute", 0.2, "measured"), ("forward_backward", 0.8, "measured")]


def test_workloads_other_than_decoders_are_explained_too():
    workload = replace(WORKLOAD, model=LinearModel(), data=RandomData(), seq_length=1, global_batch_size=2048)
    low = Precision(level="O2", dtype="bfloat16")
    candidates = [Candidate(micro_batch_size=2048), Candidate(micro_batch_size=2048, precision=low)]
    found = diagnosed(candidates, workload=workload, topology=ONE_NODE)
    assert found.bottleneck.kind == "compute"
    assert "precision" in found.bottleneck.remedy.changed


@given(
    st.floats(0.02, 0.6),
    st.floats(0.0, 0.3),
    st.lists(st.tuples(st.floats(0.005, 0.3), st.floats(0.0, 1.0)), min_size=3, max_size=3),
)
@settings(max_examples=40, deadline=None)
def test_no_gain_is_above_what_its_bottleneck_costs_or_what_was_measured(bubble, data, times):
    """Whatever the noise of single trials, and on the screen as in JSON."""
    start = llama(MANY_STAGES, micro_batch_size=4)
    candidates = [start, replace(start, micro_batch_size=1), replace(start, loader=Loader(num_workers=2))]
    clock = StepBreakdown(bubble_s=bubble, data_s=data, forward_s=1.0 - bubble - data)
    outcomes = [
        measured(step_s, breakdown=clock, step_times_s=tuple(step_s * math.exp(noise * x) for x in (-1, 0, 0.1, 1)))
        for step_s, noise in times
    ]
    state = sweep(candidates, outcomes)
    explained = explain_sweep(state, Basis(candidates=tuple(candidates)))
    for side in filter(None, (explained.baseline, explained.chosen)):
        for one in side.bottlenecks:
            assert (one.gain is None) == (one.remedy is None)
            if one.gain is not None:
                assert one.gain <= (one.at_most or math.inf)
                assert 1.0 < one.gain <= one.remedy.ci95.high and one.gain <= one.remedy.ci95.low
                assert one.to_json()["answer"]["gain"] == one.gain
    screen = text(render_sweep_explanation(explained), 200)
    for gain, bound in re.findall(r"gain +at least ([\d.]+)x.*\n(?: +memory.*\n)? +at most +([\d.]+)x", screen):
        assert 1.0 < float(gain) <= float(bound)


def test_a_gain_that_was_confirmed_is_the_confirmed_one():
    state = fold(proof_events())
    known = confirmation(state).judgement.against_baseline[1].ratio
    tried = {trial.candidate: trial for trial in state.searched()}
    found = explain_changes(state.trials[0], CandidateTable.of(tried), tried, state, Basis())
    (change,) = (one for one in found if one.trial.number == 1)
    assert (change.ratio, change.num_rounds) == (known, 4)


def test_custom_knobs_are_recommended_by_the_meaning_of_their_name():
    """A program's own ``--num-workers`` is the answer to waiting for data, and is not listed as fixed."""
    knob = "--num-workers"
    workers = [Candidate(own=(CustomChoice(name=knob, value=value),)) for value in (0, 2, 4)]
    clock = StepBreakdown(data_s=0.4, other_s=0.6)
    script = Findings(script=ScriptReport())
    outcomes = [measured(s, breakdown=clock, findings=script) for s in (1.0, 0.8, 0.7)]
    explained = explain_sweep(sweep(workers, outcomes), Basis(candidates=tuple(workers)))
    found = explained.baseline.bottleneck
    assert (found.kind, found.evidence) == ("io", ("no data loader workers",))
    assert (found.remedy.changed, found.remedy.trial) == ({knob: (0, 4)}, 2)
    assert "num_workers" not in found.fixed and "pin_memory" in found.fixed
    assert explained.chosen.changed == {knob: (0, 4)}
    assert explained.chosen.bottleneck.note.endswith(
        "no candidate has more than 4 data loader workers: add 8 to num_workers"
    )
    unknown = explain_sweep(sweep([Candidate()], outcomes[:1]), Basis()).bottleneck
    assert unknown.evidence == (), "what the program does by itself is not known"


def test_without_a_profile_computation_is_an_estimate_and_no_cause_is_named():
    candidates, where, _ = PLANTED["compute"]
    state = sweep(candidates[:1], simulate(candidates[:1], topology=where["topology"]))
    explained = explain_sweep(state, basis(candidates, where["topology"]))
    assert not any("fp32" in line for line in explained.bottleneck.evidence)
    screen = text(render_sweep_explanation(explained), 100)
    assert "baseline t000: unknown without a profile" in screen
    assert "tune-cluster profile story t000 measures it" in screen and "by the cost model" in screen


seconds = st.floats(0.0, 10.0, allow_subnormal=False)


@given(
    st.tuples(seconds, seconds, seconds, seconds, seconds, seconds).filter(lambda s: sum(s) > 1e-6),
    st.none() | st.tuples(seconds, seconds, seconds).filter(lambda s: sum(s) > 1e-6),
    st.dictionaries(st.sampled_from(TIME_TERMS), seconds),
    st.booleans(),
)
def test_parts_sum_to_the_measured_step_time_whatever_is_known(breakdown, ranks, terms, recomputes):
    names = ("data_s", "forward_s", "backward_s", "bubble_s", "optimizer_s", "other_s")
    candidate = llama(SHARDED, recompute=full(SHARDED)) if recomputes else llama(SHARDED)
    taken = measured(0.7, breakdown=StepBreakdown(**dict(zip(names, breakdown, strict=True))))
    profile = None
    if ranks is not None:
        _, run = profiled(0, ranks, base=taken)
        profile = ProfileOf(run=1, ranks=run.measurement.findings.profile)
    found = split(sweep([candidate], [taken]).trials[0], terms, "unknown", profile)
    assert sum(part.seconds for part in found.parts) == pytest.approx(taken.measurement.step_time_s)
    assert all(part.seconds > 0 for part in found.parts)
    assert len({part.name for part in found.parts}) == len(found.parts)


SHARES_OF_PROFILE = {"compute": 0.5, "communication": 0.3, "dispatch": 0.2}


def test_the_time_of_a_program_beyond_data_is_split_only_with_a_model():
    clock_times = StepBreakdown(data_s=0.2, other_s=0.5)
    taken = measured(0.7, breakdown=clock_times, findings=Findings(script=ScriptReport()))
    trial = sweep([llama(SHARDED)], [taken]).trials[0]
    plain = split(trial, {}, "its dimensions are unknown")
    assert [(part.name, pytest.approx(part.seconds)) for part in plain.parts] == [("data", 0.2), ("other", 0.5)]
    assert "forward" not in plain.notes[0] and plain.notes[0].endswith("its dimensions are unknown")
    modelled = split(trial, {"forward": 3.0, "optimizer": 1.0, "data": 9.0}, "")
    assert modelled.seconds("data") == pytest.approx(0.2)
    assert modelled.seconds("optimizer") == pytest.approx(0.5 / 4)
    _, run = profiled(0, (0.5, 0.3, 0.2), base=taken)
    by_profile = split(trial, {"forward": 3.0}, "", ProfileOf(run=1, ranks=run.measurement.findings.profile))
    parts = {part.name: (pytest.approx(part.seconds), part.source) for part in by_profile.parts}
    assert parts == {name: (0.7 * share, "profiled") for name, share in SHARES_OF_PROFILE.items()}


def test_in_a_huge_space_changes_are_searched_around_the_trial():
    space = test_large.spec()
    topology = test_large.TOPOLOGY
    beyond = make_plan(space, topology).beyond
    candidate = beyond.sample(1, seed=0)[0]
    near = neighbours(beyond, candidate)
    assert len(near) == len(set(near)) > 100
    assert all(not check(other, space.to_workload(), topology) for other in near[::50])
    changed = {frozenset(diff(other, candidate)) for other in near}
    assert {"compile"} in changed and {"micro_batch_size"} in changed and {"recompute"} in changed


def test_a_baseline_outside_the_space_gets_advice_from_inside_it():
    """No candidate reads data as the baseline does, so that every change changes that too."""
    outside = llama(MANY_STAGES, micro_batch_size=4, loader=Loader(full_batch=True))
    inside = [llama(MANY_STAGES, micro_batch_size=size) for size in (1, 2)]
    found = diagnosed([outside, *inside]).bottleneck
    assert found.kind == "bubble"
    assert set(found.remedy.changed) == {"micro_batch_size", "full_batch"}


def test_a_winner_of_several_knobs_is_explained_by_all_of_them_and_buckets_are_among_them():
    """No knob alone was tried: the step's largest part is answered by none of them, but the change is shown."""
    program = replace(
        WORKLOAD, model=ScriptModel(recipe="custom", run=("x",), cwd="/", launcher="env"), data=ScriptData()
    )
    both = (
        CustomChoice(name="inside:ddp_bucket_mb", value=100.0),
        CustomChoice(name="inside:training_arguments.dataloader_num_workers", value=2),
    )
    layout = Layout(dp_replicate=2)
    candidates = [Candidate(layout=layout), Candidate(layout=layout, micro_batch_size=2, own=both)]
    clock = StepBreakdown(communication_s=0.5, forward_s=0.2, backward_s=0.2, other_s=0.1)
    outcomes = [
        measured(s, world_size=2, breakdown=clock, findings=Findings(script=ScriptReport())) for s in (1.0, 0.7)
    ]
    state = sweep(candidates, outcomes, program)
    explained = explain_sweep(state, Basis(candidates=tuple(candidates)))
    assert set(explained.chosen.changed) == {"micro_batch_size", *(choice.name for choice in both)}
    shown = text(render_sweep_explanation(explained), width=200)
    assert "micro_batch_size 1 → 2" in shown and "inside:ddp_bucket_mb inherited → 100.0" in shown
    assert "inside:ddp_bucket_mb" in explained.baseline.bottleneck.knobs
    alone = explain_sweep(sweep(candidates[:1], outcomes[:1], program), Basis(candidates=tuple(candidates[:1])))
    assert "ddp_bucket_mb" in text(render_sweep_explanation(alone), width=200)
    tried = {trial.candidate: trial for trial in state.searched()}
    (change,) = explain_changes(state.trials[0], CandidateTable.of(candidates), tried, state, Basis())
    assert change.trial.number == 1


def test_uneven_and_starved_experts_are_advised_on():
    experts = Experts(num_experts=64, top_k=2, ffn_hidden_size=1408)
    workload = replace(WORKLOAD, model=replace(MODEL, experts=experts))
    load = ExpertLoad(layer=3, busiest=2.0, num_idle=5, rank=1, busiest_on_rank=2.5)
    candidate = llama(Layout(dp_replicate=1, dp_shard=8, zero_stage=3))

    def lines(load, on_cpu=False):
        findings = Findings(experts=(load,))
        found = measured(1.0, findings=findings)
        one = Observed(
            workload=workload,
            candidate=candidate,
            measurement=found.measurement,
            on_cpu=on_cpu,
            limit_bytes=None,
            baseline=None,
        )
        return advise(one)

    uneven, starved = lines(load)
    assert uneven.startswith("in layer 3 the busiest expert gets 2.00x the mean number of tokens, 5 experts none")
    assert starved.startswith("an expert multiplies 128 rows at a time")
    assert lines(replace(load, busiest=1.2), on_cpu=True) == ()


def test_padding_costs_its_share_of_the_passes_and_searches_for_many_shapes_are_advised_against():
    report = LengthReport(batching="padding", padding=0.5, imbalance=0.2, num_shapes=6)
    clock = StepBreakdown(forward_s=0.4, backward_s=0.4, optimizer_s=0.2)
    taken = measured(1.0, breakdown=clock, findings=Findings(lengths=report))
    workload = replace(WORKLOAD, data=TextData(lengths=(8, 16)))
    found = explain_sweep(sweep([Candidate()], [taken], workload), basis([Candidate()], UNKNOWN)).baseline.bottleneck
    assert (found.kind, found.share, found.knobs[0]) == ("padding", pytest.approx(0.4), "batching")
    assert found.evidence[1] == "the rank with the most positions has 20% more than the mean"

    def lines(kernels):
        one = Observed(
            workload=workload,
            candidate=Candidate(kernels=kernels),
            measurement=taken.measurement,
            on_cpu=True,
            limit_bytes=None,
            baseline=None,
        )
        return advise(one)

    searched = Kernels(compile="block", compile_mode="max-autotune", cudnn_tuning_range=(1, 4))
    cudnn, autotune = lines(searched)
    assert "cudnn_benchmark: off" in cudnn and "compile_mode: default" in autotune
    (graphs,) = lines(Kernels(compile="block"))
    assert "`dynamic: true` compiles one for all" in graphs
    assert lines(Kernels(compile="block", dynamic=True)) == ()


def test_waiting_for_the_rank_with_the_busiest_experts_is_an_imbalance():
    experts = Experts(num_experts=64, top_k=2, ffn_hidden_size=11008)
    workload = replace(WORKLOAD, model=replace(MODEL, experts=experts))
    candidate = llama(Layout(dp_shard=8, zero_stage=3, ep=8))

    def bottlenecks(*loads):
        found = Findings(
            experts=tuple(
                ExpertLoad(layer=i, busiest=2.0, num_idle=0, rank=0, busiest_on_rank=2.0, busiest_rank=load)
                for i, load in enumerate(loads)
            )
        )
        spec = TrialSpec(workload=workload, candidate=candidate)
        breakdown = StepBreakdown(forward_s=0.3, backward_s=0.6, other_s=0.1)
        state = sweep([candidate], [measurement(spec, 1.0, 10e9, breakdown, findings=found)], workload=workload)
        return explain_sweep(state, Basis()).baseline.bottlenecks

    (uneven,) = (one for one in bottlenecks(1.5, 2.5) if one.kind == "imbalance")
    share = expert_flops_share(workload.model, workload.seq_length)
    assert 0.5 < share < 1.0 and uneven.seconds == pytest.approx(0.9 * share * 0.5)
    assert "2.00x the mean on average over layers, 2.50x in layer 1" in uneven.evidence[0]
    assert not [one for one in bottlenecks(1.0, 1.0) if one.kind == "imbalance"]
