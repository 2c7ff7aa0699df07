"""The sections of a sweep file. Descriptions feed the JSON Schema and ``docs/sweep-file.md``."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from cluster.base import Deadlines
from orchestrator.knob_types import Section, fault
from orchestrator.mlflow_urls import URI_PATTERN
from orchestrator.sweep_types import ByteSize, Duration, Positive, Size
from trials.spec import Protocol

_RUNNER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class ClusterSection(Section):
    """Where trials run."""

    kind: Literal["ray", "local"] = Field(
        default="ray", description="ray: a Ray cluster, or one started here; local: this host without Ray."
    )
    address: str | None = Field(default=None, description="Address of a running Ray cluster; null starts one here.")
    num_nodes: Size = Field(default=1, description="Nodes to lease.")
    devices_per_node: Size | None = Field(default=None, description="Devices per node; null: all there are.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is a GPU.")
    device_memory_bytes: ByteSize | None = Field(
        default=None,
        alias="device_memory",
        description='Memory a rank may use, like "2GiB"; null: what the device has. Stands in for device memory on '
        "machines without GPU.",
    )
    isolation: Literal["node", "device"] = Field(
        default="node", description="node: a trial has its nodes to itself; device: small trials share a node."
    )

    @model_validator(mode="after")
    def _consistent(self) -> ClusterSection:
        if self.kind == "local" and self.address is not None:
            raise fault("address", "a local cluster has no address", "Remove it, or use kind: ray.")
        return self


class SearchSection(Section):
    """In what order candidates are tried."""

    sampler: Literal["tpe", "random", "grid"] = Field(
        default="tpe", description="tpe: tree-structured Parzen estimator; random; grid: every candidate in order."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the sampler.")
    max_concurrent: Size = Field(default=1, description="Trials running at the same time.")


class MeasureSection(Section):
    """How a trial is measured."""

    min_warmup_steps: int = Field(
        default=Protocol().min_warmup_steps, ge=1, le=10**6, description="Steps dropped at the start, at least."
    )
    max_warmup_steps: int = Field(
        default=Protocol().max_warmup_steps, ge=1, le=10**6, description="Steps dropped at the start, at most."
    )
    warmup_tolerance: Positive = Field(
        default=Protocol().warmup_tolerance,
        description="Warm-up ends when two step times in a row differ by at most this share.",
    )
    num_steps: int = Field(default=Protocol().num_steps, ge=1, le=10**6, description="Steps measured.")
    max_steps: int = Field(
        default=Protocol().max_steps, ge=1, le=10**6, description="Steps measured at most, while times spread."
    )
    max_relative_spread: Positive = Field(
        default=Protocol().max_relative_spread,
        description="Inter-quartile range over median above which more steps are measured.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> MeasureSection:
        for low, high in (("min_warmup_steps", "max_warmup_steps"), ("num_steps", "max_steps")):
            if getattr(self, low) > getattr(self, high):
                message = f"{getattr(self, high)} is below {low} {getattr(self, low)}"
                raise fault(high, message, f"Raise {high} or lower {low}.")
        return self

    def to_protocol(self) -> Protocol:
        return Protocol(**self.model_dump())


class BudgetSection(Section):
    """When to stop, whichever comes first."""

    max_trials: Size = Field(default=50, description="Trials in total, the baseline included.")
    device_hours: Positive | None = Field(default=None, description="Device-hours spent; null: no limit.")
    wall_time_s: Duration | None = Field(
        default=None,
        alias="wall_time",
        description='Time with a controller at work, like "10m" or "2h"; null: no limit.',
    )
    consecutive_failures: Size = Field(default=5, description="Failed trials in a row.")


class DeadlinesSection(Section):
    """Seconds a trial may spend before it is killed."""

    starting_s: Positive = Field(default=Deadlines().starting_s, description="From launch until all ranks train.")
    warmup_s: Positive = Field(default=Deadlines().warmup_s, description="In warm-up.")
    measuring_s: Positive = Field(default=Deadlines().measuring_s, description="In the measured steps.")
    stall_s: Positive = Field(default=Deadlines().stall_s, description="Between two signs of progress of any rank.")

    def to_deadlines(self) -> Deadlines:
        return Deadlines(**self.model_dump())


class TrackingSection(Section):
    """Where results are recorded in MLflow."""

    uri: str | None = Field(
        default=None,
        pattern=URI_PATTERN,
        description="MLflow tracking URI without credentials, http(s)://host:port or sqlite:////absolute/path.db; "
        "null: a SQLite store in the home folder of tune-cluster.",
    )
    experiment: str | None = Field(
        default=None, min_length=1, max_length=200, description="Experiment; null: named after model and hardware."
    )


def check_runner(value: str) -> str:
    if _RUNNER.fullmatch(value) is None:
        raise fault(None, f"{value[:80]!r} does not name a function", "Write module:function.")
    return value
