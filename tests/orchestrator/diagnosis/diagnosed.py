"""Sweeps with planted causes, for tests of the diagnosis: what trials take comes from the cost model, or by hand."""

from dataclasses import replace

from cluster.hardware.topology import describe_topology, uniform_topology
from cluster.virtual import ModelledCost
from orchestrator.diagnosis.explain import Basis
from orchestrator.sweep.events import ProfileRun, TrialProposed
from orchestrator.sweep.fold import fold
from tests.support.story import created, ended, launched, measured
from trials.outcome import OutOfMemory, StepBreakdown
from trials.reports import Findings, RankProfile, StepTimes
from trials.spec import Candidate, Layout, LlamaModel, Precision, ProfileSpec, Recompute, TextData, TrialSpec, Workload

MODEL = LlamaModel(
    hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_hidden_size=11008, vocab_size=32000
)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=4096, global_batch_size=64)
TINY = Workload(
    model=replace(MODEL, hidden_size=256, num_heads=4, num_kv_heads=4, ffn_hidden_size=512),
    data=TextData(),
    seq_length=128,
    global_batch_size=64,
)
O1 = Precision(level="O1", dtype="bfloat16")
ONE_NODE = uniform_topology(1, 8, device_name="a100-80", memory_bytes=80 * 10**9)
TWO_NODES = uniform_topology(2, 8, device_name="a100-80", memory_bytes=80 * 10**9)
UNKNOWN = uniform_topology(1, 2, device_name="Frobnicator 9000", memory_bytes=80 * 10**9)


def llama(layout, **changes):
    return Candidate(**{"layout": layout, "precision": O1, "micro_batch_size": 1, **changes})


def full(layout, num_layers=32):
    """Recompute in full on ``layout``."""
    return Recompute(full=layout.stage_layers or ((num_layers,),))


def pipeline(*layers, schedule="1f1b", **degrees):
    return Layout(pp=len(layers), stage_layers=(tuple(layers),), schedule=schedule, **degrees)


def measurement(spec, step_s, peak, breakdown=None, **changes):
    return measured(
        step_s,
        world_size=spec.candidate.layout.world_size,
        tokens_per_step=spec.workload.tokens_per_step,
        breakdown=breakdown or StepBreakdown(other_s=step_s),
        peak_reserved_bytes=(int(peak),),
        **changes,
    )


def simulate(candidates, workload=WORKLOAD, topology=TWO_NODES, limit=None):
    """Outcomes of the candidates, of a machine half a deviation from what the cost model assumes."""
    cost = ModelledCost(describe_topology(topology), deviation=0.5, seed=3)
    for candidate in candidates:
        spec = TrialSpec(workload=workload, candidate=candidate)
        taken = cost(spec)
        if limit is not None and taken.peak_bytes > limit:
            yield OutOfMemory(evidence=None)
        else:
            yield measurement(spec, taken.step_time_s, taken.peak_bytes)


def sweep(candidates, outcomes, workload=WORKLOAD, checks=(), expected=()):
    """The state after these trials, and after ``checks``: pairs of a check and its outcome."""
    events = [created(workload=workload, hardware="test", fingerprint={})]
    trials = [(candidate, outcome, None) for candidate, outcome in zip(candidates, outcomes, strict=True)]
    trials += [(candidates[check.of], outcome, check) for check, outcome in checks]
    for number, (candidate, outcome, check) in enumerate(trials):
        events.append(
            TrialProposed(
                at_s=1.0,
                trial=number,
                candidate=candidate,
                origin="check" if check else "sampler" if number else "baseline",
                reason="test",
                check=check,
                expected=expected[number] if number < len(expected) else None,
            )
        )
        events += [launched(number), ended(number, outcome)]
    return fold(events)


def profiled(of, *ranks, base):
    """A profile run: per rank its seconds of computation, communication that nothing hides, and neither."""
    found = tuple(
        RankProfile(
            rank=i,
            stage=i,
            first_step=3,
            last_step=5,
            times=StepTimes(
                total_s=sum(times),
                computation_s=times[0],
                communication_s=times[1],
                uncovered_communication_s=times[1],
                free_s=times[2],
            ),
        )
        for i, times in enumerate(ranks)
    )
    run = replace(base.measurement, findings=Findings(profile=found))
    return ProfileRun(of=of, profile=ProfileSpec()), replace(base, measurement=run)


def basis(candidates, topology=TWO_NODES):
    return Basis(candidates=tuple(candidates), topology=topology)
