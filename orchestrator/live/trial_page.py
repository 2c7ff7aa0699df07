"""One trial as the document of its page: why it was tried, what it measured, how each attempt ended, and its logs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchestrator import units
from orchestrator.errors import ConfigError
from orchestrator.invocation import Invocation
from orchestrator.report import words
from orchestrator.report.findings import findings_lines
from orchestrator.space.naming import flat_params, short_name
from orchestrator.status.explanation import AttemptExplanation, Explanation, explain
from orchestrator.status.logs import RankLog, attempt_logs
from orchestrator.sweep.home import Home
from orchestrator.sweep.state import find_trial, nodes_of
from orchestrator.text import Follower, plain
from orchestrator.units import chance, signal_name
from trials.codec import to_json
from trials.outcome import Evidence, Measurement

NUM_LINES = 300
"""Lines of a log that are shown at first, its last ones."""
MAX_POINTS = 2000
"""Steps of a curve, the latest."""


def trial_document(home: Home, sweep: str, number: int, invocation: Invocation) -> dict[str, Any]:
    """All that is known of a trial.

    Raises:
        ConfigError: there is no such sweep or trial.
    """
    found = explain(sweep, str(number), home)
    trial, measurement = found.trial, found.measurement
    return {
        "number": number,
        "id": units.trial_id(number),
        "sweep": sweep,
        "name": short_name(trial.candidate),
        "status": trial.status,
        "state": units.status_words(trial.status),
        "check": words.check_words(trial.check),
        "reason": plain(trial.reason),
        "changed": [[k, units.value_words(old), units.value_words(new)] for k, (old, new) in found.changed.items()],
        "configuration": [[k, units.value_words(v)] for k, v in flat_params(trial.candidate).items()],
        "measured": _measured(measurement, found.figures) if measurement else [],
        "parts": _step_parts(measurement) if measurement else [],
        "predicted": _predicted(found),
        "findings": list(findings_lines(measurement.findings)) if measurement else [],
        "curves": _curves(measurement) if measurement else {},
        "pending": [plain(line) for line in found.pending],
        "proof": [plain(line) for line in found.proof],
        "ruled_out": [[rule, count] for rule, count in found.ruled_out.items()],
        "attempts": [_attempt(one) for one in found.attempts],
        "commands": list(_commands(found, invocation)),
    }


def _measured(measurement: Measurement, figures: str) -> list[list[str]]:
    rows = [
        ["speed", figures],
        ["spread of the step time", words.spread(measurement)],
        *([["peak memory", f"{words.peak_memory(measurement)} on the fullest rank"]] if measurement.peak_bytes else []),
        ["steps", f"{len(measurement.step_times_s)} measured after {measurement.num_warmup_steps} of warm-up"],
    ]  # fmt: skip
    if parts := words.peak_memory_parts(measurement):
        rows.append(["of which", parts])
    if measurement.mfu is not None:
        rows.append(["model FLOPs utilisation", f"{100 * measurement.mfu:.1f} %"])
    if busy := words.disturbed(measurement):
        rows.append(["busy machine", busy])
    if (graph := measurement.findings.graph) is not None and graph.compile_s:
        rows.append(["compilation", words.compilation(graph)])
    return rows


def _step_parts(measurement: Measurement) -> list[list[Any]]:
    """Part of the step on the slowest rank, its time, its share."""
    parts = {name.removesuffix("_s"): float(seconds) for name, seconds in to_json(measurement.breakdown).items()}
    total = sum(parts.values())
    if not any(seconds for name, seconds in parts.items() if name != "other"):
        return []  # nobody looked inside, as on simulated clusters
    return [
        [name, units.milliseconds(seconds), round(seconds / total, 3)] for name, seconds in parts.items() if seconds
    ]


def _predicted(found: Explanation) -> list[list[str]]:
    expected = found.trial.expected
    if expected is None:
        return []
    fits = f"; fits with a probability of {chance(expected.probability_fits)}" if expected.probability_fits < 1 else ""
    rows = [["step time", f"{units.milliseconds(expected.step_time_s)}, give or take {expected.log_spread:.0%}{fits}"]]
    if found.surprise is not None:
        rows.append(["measured over predicted", f"{found.surprise:.2f}x"])
    return rows


def _curves(measurement: Measurement) -> dict[str, list[float]]:
    return {
        "step_times": list(measurement.step_times_s[-MAX_POINTS:]),
        "losses": list(measurement.losses[-MAX_POINTS:]),
    }


def _attempt(one: AttemptExplanation) -> dict[str, Any]:
    attempt, outcome = one.attempt, one.attempt.outcome
    evidence = one.evidence
    return {
        "number": one.number,
        "status": outcome.kind if outcome else "running",
        "state": units.status_words(outcome.kind if outcome else "running"),
        "ranks": len(attempt.ranks),
        "nodes": list(nodes_of(attempt)),
        "devices": attempt.num_devices,
        "duration": units.duration(one.duration_s),
        "cost": units.device_time(attempt.device_seconds),
        "consequences": [plain(line) for line in one.consequences],
        "evidence": _evidence(evidence, is_blameless=one.is_blameless) if evidence else None,
    }


def _evidence(evidence: Evidence, *, is_blameless: bool) -> dict[str, Any]:
    rank = f"rank {evidence.rank}" if evidence.rank is not None else ""
    where = " on ".join(part for part in (rank, evidence.node or "") if part)
    ended = signal_name(evidence.exit_code) or (f"exit code {evidence.exit_code}" if evidence.exit_code else "")
    blamed = ", ".join(part for part in (where, evidence.error_type or "", ended) if part)
    return {
        "blamed": "" if is_blameless else plain(blamed),
        "message": plain(evidence.message.strip()),
        "log": [plain(line) for line in evidence.log_tail],
    }


def _commands(found: Explanation, invocation: Invocation) -> Iterator[list[str]]:
    """Purpose and command, whole, ready to be copied."""
    sweep, trial = found.sweep, units.trial_id(found.trial.number)
    yield ["explain it", invocation.command("explain", sweep, trial)]
    if found.attempts:
        yield ["its logs", invocation.command("logs", sweep, trial)]
    if found.measurement is None or found.trial.check is not None:
        return
    if found.trial.number:
        yield ["what differs from the baseline", invocation.command("diff", f"{sweep}:baseline", f"{sweep}:{trial}")]
        yield ["measure it again beside the baseline", invocation.command("confirm", sweep, trial)]
    yield ["run it with the profiler", invocation.command("profile", sweep, trial)]
    yield ["its command lines", invocation.command("export", f"{sweep}:{trial}", "--format", "torchrun")]


def log_document(home: Home, name: str, number: int, *, attempt: int | None, rank: int, after: int) -> dict[str, Any]:
    """The log of a rank: its last lines, or with ``after``, where an earlier answer ended, the lines since.

    Raises:
        ConfigError: there is no such sweep, trial, attempt or rank, or the cluster is a simulated one.
    """
    sweep = home.read(name)
    trial = find_trial(sweep.state, str(number), name)
    found = attempt_logs(sweep, trial, attempt=attempt, rank=rank, num_lines=NUM_LINES if after < 0 else 0)
    log = found.ranks[0]
    if log.path.is_symlink():
        raise ConfigError(f"{log.path} is a link, which no rank writes", remedy="Look at it yourself.")
    lines, end = _news(log, after)
    evidence = found.evidence
    return {
        "rank": log.rank,
        "node": log.node,
        "path": str(log.path),
        "is_here": log.is_here,
        "is_root_cause": log.is_root_cause,
        "is_whole": log.is_whole,
        "is_over": found.outcome != "running" or not sweep.is_held,
        "lines": lines,
        "end": end,
        "kept": [plain(line) for line in evidence.log_tail] if evidence and log.is_root_cause else [],
    }


def _news(log: RankLog, after: int) -> tuple[list[str], int]:
    if after < 0 or not log.is_here:
        return list(log.lines), log.end
    follower = Follower(log.path, after)
    return follower.new_lines(), follower.at
