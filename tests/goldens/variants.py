"""Sweeps in which one thing is special, in every renderer: the lines in which they differ from a plain sweep.

Written and compared with :mod:`tests.goldens.outside`.
"""

from __future__ import annotations

import difflib
import functools
import math
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.gang.environment import MAX_BYTES_PER_RANK
from cluster.hardware.topology import Device
from orchestrator.live.live_pages import SweepView
from orchestrator.notifications import payload
from orchestrator.objective import Objective
from orchestrator.process_support import PLAIN
from orchestrator.proof.next_check import ratio_interval
from orchestrator.proof.progress import confirmation
from orchestrator.report.report import make_report, report_markdown
from orchestrator.report.summary import summarize
from orchestrator.sweep.events import (
    ActionRequested,
    Budget,
    CandidatesPruned,
    ChecksRequested,
    FinalistsChosen,
    FinishCause,
    LeaseChanged,
    LedgerEvent,
    PredictedResult,
    SweepFinished,
    SweepPaused,
    TrialsRetried,
)
from orchestrator.sweep.fold import fold
from orchestrator.sweep.snapshot import Home
from orchestrator.sweep.state import SweepState
from orchestrator.tracking import run_records
from tests.goldens import outside
from tests.support import cli_homes, proof_story
from tests.support.long_story import START_S, all_kinds, candidate, events, speeds
from tests.support.story import FOUND, created, ended, evidence, failures, launched, measured, not_believed, proposed
from trials.health import DeviceMemory, Disturbance
from trials.outcome import Crashed, GangLost, HostOutOfMemory, Measured, StepBreakdown, StoppedEarly, TimedOut
from trials.reports import (
    CollectiveCount,
    Findings,
    GraphReport,
    MemoryPeak,
    OperatorTime,
    PhaseTime,
    ProfileFile,
    RankProfile,
    Redundancy,
    ScriptReport,
    StepTimes,
)
from trials.spec import ImageFolderData, Layout, LinearModel, RandomData, ResNetModel, Workload

NAME = "sweep"
SHOWN = (0, 1)
"""Trials whose explanation, tags and metrics are kept, with the first check."""


@dataclass(frozen=True)
class Variant:
    story: Callable[[], list[LedgerEvent]]
    base: str = ""
    """The variant that this one is compared with; empty to keep it whole."""
    trials: tuple[int, ...] = SHOWN
    documents: dict[str, Any] = field(default_factory=dict)
    is_held: bool = False


def changed(story: list[LedgerEvent], change: Callable[[LedgerEvent, Any], dict[str, Any]]) -> list[LedgerEvent]:
    """Measurements with what ``change`` makes of an event and its measurement."""

    def on(event: LedgerEvent) -> LedgerEvent:
        outcome = getattr(event, "outcome", None)
        if not isinstance(outcome, Measured):
            return event
        found = replace(outcome.measurement, **change(event, outcome.measurement))
        return replace(event, outcome=Measured(measurement=found))  # type: ignore[call-arg]

    return [on(event) for event in story]


def begun(story: list[LedgerEvent], **changes: Any) -> list[LedgerEvent]:
    return [replace(story[0], **changes), *story[1:]]


proof = proof_story.proof_events
FIRST_CHECK = len(all_kinds())
CHECKS = (FIRST_CHECK, FIRST_CHECK + 12, PROFILED := FIRST_CHECK + 14)
"""One of each kind: a round, a run of the loss gate, the profile."""


# ---- sweeps with a proof ----

QUIET = Disturbance(node="n1", seconds=4.0, foreign_cpu=0.01, steal=0.0)
BUSY = replace(QUIET, foreign_cpu=0.48, foreign_processes=("cc1plus 0.9",), steal=0.01)


def _busy() -> list[LedgerEvent]:
    def seen(event: Any, _: Any) -> dict[str, Any]:
        return {"disturbances": (BUSY if event.trial in (1, FIRST_CHECK) else QUIET,)}

    return changed(proof(), seen)


def _fading() -> list[LedgerEvent]:
    times_s = tuple(0.05 * 1.05**i for i in range(9))
    return changed(proof(), lambda event, _: {"step_times_s": times_s} if event.trial == 1 else {})  # type: ignore


def _silent() -> list[LedgerEvent]:
    """A program that reports nothing but how long its steps take."""
    unknown = {
        "breakdown": StepBreakdown(),
        "peak_flops_per_s": 1e12,
        "model_flops_per_token": 0.0,
        "findings": Findings(script=ScriptReport()),
    }
    nothing = dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "losses", "grad_norms"), ())
    return changed(proof(), lambda *_: {**unknown, **nothing})


def _times(computation_s: float) -> StepTimes:
    free_s = 0.09 - computation_s
    return StepTimes(
        total_s=0.1,
        computation_s=computation_s,
        communication_s=0.02,
        uncovered_communication_s=0.01,
        free_s=free_s,
    )


def _operator(name: str, cpu_s: float, share: float) -> OperatorTime:
    return OperatorTime(name=name, num_calls=4.0, cpu_s=cpu_s, device_s=0.0, share=share)


_COLLECTIVE = CollectiveCount(
    module="layers.*.attention.wo",
    phase="forward",
    num_bytes=1 << 20,
    kind="all_reduce",
    axis="tp",
    group_size=2,
    num_calls=4,
)
_FIRST = RankProfile(
    rank=0,
    stage=0,
    first_step=3,
    last_step=5,
    times=_times(0.06),
    phases=(PhaseTime(name="forward", time_s=0.03), PhaseTime(name="bubble", time_s=0.02)),
    operators=(_operator("aten::mm", 0.04, 0.8), _operator("aten::mul", 0.01, 0.2)),
    collectives=(_COLLECTIVE,),
    redundancies=(
        Redundancy(module="<w1>", phase="backward", problem="is only added", num_calls=2, num_bytes=1 << 20),
    ),
    counted=True,
    memory=MemoryPeak(peak_bytes=3 << 20, start_bytes=0, phase="backward"),
    folder="/far/profile",
    files=(ProfileFile(name="rank0.trace.json.gz", num_bytes=4096),),
)
_SECOND = replace(
    _FIRST,
    rank=2,
    stage=1,
    times=_times(0.02),
    operators=(_operator("aten::mm", 0.02, 0.5), _operator("aten::embedding", 0.02, 0.5)),
    collectives=(replace(_COLLECTIVE, num_calls=6), replace(_COLLECTIVE, module="output", num_calls=1)),
    redundancies=(),
    memory=None,
    files=(ProfileFile(name="rank2.trace.json.gz", num_bytes=MAX_BYTES_PER_RANK + 1),),
    notes=("a note",),
)
PROFILES = (_SECOND, _FIRST)
"""Two stages, of which the first computes more; files here, and more than may be sent from the other rank."""


def profiled(number: int, *profiles: RankProfile) -> list[LedgerEvent]:
    """The proof whose profile, or another run of it, is what ranks reported."""
    places = ("here/0", "here/1", "far/0", "far/1")
    found = {"findings": Findings(profile=profiles), "places": places}
    return changed(proof(), lambda event, _: found if event.trial == number else {})  # type: ignore


def _compiled() -> list[LedgerEvent]:
    cold = GraphReport(num_graphs=1, num_recompilations=0, compile_s=90.0, cache_misses=2)
    graphs = {
        0: replace(cold, compile_s=8.0, cache_hits=2, cache_misses=0),
        1: cold,
        2: replace(cold, compile_s=50.0, cache_hits=1),
    }
    other = replace(cold, compile_s=3.0, cache_misses=0)

    def on(event: Any, _: Any) -> dict[str, Any]:
        graph = graphs.get(event.trial, other)
        return {"compile_s": graph.compile_s, "findings": Findings(graph=graph)}

    return changed(proof(), on)


def _wide() -> list[LedgerEvent]:
    """Rounds of t001 that differ by 7% either way and are slower than in the search; with the verdict on them."""
    rounds = {number: i // 3 for i, number in enumerate(range(FIRST_CHECK, FIRST_CHECK + 12)) if i % 3 == 1}

    def on(event: Any, found: Any) -> dict[str, Any]:
        if event.trial not in rounds:
            return {}
        factor = 1.05 * math.exp(0.07 * (-1) ** (rounds[event.trial] // 2))
        return {"step_times_s": tuple(factor * time_s for time_s in found.step_times_s)}

    story = changed(proof(), on)
    end = next(place for place, event in enumerate(story) if event.kind == "verdict_reached")
    before = confirmation(fold(story[:end]))
    assert before is not None
    overall = ratio_interval(before.judgement.against_baseline[1].ratio)
    verdict = replace(story[end].verdict, speedup=overall)  # type: ignore[union-attr]
    return [*story[:end], replace(story[end], verdict=verdict), *story[end + 1 :]]  # type: ignore[call-arg]


def _asked_again() -> list[LedgerEvent]:
    """A later confirmation of another trial, cancelled: the first verdict no longer stands."""
    story, at_s = proof(), START_S + 900.0
    first = sum(event.kind == "trial_proposed" for event in story)
    return [
        *story,
        ChecksRequested(at_s=at_s, request=1, by="me", confirm=(2,)),
        FinalistsChosen(
            at_s=at_s + 1, finalists=(2,), reason="asked for", first_check=first, cause=FinishCause.BUDGET_TRIALS
        ),
        SweepFinished(at_s=at_s + 2, status="cancelled", reason="cancelled by anna", cause=FinishCause.CANCELLED),
    ]


def _being_confirmed() -> list[LedgerEvent]:
    """All of one round, then the baseline runs again."""
    story = proof()
    chosen = next(i for i, event in enumerate(story) if event.kind == "finalists_chosen")
    return story[: chosen + 1 + 3 * 3 + 2]


# ---- sweeps without one ----


def _of_workload(model: Any, data: Any) -> list[LedgerEvent]:
    workload = Workload(model=model, data=data, seq_length=1, global_batch_size=512)
    return begun(changed(events(speeds(0.1, 0.08)), lambda *_: {"samples_per_step": 512}), workload=workload)


def _fewer_devices() -> list[LedgerEvent]:
    story: list[LedgerEvent] = [created(hardware="1x2 test CPU")]
    for number, num_devices in enumerate((2, 1)):
        own = replace(candidate(number), layout=Layout(dp_replicate=num_devices))
        story += [proposed(number, own), launched(number), ended(number, measured(0.1, world_size=num_devices))]
    return story


def _findings() -> list[LedgerEvent]:
    pipeline = StepBreakdown(forward_s=0.02, backward_s=0.05, bubble_s=0.03)
    gib = 1 << 30
    memory = {
        "peak_allocated_bytes": (40 * gib,),
        "peak_reserved_bytes": (70 * gib,),
        "device_memory": DeviceMemory(total_bytes=80 * gib, outside_bytes=2 * gib, num_retries=3),
    }
    return events([measured(0.1, **memory), measured(0.05, findings=FOUND, breakdown=pipeline)])


SLOW = StoppedEarly(
    step_times_s=(0.3, 0.31), at_least_s=0.24, incumbent=0, saved_device_seconds=90.0, evidence=evidence("too slow")
)
HOST = HostOutOfMemory(evidence=evidence("killed by the kernel"))


def _ends() -> list[LedgerEvent]:
    story = events([*speeds(0.1, 0.08), *failures().values(), SLOW, HOST], finished=False)
    return [*story, CandidatesPruned(at_s=story[-1].at_s, witness=2, rules={"oom-micro_batch_size": 3})]


def on_node(node: str, event: Any) -> Any:
    return replace(event, ranks=(Device(node=node, index=0),), num_devices=1)


def lost(node: str, cause: Any = "infrastructure") -> GangLost:
    return GangLost(evidence=replace(evidence(f"{node} went away"), rank=None, node=node), cause=cause)


def _launches() -> list[LedgerEvent]:
    """Losses and a hang on one node: quarantine. Then a retry by hand, which is measured, and a crash by a signal."""
    hang = TimedOut(phase="measuring", evidence=replace(evidence("no progress"), rank=1, node="bad", exit_code=-9))
    others = tuple(f"rank {i}: gone" for i in range(9))
    crash = Crashed(evidence=replace(evidence("x\x1b[2J" * 40), node="n1", exit_code=-11, collateral=others))
    expected = PredictedResult(step_time_s=0.05, log_spread=0.1, peak_bytes=2.0**30, probability_fits=0.9)
    story: list[LedgerEvent] = [
        created(budget=Budget(max_trials=9, lost_attempts_per_trial=3, strikes_per_node=3)),
        replace(proposed(0), expected=expected),
    ]
    outcomes = (lost("bad"), lost("bad", "preempted"), lost("bad"), hang)
    for attempt, outcome in enumerate(outcomes):
        at_s = 10.0 * (attempt + 1)
        story.append(on_node("bad", launched(0, attempt=attempt, at_s=at_s)))
        story.append(ended(0, outcome, attempt=attempt, at_s=at_s + 5.0))
    return [
        *story,
        TrialsRetried(at_s=80.0, request=1, trials=(0,), by="anna@desk"),
        on_node("good", launched(0, attempt=4, at_s=90.0)),
        ended(0, measured(0.1), attempt=4, at_s=95.0),
        proposed(1, at_s=96.0),
        launched(1, at_s=97.0),
        ended(1, crash, at_s=99.0),
    ]


def running(*more: LedgerEvent, budget: Budget | None = None) -> list[LedgerEvent]:
    story = cli_homes.running(NAME)
    return [*(begun(story, budget=budget) if budget else story), *more]


def _to_be_launched_again() -> list[LedgerEvent]:
    now_s = time.time()
    loss = (ended(5, lost("n1"), at_s=now_s), LeaseChanged(at_s=now_s, nodes=("n2",)))
    return running(*loss, budget=Budget(strikes_per_node=1))


AT_WORK = {"lease": cli_homes.LEASE, "live": cli_homes.LIVE}
WAITS = {"base": "at work", "trials": (5, 7), "documents": AT_WORK}
CANCELLED = SweepFinished(at_s=9e9, status="cancelled", reason="cancelled by anna", cause=FinishCause.CANCELLED)
PRICED = Objective(name="device_cost", devices_per_node=2, price_per_device_hour=3.0)

VARIANTS: dict[str, Variant] = {
    "confirmed": Variant(proof),
    "quiet or busy": Variant(_busy, "confirmed"),
    "fading": Variant(_fading, "confirmed"),
    "silent": Variant(_silent, "confirmed"),
    "profiled": Variant(lambda: profiled(PROFILED, *PROFILES), "confirmed"),
    "one rank profiled": Variant(lambda: profiled(PROFILED, _FIRST), "profiled"),
    "compiled": Variant(_compiled, "confirmed", trials=(0, 1, 2)),
    "wide": Variant(_wide, "confirmed"),
    "asked again": Variant(_asked_again, "confirmed", trials=(0, 1, 2)),
    "kept": Variant(lambda: proof("keep"), "confirmed"),
    "unconfirmed": Variant(lambda: proof("unconfirmed"), "confirmed"),
    "being confirmed": Variant(_being_confirmed, "confirmed"),
    "searched": Variant(lambda: events(speeds(0.1, 0.08))),
    "tie": Variant(lambda: events(speeds(0.1, 0.0999)), "searched"),
    "nothing faster": Variant(lambda: events(speeds(0.1, 0.2)), "searched"),
    "one step": Variant(lambda: events([measured(step_times_s=(t,)) for t in (0.1, 0.05)]), "searched"),
    "fewer devices": Variant(_fewer_devices, "searched"),
    "fewer devices, sooner": Variant(
        lambda: begun(_fewer_devices(), objective=Objective(name="step_time")), "fewer devices"
    ),
    "busy": Variant(lambda: changed(events(speeds(0.1, 0.08)), lambda *_: {"disturbances": (BUSY,)}), "searched"),
    "priced": Variant(lambda: begun(events(speeds(0.1, 0.08)), objective=PRICED), "searched"),
    "samples": Variant(lambda: _of_workload(LinearModel(), RandomData()), "searched"),
    "images": Variant(lambda: _of_workload(ResNetModel(), ImageFolderData()), "samples"),
    "findings": Variant(_findings, "searched"),
    "simulated": Variant(lambda: begun(events(speeds(0.1, 0.08)), cluster_kind="simulated"), "searched"),
    "rehearsed": Variant(lambda: begun(proof(), cluster_kind="simulated"), "confirmed"),
    "not believed": Variant(lambda: [*events([not_believed()], finished=False)], "searched"),
    "no baseline": Variant(lambda: events([failures()["crashed"], measured(), measured()]), "searched"),
    "nothing measured": Variant(lambda: events(failures().values()), "searched"),
    "ends": Variant(_ends, "searched", trials=tuple(range(10))),
    "launches": Variant(_launches),
    "at work": Variant(running, trials=(5, 7), documents=AT_WORK, is_held=True),
    "to be launched again": Variant(
        _to_be_launched_again, "at work", (5,), {"lease": {**cli_homes.LEASE, "waiting": ""}}, is_held=True
    ),
    "interrupted": Variant(running, **WAITS),  # type: ignore[arg-type]
    "paused": Variant(lambda: running(SweepPaused(at_s=9e9, reason="paused by anna")), **WAITS),  # type: ignore[arg-type]
    "cancelled": Variant(lambda: running(CANCELLED), **WAITS),  # type: ignore[arg-type]
    "draining": Variant(
        lambda: running(ActionRequested(at_s=time.time(), request=1, action="drain", by="anna@desk")),
        **WAITS,  # type: ignore[arg-type]
        is_held=True,
    ),
    "spent": Variant(lambda: running(budget=Budget(device_hours=0.01)), **WAITS, is_held=True),  # type: ignore[arg-type]
}


def renderings(variant: Variant) -> dict[str, str]:
    """What every renderer makes of it, by name."""
    with outside.frozen() as folder:
        story = variant.story()
        more = {"controller": cli_homes.controller()} if variant.documents else {}
        ledger = cli_homes.keep(folder, NAME, begun(story, sweep=NAME), **variant.documents, **more)
        try:
            with ledger.hold() if variant.is_held else nullcontext():
                found = dict(_renderings(folder, fold(ledger.events()), variant))
        finally:
            ledger.close()
            shutil.rmtree(Home(folder).sweep_folder(NAME))
        return {name: outside.plain(text, folder) for name, text in found.items()}


def _renderings(folder: Path, state: SweepState, variant: Variant) -> Iterator[tuple[str, str]]:
    trials = [trial for trial in variant.trials if trial < len(state.trials)]
    for words in (("ps",), ("status", NAME), ("report", NAME), ("explain", NAME)):
        yield " ".join(words), outside.run(*words)
    whole = "status" if variant.documents else "report"
    yield f"{whole} --json", outside.document(whole, NAME)
    for trial in trials:
        yield f"explain t{trial:03d}", outside.run("explain", NAME, f"t{trial:03d}")
        yield f"explain t{trial:03d} --json", outside.document("explain", NAME, f"t{trial:03d}")
    yield "page", outside.offline(NAME)
    yield "live", outside.parts(SweepView(Home(folder), NAME, PLAIN, lambda _sweep: {}).parts())
    yield "note", report_markdown(make_report(state, summarize(state, "")))
    yield "notification", outside.as_json(payload("finished", 1, state))
    recorded = {"sweep": run_records.verdict_tags(state) | run_records.verdict_metrics(state)}
    recorded["sweep"] |= run_records.best_metrics(state) | run_records.cost_metrics(state)
    ranks, roles, finalists = (
        run_records.ranks(state),
        run_records.proof_tags(state),
        run_records.finalist_metrics(state),
    )
    launched_trials = [trial for trial in trials if state.trials[trial].attempts]
    for number in [*launched_trials, *(check for check in CHECKS if check < len(state.trials))]:
        trial = state.trials[number]
        record = {**run_records.attempt_tags(trial), **roles.get(number, {}), **run_records.trial_metrics(state, trial)}
        record |= finalists.get(number, {}) | run_records.expected_metrics(state.sweep, trial)
        record |= {"rank": ranks.get(number), "curves": run_records.trial_curves(trial)}
        recorded[f"t{number:03d}"] = record
        yield f"note of t{number:03d}", run_records.trial_note(state, trial)
    yield "recorded", outside.as_json(recorded)


@functools.cache
def rendered(name: str) -> dict[str, str]:
    return renderings(VARIANTS[name])


def text(name: str) -> str:
    """The golden: per renderer the lines that differ from the base's, or all of them."""
    base = rendered(VARIANTS[name].base) if VARIANTS[name].base else {}
    found = [
        f"==== {part}\n" + "".join(f"{line}\n" for line in _differing(base.get(part, ""), shown))
        for part, shown in rendered(name).items()
        if shown != base.get(part)
    ]
    return "".join(found)


def _differing(before: str, after: str) -> Iterator[str]:
    if not before:
        yield from after.splitlines()
        return
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), n=0):
        if not line.startswith(("---", "+++", "@@")):
            yield line.rstrip()


def file_name(name: str) -> str:
    return f"variant.{name.replace(', ', '-').replace(' ', '-')}.txt"


def made() -> dict[str, str]:
    return {file_name(name): text(name) for name in VARIANTS}
