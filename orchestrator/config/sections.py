"""Sections ``cluster``, ``search``, ``measure``, ``budget``, ``deadlines`` and ``tracking`` of a sweep file.

The descriptions of their keys feed the JSON Schema and ``docs/sweep-file.md``.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from cluster.base import Deadlines
from cluster.gang.environment import owner_of
from cluster.hardware.accelerators import catalogue
from cluster.hardware.topology import DeviceChoice
from orchestrator.config.scalars import ByteSize, Duration, Environment, Identifier, Positive, Size
from orchestrator.mlflow_urls import URI_PATTERN
from orchestrator.space.file_types import Section, fault, off_is_false
from trials.spec import Protocol

Share = Annotated[float, Field(ge=0, le=1)]


def _known_accelerator(name: str) -> str:
    if name not in catalogue():
        known = ", ".join(catalogue())
        raise fault(None, f"no accelerator {name[:80]!r} in the catalogue", f"There are {known}.")
    return name


def _known_factor(value: object) -> object:
    """Refuse what is neither a number nor ``off`` with one message for both."""
    value = off_is_false(value)
    if value == "off" or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    shown = "nothing" if value is None else repr(value)[:60]
    raise fault(None, f"expected a number or off, got {shown}", "Write how many times slower is too slow, like 1.5.")


_RUNNER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class SimulationSection(Section):
    """A cluster that does not exist: virtual time, step times and memory from the cost model."""

    accelerator: Annotated[str, AfterValidator(_known_accelerator)] = Field(
        description="Name in the catalogue, configs/accelerators, like ascend-910b."
    )
    noise: Share = Field(default=0.0, description="Standard deviation of the logarithm of each step time.")
    deviation: float = Field(
        default=0.0,
        ge=0,
        le=3,
        description="How far the machine is from what the cost model assumes, in standard deviations of its prior.",
    )
    slow_nodes: dict[str, Positive] = Field(
        default={}, description="Node (node0000 and on) to the factor by which it is slower."
    )
    node_losses: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="Node to the second in which it goes away."
    )
    faults: dict[Literal["crash", "hang", "start_hang", "exit"], Share] = Field(
        default={}, description="Probability per launch that a rank raises, stops, never starts or is killed."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of deviation, noise and faults.")

    @model_validator(mode="after")
    def _consistent(self) -> SimulationSection:
        if (total := sum(self.faults.values())) > 1:
            raise fault("faults", f"probabilities sum to {total:g}", "Lower them: a launch has one fault at most.")
        return self


class ClusterSection(Section):
    """Where trials run."""

    kind: Literal["ray", "local", "simulated"] = Field(
        default="ray",
        description="ray: a Ray cluster, or one started here; local: this host without Ray; simulated: the cost model "
        "in virtual time.",
    )
    address: str | None = Field(default=None, description="Address of a running Ray cluster; null starts one here.")
    num_nodes: Size = Field(default=1, description="Nodes to lease.")
    min_nodes: Size | None = Field(
        default=None, description="Nodes to begin and go on with, at least; null: num_nodes. Further ones join later."
    )
    max_wait_s: Duration | None = Field(
        default=None,
        alias="max_wait",
        description='How long to wait for min_nodes, like "30m"; null: as long as it takes.',
    )
    queue: Identifier = Field(default="default", description="Queue that this sweep waits in; see docs/service.md.")
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(
        default=0, description="Sweeps of a higher priority take nodes from those of a lower one, which are paused."
    )
    devices_per_node: Size | None = Field(default=None, description="Devices per node; null: all there are.")
    device: DeviceChoice = Field(
        default="auto",
        description="auto: the accelerators that there are, else cores; rocm: AMD's GPUs; xpu: Intel's; npu: Ascend.",
    )
    device_memory_bytes: ByteSize | None = Field(
        default=None,
        alias="device_memory",
        description='Memory a rank may use, like "2GiB", context and communicators included; null: what the device '
        "has. Stands in for device memory on machines without GPU.",
    )
    env: Environment = Field(
        default={},
        description="Environment variables of every rank of the sweep, over those of the host and the defaults of "
        "docs/devices.md; part of what trials compare by.",
    )
    simulation: SimulationSection | None = Field(default=None, description="What kind: simulated simulates.")
    isolation: Literal["node", "device"] = Field(
        default="node", description="node: a trial has its nodes to itself; device: small trials share a node."
    )
    price_per_device_hour: Positive | None = Field(
        default=None, description="Money in any currency, to show costs in; null: they are shown in device-hours."
    )
    exclude_nodes: list[str] = Field(default=[], description="Names of leased nodes that no trial may use.")
    exclude_slow_nodes: bool = Field(
        default=False, description="Leave out nodes that `tune-cluster probe` found slow, or could not measure."
    )

    @property
    def nodes(self) -> tuple[int, int]:
        """Fewest and most nodes to hold."""
        return self.min_nodes or self.num_nodes, self.num_nodes

    @model_validator(mode="after")
    def _consistent(self) -> ClusterSection:
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            raise fault("min_nodes", f"{self.min_nodes} is above num_nodes {self.num_nodes}", "Lower it.")
        if self.kind != "ray" and self.address is not None:
            raise fault("address", f"a {self.kind} cluster has no address", "Remove it, or use kind: ray.")
        if (self.simulation is not None) != (self.kind == "simulated"):
            raise fault("simulation", "kind: simulated and simulation go together", "Give both, or remove simulation.")
        self._check_nodes()
        self._check_env()
        return self

    def _check_env(self) -> None:
        """Refuse variables that belong to whoever starts the ranks."""
        for name, value in self.env.items():
            if (owner := owner_of(name)) is not None:
                raise fault(f"env.{name}", f"{name} is set by {owner}", "Leave it out.")
            if "\0" in value:
                raise fault(f"env.{name}", "a value cannot hold a zero byte", "Leave it out.")

    def _check_nodes(self) -> None:
        """Refuse nodes in ``simulation`` that the cluster does not have."""
        if self.simulation is None:
            return
        last = f"node{self.num_nodes - 1:04d}"
        names = {f"node{i:04d}" for i in range(self.num_nodes)}
        for key in ("slow_nodes", "node_losses"):
            for name in getattr(self.simulation, key):
                if name not in names:
                    raise fault(f"simulation.{key}", f"there is no node {name[:80]!r}", f"The last one is {last}.")


EarlyStopFactor = Annotated[
    Annotated[float, Field(ge=1, le=100)] | Literal["off"],
    BeforeValidator(_known_factor),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 1, "maximum": 100}, {"enum": ["off", False]}]}),
]


class SearchSection(Section):
    """In what order candidates are tried."""

    sampler: Literal["guided", "tpe", "random", "grid"] = Field(
        default="guided",
        description="guided: cost model, or what knobs usually do, corrected by the sweep's trials; "
        "tpe: tree-structured Parzen estimator; random; grid: every candidate in order.",
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the sampler.")
    max_concurrent: Size = Field(default=1, description="Trials running at the same time.")
    stop_when_converged: bool = Field(
        default=False,
        description="End before the budget when the guided sampler expects nothing better than what it has found.",
    )
    patience: Size | None = Field(
        default=None, description="End when none of this many trials in a row was the fastest so far; null: never."
    )
    transfer: bool = Field(
        default=True,
        description="Let the guided sampler start with what earlier sweeps, in the same MLflow store and on the same "
        "hardware, measured.",
    )
    early_stop: EarlyStopFactor = Field(
        default=1.5,
        description="End a trial whose first steps show that it takes this many times as long as the best one, by the "
        "objective; off: measure every trial to its end.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> SearchSection:
        if self.stop_when_converged and self.sampler != "guided":
            raise fault("stop_when_converged", f"{self.sampler} cannot tell", "Use sampler: guided, or leave it out.")
        return self


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
    strikes_per_node: Size = Field(
        default=3, description="Losses and hangs in a row that are blamed on a node before it is not used any more."
    )


class DeadlinesSection(Section):
    """Seconds a trial may spend before it is killed."""

    starting_s: Positive = Field(default=Deadlines().starting_s, description="From launch until all ranks train.")
    warmup_s: Positive = Field(default=Deadlines().warmup_s, description="In warm-up.")
    measuring_s: Positive = Field(default=Deadlines().measuring_s, description="In the measured steps.")
    stall_s: Positive = Field(default=Deadlines().stall_s, description="Between two signs of progress of any rank.")
    compile_s: Positive = Field(
        default=Deadlines().compile_s,
        description="Compiling in all; the other deadlines stand still as long as a rank compiles.",
    )
    placing_s: Positive = Field(
        default=600.0, description="Waiting for nodes while nothing else runs; then the sweep stops and can be resumed."
    )

    def to_deadlines(self) -> Deadlines:
        return Deadlines(**self.model_dump(exclude={"placing_s"}))


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
    report: bool = Field(
        default=True,
        description="Attach the report page and its plots to the sweep's run; they take some seconds when it ends.",
    )


def check_runner(value: str) -> str:
    if _RUNNER.fullmatch(value) is None:
        raise fault(None, f"{value[:80]!r} does not name a function", "Write module:function.")
    return value
