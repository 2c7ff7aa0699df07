"""Which steps of which ranks are profiled, and where the files go."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from trials.failure import InfeasibleSpec
from trials.reports.profile import FOLDER_VARIABLE
from trials.spec import Layout, ProfileSpec, Protocol


def check_profile(spec: ProfileSpec) -> None:
    """Refuse steps that cannot be recorded.

    Raises:
        InfeasibleSpec: names the rule and the remedy.
    """
    if spec.start_step < 1:
        raise InfeasibleSpec(f"profile.start_step is {spec.start_step}; steps count from 1")
    if spec.stop_step < spec.start_step:
        raise InfeasibleSpec(
            f"profile.stop_step {spec.stop_step} comes before start_step {spec.start_step}; both are recorded, so make "
            "stop_step at least start_step"
        )


def last_step(spec: ProfileSpec) -> int:
    """The step after which the run may end; it counts collectives after the recorded ones."""
    return spec.stop_step + spec.communication


def long_enough(protocol: Protocol, spec: ProfileSpec) -> Protocol:
    """A protocol that ends with the last step needed: what it measures counts for nothing."""
    num_warmup = max(protocol.min_warmup_steps, 1)
    num_steps = max(1, last_step(spec) - num_warmup)
    return replace(protocol, max_warmup_steps=num_warmup, num_steps=num_steps, max_steps=num_steps)


def profiled_ranks(spec: ProfileSpec, layout: Layout) -> tuple[int, ...]:
    """Those asked for that exist; else, and by default, the first of every pipeline stage."""
    asked = tuple(rank for rank in sorted(set(spec.ranks)) if 0 <= rank < layout.world_size)
    return asked or tuple(range(0, layout.world_size, layout.world_size // layout.pp))


def folder_of_environment() -> Path | None:
    """Where the launcher wants the files of a profile."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None
