"""Explains a sweep from its ledger, which may be of any age and in use by a controller."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from cluster.hardware.accelerators import CatalogueError, find_accelerator
from cluster.hardware.topology import Node, Topology
from orchestrator.config.sweep import SweepSpec
from orchestrator.diagnosis.explain import Basis, diagnosed_trials, explain_sweep
from orchestrator.diagnosis.values import SweepExplanation
from orchestrator.errors import ConfigError
from orchestrator.planning.knowledge import PriorKnowledge
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.sweep.events import SweepCreated
from orchestrator.sweep.ledger import Ledger, LedgerError
from orchestrator.sweep.snapshot import read_snapshot
from orchestrator.sweep.state import SweepState, find_trial
from orchestrator.units import status_words
from trials.accelerator.kinds import DeviceKind, family_of

logger = logging.getLogger(__name__)

UNREADABLE = (KeyError, TypeError, ValueError, ValidationError, ConfigError, LedgerError)
"""Exceptions that reading documents of another version of this program may raise."""


def explain_ledger(ledger: Ledger, *, trial: str | None = None, state: SweepState | None = None) -> SweepExplanation:
    """Explain the sweep of this ledger.

    Args:
        trial: the one to diagnose beside the baseline in place of the winner: ``3``, ``t003``, ``best``.
        state: the fold of the ledger's events, where the caller has it already.

    Raises:
        ConfigError: nothing was measured yet, or ``trial`` was not.
    """
    state = state or read_snapshot(ledger).state
    name = ledger.folder.name
    number = None if trial is None else find_trial(state, trial, name).number
    baseline, chosen, _ = diagnosed_trials(state, number)
    if baseline is None and chosen is None:  # said before anything is planned
        words = ", ".join(f"{count} {status_words(status)}" for status, count in state.counts().items())
        raise ConfigError(
            f"no trial of the sweep {name!r} was measured ({words or 'it has none yet'})",
            remedy=f"`tune-cluster explain {name} TRIAL` tells what became of one.",
        )
    return explain_sweep(state, load_basis(ledger, state), trial=number)


def load_basis(ledger: Ledger, state: SweepState) -> Basis:
    """Candidates and hardware of the sweep as far as the ledger tells them, and why the rest is missing."""
    spec, problem = _spec(ledger)
    topology, unknown = _topology(state.sweep, "" if spec is None else spec.cluster.device)
    known = _knowledge(ledger)
    if spec is None:
        return Basis(topology=topology, knowledge=known, problem=problem or unknown)
    made, illegal = _plan(spec, topology, known)
    if made is None:
        return Basis(topology=topology, knowledge=known, problem=illegal)
    varied = None if spec.replayed is not None else _varied(spec)
    return Basis(
        candidates=made.candidates,
        beyond=made.beyond,
        varied=varied,
        topology=topology,
        knowledge=known,
        problem=unknown,
    )


def _spec(ledger: Ledger) -> tuple[SweepSpec | None, str]:
    try:
        return SweepSpec.from_json(ledger.document("spec") or {}), ""
    except UNREADABLE as error:
        logger.debug("the sweep file in %s cannot be used", ledger.folder, exc_info=error)
        return None, "the sweep file kept with it is of another version"


def _knowledge(ledger: Ledger) -> PriorKnowledge:
    try:
        return PriorKnowledge.kept(ledger)
    except UNREADABLE as error:
        logger.debug("what %s keeps of dry runs and probes cannot be used", ledger.folder, exc_info=error)
        return PriorKnowledge()


def _plan(spec: SweepSpec, topology: Topology | None, known: PriorKnowledge) -> tuple[Plan | None, str]:
    """The plan without the candidates of the stage balancer, which takes minutes; else None and why."""
    space = spec.space.model_copy(update={"balance": False})
    try:
        return make_plan(spec.model_copy(update={"space": space}), topology, known.estimates), ""
    except ConfigError as error:
        return None, f"its candidates cannot be listed again: {error}"


def _varied(spec: SweepSpec) -> frozenset[str]:
    own = {knob.name: knob.values for knob in spec.own_knobs}
    return frozenset(name for name, values in {**spec.choices, **own}.items() if len(values) > 1)


def _topology(created: SweepCreated, device: str) -> tuple[Topology | None, str]:
    """From the hardware and the fingerprint kept with the sweep: what this host has may be something else."""
    known, memory = created.known_devices, created.fingerprint.get("device_memory_bytes", "")
    if known is None or not memory.isdigit():
        return None, "the hardware is not known"
    node = Node(
        name="node0",
        address="127.0.0.1",
        num_devices=known.devices_per_node,
        device_kind=known.device_kind or _kind(known.device_name, device, created.fingerprint),
        device_name=known.device_name,
        device_memory_bytes=int(memory),
        threads_per_device=int(created.fingerprint.get("threads_per_device", "1")),
    )
    return Topology(nodes=tuple(_named(node, i) for i in range(known.num_nodes))), ""


def _named(node: Node, number: int) -> Node:
    return replace(node, name=f"node{number}")


def _kind(device_name: str, device: str, fingerprint: Mapping[str, Any]) -> DeviceKind:
    """The kind of device, which old ledgers do not say: by the file, the catalogue, or a driver of GPUs."""
    if device != "auto":
        return family_of(device).kind
    try:
        return "cpu" if find_accelerator(device_name).name == "cpu" else "cuda"
    except CatalogueError:
        return "cpu" if fingerprint.get("driver", "none") == "none" else "cuda"
