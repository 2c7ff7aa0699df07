"""A gang on the controller's side: plausibility of its ranks' reports, its outcome and its progress. No I/O."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from cluster.base import GangEnded, GangEvent, GangLaunch, GangProgress
from cluster.gang.hang_verdict import RankSight, verdict
from cluster.gang.messages import (
    PHASES,
    SCRIPT_RUNNERS,
    GangOrder,
    NodeCompiling,
    NodeEvent,
    NodeFailing,
    NodeGone,
    PeerCompiles,
    RankFailure,
    RankPlace,
    RankResult,
    RankSuccess,
    StopGang,
)
from cluster.hardware.topology import dense_peak
from trials.failure import TREATMENTS, Treatment
from trials.files import CodecError, from_json
from trials.health import (
    LOAD_SUFFIX,
    DeviceHealth,
    Disturbance,
    most_disturbed,
    most_noteworthy,
    with_throttling,
    worst_memory,
)
from trials.outcome import (
    SLACK_S,
    Contradiction,
    Crashed,
    Diverged,
    Elapsed,
    Evidence,
    Failure,
    GangLost,
    HostOutOfMemory,
    Infeasible,
    Measured,
    Measurement,
    NotBelieved,
    Outcome,
    OutOfMemory,
    RankReport,
    StepBreakdown,
    TimedOut,
    contradicted,
)
from trials.reports import ExpertLoad, Findings, FusedOperator, GraphReport, OperatorCast, PatternEffect, merge_scripts
from trials.secrets import redact

# ---- Whether the reports of a gang's ranks can be true
#
# Reports are input like any other: a clock that was set back, an overflowed counter or a faulty runner must not become
# a measurement that is promoted. Impossible figures make the attempt a fault of its candidate, with rank, field and
# value in the message.
#
# A rank that ran a user's program may lack figures, even step times. Then one of its peers must have them. Ranks of
# such a program count losses independently, so their numbers of losses need not agree.

MIN_STEP_S = 1e-6
"""Shortest credible step, in seconds: clocks rarely resolve less, and launching a single kernel takes longer."""
MAX_STEP_S = 1e7
"""Longest credible step, in seconds: months. Larger values are dates, not durations."""
RUNNER_WORK_S = 5e-3
"""Time of the built-in runner between two steps, in seconds: garbage collection, and agreement on the time."""
ERROR_TYPE = "ImplausibleReport"
"""Error type in the evidence."""

_LEAST = {
    "world_size": 1,
    "tokens_per_step": 1,
    "samples_per_step": 0,
    "num_warmup_steps": 0,
    "num_skipped_steps": 0,
    "peak_allocated_bytes": 0,
    "peak_reserved_bytes": 0,
    "model_flops_per_token": 0,
    "compile_s": 0,
    "num_ranks": 1,
    "step_time_resolution_s": 0,
}
"""Fields with amounts, and their minima."""
_ALIKE = ("world_size", "tokens_per_step", "samples_per_step", "num_warmup_steps", "model_flops_per_token")
"""Fields equal on all ranks: properties of the workload or of the protocol."""
_ALIKE_IN_SCRIPTS = ("world_size",)
"""Those that do not depend on observing a user's program."""


def refusal(reports: Sequence[RankReport]) -> Crashed | Diverged | NotBelieved | None:
    """Return the outcome of a gang with implausible reports, given in rank order; None if they are plausible.

    A non-finite loss or gradient norm is no fault of the report: the candidate diverged.
    """
    for rank, report in enumerate(reports):
        for name, value, wanted in _impossible(rank, report):
            message = f"rank {rank} reported {name} = {value}: it must be {wanted}"
            return Crashed(evidence=Evidence(message=message, rank=rank, error_type=ERROR_TYPE))
    if problem := _disagreement(reports):
        return Crashed(evidence=Evidence(message=problem, error_type=ERROR_TYPE))
    return _divergence(reports) or _not_believed(reports)


def _not_believed(reports: Sequence[RankReport]) -> NotBelieved | None:
    for rank, report in enumerate(reports):
        if (found := report.contradiction) is not None:
            return not_believed(found, rank)
    return None


def not_believed(found: Contradiction, rank: int | None) -> NotBelieved:
    """Return the outcome of a gang whose step times, as reported by this rank, are contradicted."""
    return NotBelieved(
        num_steps=found.num_steps,
        reported_s=found.reported_s,
        seen_s=found.seen_s,
        compared=f"{found.source} with {found.witness}",
        evidence=Evidence(message=found.message, rank=rank),
    )


def contradiction(
    step_times_s: Sequence[float], seen_steps: Sequence[int], seen_at_s: Sequence[float]
) -> Contradiction | None:
    """Return how the warden's observations contradict the step times of a gang of the built-in runner; None if not.

    User code runs inside the ranks and may change their clock. The runner's work between two steps, which step times
    exclude, is allowed for. Ranks on accelerators report a step during the next one, but the last ones at once. A
    warden that a busy host delays receives several reports together; they end one interval.

    Args:
        step_times_s: step times of the gang, from the first measured step on.
        seen_steps: numbers of measured steps, from 1 on.
        seen_at_s: time at which the warden received the progress of each.
    """
    last_by_arrival = {at_s: step for step, at_s in sorted(zip(seen_steps, seen_at_s, strict=True))}
    ends = sorted((step, at_s) for at_s, step in last_by_arrival.items())
    intervals = [
        Elapsed(num_steps=step - before, reported_s=sum(step_times_s[before:step]), seen_s=at_s - before_s)
        for (before, before_s), (step, at_s) in itertools.pairwise(ends)
        if 0 < before < step <= len(step_times_s)
    ]
    if not intervals:
        return None
    return contradicted(
        intervals,
        slack_s=SLACK_S + RUNNER_WORK_S * len(intervals) + 2 * max(step_times_s),
        source="the rank",
        witness="the arrival of its progress",
    )


def is_step_time(seconds: float | None) -> bool:
    """Whether a step can have taken that long; False for nan and None."""
    return seconds is not None and MIN_STEP_S <= seconds <= MAX_STEP_S


def is_script(report: RankReport) -> bool:
    """Whether the rank ran a user's program."""
    return report.findings.script is not None


def _impossible(rank: int, report: RankReport) -> Iterator[tuple[str, object, str]]:
    """Yield the impossible fields of one report: name, value, and requirement."""
    if report.rank != rank:
        yield "rank", report.rank, f"{rank}, which it was started as"
    if not report.step_times_s and not is_script(report):
        yield "step_times_s", "()", "at least one step time"
    for index, step_s in enumerate(report.step_times_s):
        if not is_step_time(step_s):
            yield f"step_times_s[{index}]", step_s, f"a number of seconds from {MIN_STEP_S:g} to {MAX_STEP_S:g}"
    for name, value, least in _amounts(report):
        if not least <= value < math.inf:  # true of nan as well
            yield name, value, f"a finite number, at least {least:g}"
    if report.num_skipped_steps > max(len(report.losses), len(report.step_times_s)):
        yield "num_skipped_steps", report.num_skipped_steps, "no more than there were steps"
    if len(report.losses) != len(report.grad_norms) and not is_script(report):
        yield "grad_norms", f"{len(report.grad_norms)} values", f"as many as losses: {len(report.losses)}"


def _amounts(report: RankReport) -> Iterator[tuple[str, float, float]]:
    """Yield the fields with amounts: name, value, minimum."""
    for name, least in _LEAST.items():
        yield name, getattr(report, name), least
    for phase in fields(report.breakdown):
        yield f"breakdown.{phase.name}", getattr(report.breakdown, phase.name), 0


def _disagreement(reports: Sequence[RankReport]) -> str:
    """Describe how the reports contradict each other; empty if they do not."""
    reporting = [report for report in reports if report.step_times_s]
    if not reporting:
        return "no rank reported a step time: no report, hook, file or log line contains one"
    of_script = any(map(is_script, reports))
    for name, of in ({"steps": "step_times_s"} | ({} if of_script else {"losses": "losses"})).items():
        counts = [len(getattr(report, of)) for report in reporting]
        if len(set(counts)) != 1:
            return f"the ranks disagree on the number of {name}: {counts}"
    for name in _ALIKE_IN_SCRIPTS if of_script else _ALIKE:
        values = [getattr(report, name) for report in reports]
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            return f"the ranks disagree on {name}: rank 0 reported {values[0]}, rank {odd} {values[odd]}"
    return ""


def _rank_parts(reports: Sequence[RankReport]) -> tuple[StepBreakdown, ...]:
    """Return the step parts of every rank if each rank recorded its own passes."""
    parts = tuple(report.breakdown for report in reports if is_script(report) and report.breakdown.forward_s > 0)
    return parts if len(parts) == len(reports) > 1 else ()


def _divergence(reports: Sequence[RankReport]) -> Diverged | None:
    for rank, report in enumerate(reports):
        for name, values in (("loss", report.losses), ("gradient norm", report.grad_norms)):
            step = next((step for step, value in enumerate(values, start=1) if not math.isfinite(value)), None)
            if step is not None:
                message = f"rank {rank} reported a {name} of {values[step - 1]} in step {step}"
                return Diverged(evidence=Evidence(message=message, rank=rank))
    return None


# One outcome for a gang, from the reports of its ranks and nodes: pure functions.


COLLATERAL = frozenset({"connection"})
"""Categories of failures caused by another rank's failure."""
MAY_HAVE_A_CAUSE = COLLATERAL | {"device_suspect"}
"""Categories of failures that may have a cause on another rank, worth a moment's wait: a kernel also fails when it
reads the memory of a peer's broken device."""
STOPPED = "stopped"
"""Category of ranks killed because a peer failed."""
CAUSE_WINDOW_S = {"oom": 1.0, "host_oom": 1.0, "device_lost": 5.0}
"""How much later than the first failure its cause may be dated, in seconds, by the cause's category: the traceback of
an out-of-memory error takes time to unwind, and a device's failure reaches its own rank with the next call, but its
peers' kernels at once."""
CLOCK_SKEW_S = 0.5
"""Largest clock difference between two nodes, in seconds. Failures on two nodes that are closer in time are ordered by
:data:`_EVIDENCE`; those on one node by their time."""
_EVIDENCE = (
    ("oom", "host_oom", "device_lost"),
    ("infeasible", "data", "diverged", "device_busy", "node_setup", "disk", "port", "preempted", "killed"),
    ("error", "exception", "exit", "device_suspect"),
)
"""Categories, from those that no peer's failure can cause to those that may be an effect. Those that only report an
absence ("deadline", "lost", "controller") come last."""


def fold(results: Iterable[RankResult], disturbances: Sequence[Disturbance] = ()) -> Outcome:
    """Return the gang's outcome: a measurement if every rank has a report, else the root cause.

    ``disturbances``: what else the gang's nodes did while it measured, if known.

    The order of ``results`` does not matter. Further results next to a full set of reports change nothing: a kill that
    came too late, devices that were not free in time afterwards.
    """
    known = list(results)
    successes = sorted((r for r in known if isinstance(r, RankSuccess)), key=lambda success: success.rank)
    failures = [result for result in known if isinstance(result, RankFailure)]
    if successes and [success.rank for success in successes] == list(range(successes[0].report.world_size)):
        return _merge(successes, disturbances)
    causes = [failure for failure in failures if failure.category != STOPPED]
    if not causes:
        return GangLost(evidence=Evidence(message="some ranks reported nothing, and the cause is unknown"))
    root = root_cause(causes)
    if root.category == "deadline":
        return _hang(root, failures)
    return _outcome(root, collateral=[failure for failure in causes if failure is not root])


def _hang(root: RankFailure, failures: Sequence[RankFailure]) -> Failure:
    """Return the outcome of a gang without progress, by the states of all of its ranks."""
    sights = {sight.rank: sight for failure in failures for sight in failure.sights}
    if not sights:
        return _outcome(root, collateral=[failure for failure in failures if failure is not root])
    of = {sight.rank: failure for failure in failures for sight in failure.sights}
    found = verdict(sights)
    suspect = of[found.suspects[0]]
    nodes = {of[rank].node for rank in found.suspects}
    is_localised = found.kind == "rank" and len(nodes) == 1 and (len(found.suspects) < len(of) or len(of) == 1)
    is_one = found.kind in ("rank", "unknown")
    where = _where(sights[found.suspects[0]], suspect) if is_one else ""
    evidence = Evidence(
        message=redact("; ".join(part for part in (root.message, where, found.detail) if part)),
        rank=suspect.rank if is_one else None,
        node=suspect.node if is_localised else None,
        log_tail=tuple(map(redact, suspect.log_tail)),
        collateral=tuple(
            redact(f"rank {rank}: {failure.category}: {sights[rank].where}")
            for rank, failure in sorted(of.items())
            if rank != found.suspects[0]
        ),
    )
    if found.kind == "link":
        return GangLost(evidence=evidence, is_hang=True)
    return TimedOut(phase=suspect.phase, evidence=evidence)


def _where(sight: RankSight, failure: RankFailure) -> str:
    """Describe where a rank was; with its number if its process is one of several in a slot."""
    return sight.where if sight.rank == failure.rank else f"rank {sight.rank}: {sight.where}"


def root_cause(failures: Sequence[RankFailure]) -> RankFailure:
    """Return the failure that explains the others: the earliest one, but no lost connection before a root cause, and no
    hang before the loss of a node or a device.

    Failures too close to the earliest to be ordered by time are ordered by their kind of evidence.
    """
    roots = [failure for failure in failures if failure.category not in COLLATERAL] or list(failures)
    first = min(roots, key=_order)
    lost = [failure for failure in roots if failure.category in ("lost", "device_lost")]
    if first.category == "deadline" and lost:  # ranks hang on a lost node or device before its loss is detected
        return min(lost, key=_order)
    return min(
        (f for f in roots if f.at_s <= first.at_s + _time_tolerance_s(f, first)),
        key=lambda f: (_evidence_rank(f), _order(f)),
    )


def _time_tolerance_s(failure: RankFailure, first: RankFailure) -> float:
    """Return by how many seconds the failure may be dated after ``first`` and still be its cause."""
    skew_s = 0.0 if failure.node == first.node else CLOCK_SKEW_S
    return max(skew_s, CAUSE_WINDOW_S.get(failure.category, 0.0))


def _evidence_rank(failure: RankFailure) -> int:
    return next((rung for rung, members in enumerate(_EVIDENCE) if failure.category in members), len(_EVIDENCE))


def _order(failure: RankFailure) -> tuple[float, int, str, str, str]:
    rank = -1 if failure.rank is None else failure.rank
    return failure.at_s, rank, failure.node, failure.category, failure.message


def _outcome(root: RankFailure, *, collateral: Sequence[RankFailure]) -> Failure:
    evidence = Evidence(
        message=redact(root.message),
        rank=root.rank,
        node=root.node or None,
        error_type=root.error_type,
        exit_code=root.exit_code,
        log_tail=tuple(map(redact, root.log_tail)),
        collateral=tuple(_describe(failure) for failure in sorted(collateral, key=_order)),
    )
    match root.category:
        case "deadline":
            return TimedOut(phase=root.phase, evidence=evidence)
        case "controller":
            return GangLost(evidence=evidence, cause="controller")
        case "preempted":
            return GangLost(evidence=evidence, cause="preempted")
        case "killed":
            return GangLost(evidence=evidence, cause="killed")
        case category:
            found = _by_treatment(TREATMENTS.get(category, TREATMENTS["error"]), evidence)
            return replace(found, refused=root.refused) if isinstance(found, Infeasible) else found


def _by_treatment(treatment: Treatment, evidence: Evidence) -> Failure:
    """Return the outcome for a class of failures. A node that is not at fault appears only in the message."""
    match treatment.ends_as:
        case "oom":
            return OutOfMemory(evidence=evidence)
        case "host_oom":
            return HostOutOfMemory(evidence=evidence)
        case "infeasible":
            return Infeasible(evidence=evidence)
        case "diverged":
            return Diverged(evidence=evidence)
        case "crashed":
            return Crashed(evidence=evidence)
        case "gang_lost":
            doubt = "" if treatment.strikes_node else f" (on {evidence.node}, which may not be the cause)"
            message = _with_remedy(evidence.message, doubt, treatment.remedy)
            node = evidence.node if treatment.strikes_node else None
            return GangLost(evidence=replace(evidence, message=message, node=node))


def _with_remedy(message: str, doubt: str, remedy: str) -> str:
    """Insert the remedy after the message's first line, which is what users see."""
    what, end, rest = message.partition("\n")
    return f"{what}{doubt}{f'; {remedy}' if remedy else ''}{end}{rest}"


def _describe(failure: RankFailure) -> str:
    where = failure.node if failure.rank is None else f"rank {failure.rank}"
    return redact(f"{where}: {failure.category}: {failure.message}")


def misplacement(places: Sequence[RankPlace]) -> Evidence | None:
    """Return evidence that ranks shared a device or ran on the wrong host; None if they did not. ``places``: in rank
    order."""
    taken: dict[tuple[str, str], int] = {}
    hosts: dict[str, str] = {}
    for rank, place in enumerate(places):
        # A GPU's UUID is globally unique; a slot's index is unique on its node.
        key = ("" if place.device.startswith("GPU-") else place.node, place.device)
        if (other := taken.setdefault(key, rank)) != rank:
            problem = f"ranks {other} and {rank} both ran on device {place.device} of {place.node}"
        elif (host := hosts.setdefault(place.node, place.host)) != place.host:
            problem = f"ranks of {place.node} ran on two hosts, {host} and {place.host}"
        else:
            continue
        return Evidence(message=f"wrong placement: {problem}", rank=rank, node=place.node)
    return None


def _merge(successes: Sequence[RankSuccess], disturbances: Sequence[Disturbance]) -> Outcome:
    """Merge the reports of all ranks, in rank order, to a measurement; to a failure if they are implausible."""
    places = [success.place for success in successes if success.place is not None]
    if (evidence := misplacement(places)) is not None:
        return GangLost(evidence=evidence)
    reports = [success.report for success in successes]
    if (refused := refusal(reports)) is not None:
        return refused
    reporting = [report for report in reports if report.step_times_s]
    first = reporting[0]
    step_times_s = tuple(max(times) for times in zip(*(r.step_times_s for r in reporting), strict=True))
    for success in successes:
        if is_script(success.report):  # its rank has compared them with its own observations of the program
            continue
        if (found := contradiction(step_times_s, success.seen_steps, success.seen_at_s)) is not None:
            return not_believed(found, success.rank)
    slowest = max(reporting, key=lambda report: sum(report.step_times_s))
    return Measured(
        measurement=Measurement(
            world_size=sum(report.num_ranks for report in reports),
            tokens_per_step=_counting(reporting, "tokens_per_step").tokens_per_step,
            step_times_s=step_times_s,
            breakdown=slowest.breakdown,
            rank_parts=_rank_parts(reports),
            peak_allocated_bytes=_if_any(report.peak_allocated_bytes for report in reports),
            peak_reserved_bytes=_if_any(report.peak_reserved_bytes for report in reports),
            num_warmup_steps=max(report.num_warmup_steps for report in reporting),
            losses=_losses(reports),
            grad_norms=_first_full(report.grad_norms for report in reports),
            model_flops_per_token=max(report.model_flops_per_token for report in reports),
            peak_flops_per_s=_first(
                dense_peak(report.device_name, report.matmul_format) for report in reports if report.device_name
            ),
            num_skipped_steps=first.num_skipped_steps,
            compile_s=max(report.compile_s for report in reports),
            samples_per_step=_counting(reporting, "samples_per_step").samples_per_step,
            step_memory_bytes=_largest_per_step(report.step_memory_bytes for report in reports),
            findings=merge_findings([report.findings for report in reports]),
            places=tuple(f"{place.node}/{device}" for place in places for device in place.device.split(",")),
            disturbances=most_disturbed(with_throttling(disturbances, _health(successes))),
            step_time_resolution_s=max(report.step_time_resolution_s for report in reporting),
            device_memory=worst_memory(report.device_memory for report in reports),
        )
    )


def _health(successes: Sequence[RankSuccess]) -> Iterator[tuple[str, DeviceHealth]]:
    """Yield the health of ranks' devices, with their nodes."""
    for success in successes:
        for health in success.report.findings.devices:
            yield "" if success.place is None else success.place.node, health


def _if_any(sizes: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes of all ranks; empty if none is known."""
    known = tuple(sizes)
    return known if any(known) else ()


def _counting(reporting: Sequence[RankReport], amount: str) -> RankReport:
    """Return the report of the first rank whose program counted its training data; else of the first rank."""
    scripts = ((report, report.findings.script) for report in reporting)
    return next(
        (r for r, script in scripts if script is not None and getattr(script, amount) is not None), reporting[0]
    )


def _losses(reports: Sequence[RankReport]) -> tuple[float, ...]:
    """Return the gang's losses: if every rank reports that of its own share, their mean."""
    shares = [report.losses for report in reports if report.losses and _reports_share(report)]
    if len(shares) > 1 and all(report.losses in ((), *shares) for report in reports):
        return tuple(statistics.fmean(losses) for losses in zip(*shares, strict=False))
    return _first_full(report.losses for report in reports)


def _reports_share(report: RankReport) -> bool:
    script = report.findings.script
    source = script.source_of("loss") if script is not None else None
    return source is not None and source.is_share


def _first_full(sequences: Iterable[tuple[float, ...]]) -> tuple[float, ...]:
    """Return the values of the first rank that has any: some programs report only on their last rank."""
    return next((values for values in sequences if values), ())


def _largest_per_step(ranks: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(max(sizes) for sizes in zip(*(sizes for sizes in ranks if sizes), strict=False))


T = TypeVar("T")


def merge_findings(ranks: Sequence[Findings]) -> Findings:
    """Merge the findings of a gang's ranks, given in rank order.

    Effects of recompute and the cast lists come from the rank where they are largest, per pattern: a rank may hold none
    of the layers concerned; likewise the load of experts, per layer. Compilation comes from the rank that compiled
    most. The rest is equal on all ranks, or
    decided by the first; it comes from the first rank that has it.
    """
    return Findings(
        recompute=_largest_effects(findings.recompute for findings in ranks),
        autocast=_largest_casts(findings.autocast for findings in ranks),
        fused=_most_fused(findings.fused for findings in ranks),
        loss_scale=_first(findings.loss_scale for findings in ranks),
        graph=_merge_graphs([findings.graph for findings in ranks if findings.graph is not None]),
        loader=_first(findings.loader for findings in ranks),
        kernel_tuning=_first(findings.kernel_tuning for findings in ranks),
        memory_format=_first(findings.memory_format for findings in ranks),
        lengths=_first(findings.lengths for findings in ranks),
        experts=_busiest_loads(findings.experts for findings in ranks),
        rates=tuple(rates for findings in ranks for rates in findings.rates),
        profile=tuple(profile for findings in ranks for profile in findings.profile),
        devices=most_noteworthy(health for findings in ranks for health in findings.devices),
        script=merge_scripts(tuple(findings.script for findings in ranks if findings.script is not None)),
    )


def _merge_graphs(ranks: Sequence[GraphReport]) -> GraphReport | None:
    if not ranks:
        return None
    return replace(
        max(ranks, key=lambda graph: (graph.num_recompilations, graph.compile_s)),
        cache_hits=sum(graph.cache_hits for graph in ranks),
        cache_misses=sum(graph.cache_misses for graph in ranks),
    )


def _largest_effects(ranks: Iterable[Iterable[PatternEffect]]) -> tuple[PatternEffect, ...]:
    """Return each pattern's largest effect on any rank. Effects of a rank's pipeline chunks add up."""
    largest: dict[str, PatternEffect] = {}
    for effects in ranks:
        own: dict[str, PatternEffect] = {}
        for effect in effects:
            own[effect.pattern] = _sum(own[effect.pattern], effect) if effect.pattern in own else effect
        for pattern, effect in own.items():
            largest[pattern] = max(largest.get(pattern, effect), effect, key=_size)
    return tuple(largest.values())


def _busiest_loads(ranks: Iterable[Iterable[ExpertLoad]]) -> tuple[ExpertLoad, ...]:
    """Return each layer's load on the rank where it is most uneven."""
    largest: dict[int, ExpertLoad] = {}
    for load in itertools.chain.from_iterable(ranks):
        largest[load.layer] = max(largest.get(load.layer, load), load, key=lambda one: one.busiest_on_rank)
    return tuple(largest[layer] for layer in sorted(largest))


def _size(effect: PatternEffect) -> tuple[int, int, float]:
    return effect.saved_bytes, effect.num_matches, effect.recompute_s


def _sum(one: PatternEffect, other: PatternEffect) -> PatternEffect:
    return PatternEffect(
        pattern=one.pattern,
        num_matches=one.num_matches + other.num_matches,
        saved_bytes=one.saved_bytes + other.saved_bytes,
        recompute_s=one.recompute_s + other.recompute_s,
        is_compiled=one.is_compiled,
    )


def _largest_casts(ranks: Iterable[Iterable[OperatorCast]]) -> tuple[OperatorCast, ...]:
    largest: dict[tuple[str, str], int] = {}
    for casts in ranks:
        own: dict[tuple[str, str], int] = {}
        for cast in casts:
            own[cast.name, cast.list] = own.get((cast.name, cast.list), 0) + cast.num_calls
        for key, num_calls in own.items():
            largest[key] = max(largest.get(key, 0), num_calls)
    return tuple(OperatorCast(name=name, list=list_, num_calls=n) for (name, list_), n in largest.items())


def _most_fused(ranks: Iterable[Iterable[FusedOperator]]) -> tuple[FusedOperator, ...]:
    """Return each operator of the rank that calls it most."""
    most: dict[tuple[str, str], FusedOperator] = {}
    for operator in itertools.chain.from_iterable(ranks):
        key = operator.name, operator.library
        most[key] = max(most.get(key, operator), operator, key=lambda one: (one.num_calls, one.num_places))
    return tuple(most.values())


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


# The outcome of an attempt whose controller died, from its ranks' files on disk.


@dataclass(frozen=True, slots=True)
class Remains:
    """The end of an attempt. ``ended_at_s``: time of its last write; None if it left nothing."""

    outcome: Outcome
    ended_at_s: float | None


def recover(attempts: Path, token: str, world_size: int) -> Remains:
    """Return the outcome of the attempt with this token if it is known; else ``GangLost``.

    It is known if reports of all ranks were stored, or the reason why some rank failed: its peers were then killed.
    ``attempts`` is the folder the backend worked in. Results on other hosts are not found. Results of other launches
    (other tokens) do not count.
    """
    folder = next((path for path in attempts.glob(f"*-{token[:8]}") if path.is_dir()), None)
    if folder is None:
        return Remains(_lost("the controller ended before the gang had started"), None)
    ended_at_s = max(path.stat().st_mtime for path in [folder, *folder.iterdir()])
    results = [_result(folder / f"rank{rank}.json", token) for rank in range(world_size)]
    complete = [result for result in results if result is not None]
    num_ranks = sum(result.report.num_ranks if isinstance(result, RankSuccess) else 1 for result in complete)
    if num_ranks < world_size and not any(_is_root_cause(result) for result in complete):
        return Remains(_lost("the controller ended while the gang was running"), ended_at_s)
    return Remains(fold(complete, _disturbances(folder)), ended_at_s)


def _disturbances(folder: Path) -> list[Disturbance]:
    """Return the disturbances that wardens stored while the gang measured."""
    found: list[Disturbance] = []
    for path in sorted(folder.glob(f"*{LOAD_SUFFIX}")):
        with contextlib.suppress(OSError, ValueError):
            found.append(from_json(Disturbance, json.loads(path.read_text(encoding="utf-8"))))
    return found


def _result(path: Path, token: str) -> RankResult | None:
    try:
        stored: Any = json.loads(path.read_text(encoding="utf-8"))
        if stored["token"] != token:
            return None
        result: RankResult = from_json(RankResult, stored["result"])
    except (OSError, ValueError, KeyError, CodecError):
        return None
    return result


def _is_root_cause(result: RankResult) -> bool:
    return isinstance(result, RankFailure) and result.category not in COLLATERAL


def _lost(message: str) -> Outcome:
    return GangLost(evidence=Evidence(message=message), cause="controller")


# ---- Follows the gangs of a backend on the controller's side: node events in, gang events out, no I/O


@dataclass(slots=True, kw_only=True)
class _TrackedGang:
    launch: GangLaunch
    log_dir: str
    launched_at_s: float
    waiting: set[str]
    """Nodes that may still have processes of the gang."""
    results: list[RankResult] = field(default_factory=list)
    disturbances: list[Disturbance] = field(default_factory=list)
    progress: dict[str, GangProgress] = field(default_factory=dict)
    reported: tuple[int, int] = (0, 0)


class GangTracker:
    """Follows gangs from launch to end.

    Args:
        order: ``order(node, attempt_id, order)`` sends the node an order for its ranks of the attempt; must not raise.
    """

    def __init__(self, order: Callable[[str, str, GangOrder], None]) -> None:
        self._order = order
        self._gangs: dict[str, _TrackedGang] = {}

    @property
    def running(self) -> tuple[str, ...]:
        """Attempts that have not ended."""
        return tuple(self._gangs)

    def launched(self, launch: GangLaunch, *, log_dir: str, now_s: float) -> None:
        """Start to wait for the launch's nodes. Call before any of them starts."""
        self._gangs[launch.attempt_id] = _TrackedGang(
            launch=launch, log_dir=log_dir, launched_at_s=now_s, waiting=set(launch.placement.nodes)
        )

    def expects(self, node: str, attempt_id: str, token: str) -> bool:
        """Whether ``node`` is running this launch of the attempt."""
        gang = self._gangs.get(attempt_id)
        return gang is not None and gang.launch.token == token and node in gang.waiting

    def handle(self, node: str, event: NodeEvent, *, now_s: float) -> list[GangEvent]:
        """Handle an event from ``node``. Events of unknown attempts or old tokens are dropped."""
        if not self.expects(node, event.attempt_id, event.token):
            return []
        gang = self._gangs[event.attempt_id]
        match event:
            case GangProgress():
                return self._progress(gang, node, event)
            case NodeCompiling():
                order = PeerCompiles(seconds=event.seconds)
                for other in sorted(gang.waiting - {node}):
                    self._order(other, event.attempt_id, order)
                return []
            case NodeFailing():
                self._stop_others(gang, node, event.reason, is_hang=event.is_hang)
                return []
            case NodeGone():
                return self._gone(gang, node, event.results, now_s, event.disturbance)

    def kill(self, attempt_id: str, reason: str) -> None:
        """Order every node to kill its part, with ``reason`` as the cause."""
        if gang := self._gangs.get(attempt_id):
            for node in sorted(gang.waiting):
                self._order(node, attempt_id, StopGang(reason=reason, is_cause=True))

    def node_lost(
        self,
        node: str,
        reason: str,
        *,
        now_s: float,
        attempts: Iterable[str] | None = None,
        category: Literal["lost", "preempted"] = "lost",
    ) -> list[GangEvent]:
        """Count a node's part of its gangs (or only of ``attempts``) as lost, and kill the rest of them."""
        events: list[GangEvent] = []
        for attempt_id in list(self._gangs if attempts is None else attempts):
            gang = self._gangs.get(attempt_id)
            if gang is not None and node in gang.waiting:
                self._stop_others(gang, node, reason)
                lost = RankFailure(rank=None, node=node, category=category, message=reason, at_s=time.time())
                events += self._gone(gang, node, [lost], now_s)
        return events

    def _stop_others(self, gang: _TrackedGang, node: str, reason: str, *, is_hang: bool = False) -> None:
        order = StopGang(reason=f"{node}: {reason}", is_cause=False, is_hang=is_hang)
        for other in sorted(gang.waiting - {node}):
            self._order(other, gang.launch.attempt_id, order)

    def _progress(self, gang: _TrackedGang, node: str, event: GangProgress) -> list[GangEvent]:
        gang.progress[node] = event
        is_silent_somewhere = gang.launch.runner.startswith(SCRIPT_RUNNERS)  # then one node reports for all
        if len(gang.progress) < len(gang.launch.placement.nodes) and not is_silent_somewhere:
            return []
        slowest = min(gang.progress.values(), key=_position)
        if _position(slowest) <= gang.reported:
            return []
        gang.reported = _position(slowest)
        return [slowest if is_step_time(slowest.step_time_s) else replace(slowest, step_time_s=None)]

    def _gone(
        self,
        gang: _TrackedGang,
        node: str,
        results: Sequence[RankResult],
        now_s: float,
        disturbance: Disturbance | None = None,
    ) -> list[GangEvent]:
        gang.waiting.discard(node)
        gang.results += results
        gang.disturbances += [disturbance] if disturbance else []
        if gang.waiting:
            return []
        launch = gang.launch
        del self._gangs[launch.attempt_id]
        return [
            GangEnded(
                attempt_id=launch.attempt_id,
                token=launch.token,
                outcome=fold(gang.results, gang.disturbances),
                device_seconds=(now_s - gang.launched_at_s) * len(launch.placement.reserved),
                log_dir=gang.log_dir,
            )
        ]


def _position(progress: GangProgress) -> tuple[int, int]:
    return PHASES.index(progress.phase), progress.step
