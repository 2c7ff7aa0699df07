"""How a sweep seen from outside is told in words: its controller, lease and budgets, and what its trials do; the
same on the terminal and on the live page."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.base import GangProgress
from orchestrator import units
from orchestrator.status.overview import Spent
from orchestrator.sweep.snapshot import AT_REST, Snapshot
from orchestrator.sweep.state import SweepState
from orchestrator.text import plain
from orchestrator.units import count

MAX_NODES = 8
"""Node names shown in one line."""


BUDGET_WORDS = {
    "trials": "trials",
    "device_hours": "device-hours",
    "wall_time_s": "wall time",
    "consecutive_failures": "failures in a row",
}


def phase_words(progress: GangProgress) -> str:
    """``warm-up 2``, ``measuring 5``."""
    phase = "warm-up" if progress.phase == "warmup" else progress.phase
    return f"{phase} {progress.step}" if progress.step else phase


def eta_s(state: SweepState, now_s: float) -> float | None:
    """Seconds the search has left at the pace so far, within every budget; None before the first trial has ended."""
    budget, num_ended = state.sweep.budget, len(state.end_order)
    if not num_ended or state.is_over or state.proof is not None:
        return None
    active_s = state.active_s + max(0.0, now_s - state.now_s)
    num_total = min(budget.max_trials or state.sweep.num_legal + 1, state.sweep.num_legal + 1)
    bounds = [active_s / num_ended * max(0, num_total - num_ended)]
    if budget.wall_time_s is not None:
        bounds.append(max(0.0, budget.wall_time_s - active_s))
    if budget.device_hours is not None and state.device_seconds > 0:
        bounds.append(active_s * max(0.0, budget.device_hours * 3600 / state.device_seconds - 1))
    return min(bounds)


def age_words(seconds: float) -> str:
    """``45 s``, ``12 min``, ``5 h``, ``3 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def controller_words(sweep: Snapshot) -> str:
    """Who is at work on the sweep, where, and for how long."""
    controller = sweep.controller
    if not sweep.is_held:
        where = f"; the last one was process {controller.pid} on {controller.host}" if controller else ""
        return f"none at work{where}"
    if controller is None:
        return "at work"
    what = f"Ray job {controller.job}" if controller.job else controller.mode
    at = f", {plain(controller.address)}" if controller.address else ""
    since = f", for {age_words(sweep.at_s - controller.started_at_s)}" if controller.started_at_s else ""
    return f"{what}, process {controller.pid} on {controller.host}{at}{since}"


def lease_words(sweep: Snapshot) -> str:
    """The nodes that the sweep holds, and why not more."""
    lease = sweep.lease
    if not sweep.is_held:
        return "none"
    held = f"{len(lease.nodes)} of {count(lease.wanted, 'node')}" if lease.wanted else count(len(lease.nodes), "node")
    names = f": {node_names(lease.nodes)}" if lease.nodes else ""
    waiting = f"; {plain(lease.waiting)}" if lease.waiting and sweep.phase != "waiting" else ""
    return f"{held}{names}{waiting}"


def queue_words(sweep: Snapshot) -> str:
    """``priority 3`` of a sweep that is not over; empty for the default priority."""
    priority = sweep.lease.priority
    return f"priority {priority}" if priority and sweep.phase not in AT_REST else ""


def spent_words(spent: Spent) -> str:
    """How much of a budget is used: ``5 of 12``, ``20 s, no limit``."""

    def words(value: float) -> str:
        if spent.name == "wall_time_s":
            return units.duration(value)
        return f"{value:.2f}" if spent.name == "device_hours" else f"{value:g}"

    return (
        f"{words(spent.used)} of {words(spent.limit)}" if spent.limit is not None else f"{words(spent.used)}, no limit"
    )


def node_names(names: Iterable[str]) -> str:
    """The first of ``names`` in one line, and how many there are besides."""
    shown = list(names)
    return " ".join(shown[:MAX_NODES]) + (f" +{len(shown) - MAX_NODES}" if len(shown) > MAX_NODES else "")
