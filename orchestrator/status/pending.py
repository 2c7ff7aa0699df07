"""Why a trial that was proposed does not run yet, in sentences."""

from __future__ import annotations

import math
import re

from orchestrator import units
from orchestrator.status.snapshot import AT_REST, Snapshot
from orchestrator.sweep.limits import reason_to_fail, spent_budget
from orchestrator.sweep.state import SweepState, Trial, nodes_to_avoid
from orchestrator.units import count


def why_pending(sweep: Snapshot, trial: Trial) -> tuple[str, ...]:
    """The reasons, the one that decides first; empty where the trial does not wait."""
    if trial.number not in sweep.state.waiting:
        return ()
    phase, reason = sweep.phase, f": {sweep.reason}" if sweep.reason else ""
    if phase == "waiting":
        return (f"the sweep has no nodes yet{reason}", *_queue(sweep))
    if phase != "running":
        remedy = "; `resume` goes on with it" if phase in ("paused", "interrupted") else ""
        return (f"the sweep {'is' if phase not in AT_REST or phase == 'paused' else 'was'} {phase}{reason}{remedy}",)
    state = sweep.at_present
    if failing := reason_to_fail(state):
        return (f"the sweep is about to fail: {failing}",)
    if spent := spent_budget(state):
        return (f"{spent}: nothing is launched any more",)
    return (_devices(sweep, trial), *_lease(sweep), *_queue(sweep), *_avoided(trial))


def devices_per_node(state: SweepState) -> int | None:
    """As the topology's label tells, like ``2x8 NVIDIA H200``; None where it does not."""
    match = re.match(r"\d+x(\d+) ", state.sweep.hardware)
    return int(match[1]) if match else None


def _devices(sweep: Snapshot, trial: Trial) -> str:
    """Needs, has, and who has the rest."""
    state, needed, per_node = sweep.state, trial.candidate.layout.world_size, devices_per_node(sweep.state)
    nodes = [node for node in sweep.lease.nodes if node not in state.quarantined]
    busy = sum(state.trials[number].attempts[-1].num_devices for number in state.running)
    by = " ".join(units.trial_id(number) for number in sorted(state.running))
    taken = f"{busy} busy with {by}" if busy else "none of them busy"
    needs = f"it needs {count(needed, 'device')}"
    if per_node is None:
        return f"{needs}; the lease holds {count(len(nodes), 'node')}; devices: {taken}"
    num_nodes = math.ceil(needed / per_node)
    held = f"the lease holds {count(len(nodes), 'node')} with {count(len(nodes) * per_node, 'device')}, {taken}"
    return f"{needs} on {count(num_nodes, 'node')}; {held}"


def _lease(sweep: Snapshot) -> list[str]:
    lease, quarantined = sweep.lease, sorted(sweep.state.quarantined)
    missing = f"{len(lease.nodes)} of {lease.wanted} nodes are held: {lease.waiting}" if lease.waiting else ""
    out = f"nothing is placed on {' '.join(quarantined)} any more: in quarantine" if quarantined else ""
    return [line for line in (missing, out) if line]


def _queue(sweep: Snapshot) -> list[str]:
    return [f"priority {sweep.lease.priority}"] if sweep.lease.priority else []


def _avoided(trial: Trial) -> list[str]:
    avoided = nodes_to_avoid(trial)
    return [f"other nodes than {' '.join(avoided)} are preferred: it failed there"] if avoided else []
