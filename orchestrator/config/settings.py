"""All sections of a sweep file except ``workload`` and ``search``, and the types of their values.

The descriptions of their keys feed the JSON Schema and ``docs/sweep-file.md``.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)

from cluster.base import Deadlines
from cluster.gang.environment import owner_of
from cluster.hardware.topology import DeviceChoice, catalogue
from orchestrator.mlflow_urls import URI_PATTERN
from orchestrator.space.file_types import OneOrMany, Section, ShortForms, Word, fault, received, show
from orchestrator.space.inside import InsideSection
from orchestrator.space.knobs import (
    KNOB_NAMES,
    KNOBS,
    CustomBaseline,
    CustomFilter,
    CustomKnob,
    CustomSpace,
    argument_text,
    custom_knobs,
)
from orchestrator.sweep.events import ConfirmSettings, GateSettings, PromotedRounds
from orchestrator.sweep.snapshot import NAME_PATTERN
from trials.secrets import is_secret_name
from trials.spec import ProfileSpec, Protocol

# Types of single values: names, durations, sizes, paths

Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Field(gt=0)]

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(B|kB|MB|GB|TB|KiB|MiB|GiB|TiB)")
_BYTES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BYTES |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


MAX_DURATION_S = 36500 * 86400.0
"""A hundred years; system clocks and timers do not support much more."""
MAX_SIZE_BYTES = 2**63 - 1


def _parse_duration(value: Any) -> float:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) == 0:
        raise fault(None, f"expected a duration with a unit{received(value)}", "Use a value such as 90s, 10m or 2h.")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > MAX_DURATION_S:
        raise fault(None, f"{show(value)} is out of range", "The maximum is 36500d.")
    return seconds


def _parse_size(value: Any) -> int:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) == 0:
        raise fault(None, f"expected a size with a unit{received(value)}", "Use a value such as 512MiB or 80GB.")
    size = float(match[1]) * _BYTES[match[2]]
    if size > MAX_SIZE_BYTES:
        raise fault(None, f"{show(value)} is out of range", "The maximum is 8000000TiB.")
    return int(size)


Duration = Annotated[
    float,
    BeforeValidator(_parse_duration),
    PlainSerializer(lambda seconds: f"{seconds:.12f}".rstrip("0").rstrip(".") + "s"),
    WithJsonSchema({"type": "string", "pattern": f"^{_DURATION.pattern}$"}),
]
ByteSize = Annotated[
    int,
    BeforeValidator(_parse_size),
    PlainSerializer(lambda size: f"{size}B"),
    WithJsonSchema({"type": "string", "pattern": f"^{_SIZE.pattern}$"}),
]


def _identifier(value: str) -> str:
    if re.fullmatch(NAME_PATTERN, value) is None:
        raise fault(
            None,
            f"{value[:80]!r} is not a valid name",
            "Names have 1 to 63 lower-case letters, digits, '.', '_' or '-', and start with a letter or digit.",
        )
    return value


Identifier = Annotated[
    str, AfterValidator(_identifier), WithJsonSchema({"type": "string", "pattern": f"^{NAME_PATTERN}$"})
]


def resolve(value: str | None, info: ValidationInfo) -> str | None:
    """Make a path absolute, relative to the directory of the sweep file."""
    if value is None:
        return None
    if not value or "\0" in value:
        message = "the path is empty or contains a NUL character"
        raise fault(None, message, "Set the path of a file or directory, or remove the key.")
    folder = Path((info.context or {}).get("folder", "."))
    return os.path.normpath(folder.absolute() / value)


def is_there(path: Path) -> bool:
    """Whether the path exists; False if no file system allows such a name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def word(value: Any, key: str | None = None) -> str:
    """The value as the text that is passed to a program.

    Raises:
        PydanticCustomError: it is neither a string nor a number.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return argument_text(value)
    remedy = "Put the value in quotes." if isinstance(value, bool) else "Set a string or a number."
    raise fault(key, f"expected a string or a number{received(value)}", remedy)


def _texts(value: Any) -> Any:
    return {key: word(item, str(key)) for key, item in value.items()} if isinstance(value, Mapping) else value


_VARIABLE = re.compile(r"[A-Za-z_]\w*")


def _variable_name(name: str) -> str:
    if _VARIABLE.fullmatch(name) is None:
        raise fault(
            None, f"{show(name)} is not a valid environment variable name", "Use letters, digits and underscores."
        )
    return name


VariableName = Annotated[str, AfterValidator(_variable_name)]
Environment = Annotated[
    dict[VariableName, str],
    BeforeValidator(_texts),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number"]}}),
]
"""Environment variables with their values; a number in a sweep file is passed as written, see ``yaml_source``."""


# Sections made from the table of knobs: ``baseline``, ``space`` and the patterns in it

_WORLD_SIZE = (
    "The allowed numbers of ranks (`pp` x `dp_replicate` x `dp_shard` x `cp` x `tp`). Defaults to the "
    "number of leased devices, or of devices on `cluster.min_nodes` nodes."
)


def _choices(value_type: Any) -> Any:
    return Annotated[tuple[value_type, ...], OneOrMany()]


def _patterns(*, resolved: bool) -> dict[str, Any]:
    """Pydantic fields, one per knob; ``resolved``: those of a pattern, compared with the value that ``auto``
    resolved to."""
    sizes = _choices(Size) if resolved else _choices(Size) | None
    fields: dict[str, Any] = {"world_size": (sizes, Field(default=None, description=_WORLD_SIZE))}
    for knob in KNOBS:
        value_type = (knob.resolved_type or knob.type) if resolved else knob.type
        fields[knob.name] = (_choices(value_type), Field(default=None, description=knob.description))
    return fields


_SINGLE: dict[str, Any] = {
    knob.name: (
        knob.single_type or knob.type,
        Field(default=knob.default, validate_default=True, description=knob.description),
    )
    for knob in KNOBS
}
_BaselineKnobs: Any = create_model("_BaselineKnobs", __base__=Section, **_SINGLE)
_PatternKnobs: Any = create_model("_PatternKnobs", __base__=Section, **_patterns(resolved=True))
_SpaceKnobs: Any = create_model("_SpaceKnobs", __base__=Section, **_patterns(resolved=False))


class BaselineSection(_BaselineKnobs):  # type: ignore[misc]
    """Your current configuration, with one value per knob. Omitted knobs have their default value. For your training
    program, they keep the value in its command, and `from_run` keeps the values of all knobs."""

    own: CustomBaseline | None = Field(
        default=None, description="The values of custom knobs, by name. Omitted knobs keep the value in the command."
    )

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KNOB_NAMES}


class PatternSection(_PatternKnobs):  # type: ignore[misc]
    """Knobs and their accepted values. Matches a candidate if all of them match."""

    own: CustomFilter | None = Field(default=None, description="Custom knobs and their accepted values.")

    @model_validator(mode="after")
    def _not_empty(self) -> PatternSection:
        if not self.accepted():
            raise fault(None, "an empty pattern matches every candidate", "Add at least one knob to the pattern.")
        return self

    def accepted(self) -> dict[str, tuple[Any, ...]]:
        given = {name: getattr(self, name) for name in (*KNOB_NAMES, "world_size")}
        return {**{name: values for name, values in given.items() if values is not None}, **(self.own or {})}


def _to_tuple(value: Any) -> Any:
    """The value with lists, the only sequences of YAML, as tuples."""
    return tuple(value) if isinstance(value, list) else value


Patterns = Annotated[tuple[PatternSection, ...], BeforeValidator(_to_tuple)]


class SpaceSection(_SpaceKnobs):  # type: ignore[misc]
    """The search space. Each knob has one fixed value or a list of choices. Omitted knobs keep the value in the
    baseline."""

    own: CustomSpace | None = Field(
        default=None,
        description="Custom knobs of your training program, by `--flag`, `file:dotted.key`, `$NAME`, or a placeholder "
        "in its command. Each has a value, a list of values, or a mapping with `values`, `flag`, `memory` "
        "and `when`.",
    )
    inside: InsideSection | None = Field(
        default=None,
        description="Knobs to set inside your training program, which needs no option for them.",
    )
    forbid: Patterns = Field(
        default=(), description="Patterns for candidates to exclude. A candidate is excluded if it matches any of them."
    )
    require: Patterns = Field(
        default=(),
        description="Patterns that candidates must match. A candidate is excluded unless it matches all of them.",
    )
    balance: bool = Field(
        default=False,
        description="Whether to add a candidate to every layout in the space: the one whose layers and recompute per "
        "stage and chunk are predicted to be fastest within memory. It uses only the kinds of recompute in "
        "the space.",
    )

    def choices(self, baseline: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """Values of every knob; omitted knobs take that of ``baseline``."""
        given = {name: getattr(self, name) for name in KNOB_NAMES} | self.set_inside.choices()
        return {name: (baseline[name],) if values is None else values for name, values in given.items()}

    @model_validator(mode="after")
    def _validate_custom_knobs(self) -> SpaceSection:
        self.custom_knobs()
        return self

    def custom_knobs(self) -> tuple[CustomKnob, ...]:
        """The custom knobs, each after those that its conditions name."""
        return custom_knobs(self.own or {})

    @property
    def set_inside(self) -> InsideSection:
        """Knobs set inside the program; empty without such a section."""
        return self.inside or InsideSection()


# Sections ``cluster``, ``measure``, ``budget``, ``deadlines`` and ``tracking``

Share = Annotated[float, Field(ge=0, le=1)]


def _known_accelerator(name: str) -> str:
    if name not in catalogue():
        known = ", ".join(catalogue())
        raise fault(None, f"unknown accelerator {name[:80]!r}", f"Known accelerators: {known}.")
    return name


_RUNNER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class SimulationSection(Section):
    """A simulated cluster runs in virtual time, with step times and memory from the cost model."""

    accelerator: Annotated[str, AfterValidator(_known_accelerator)] = Field(
        description="The accelerator, by its name in configs/accelerators, such as `ascend-910b`."
    )
    noise: Share = Field(default=0.0, description="The standard deviation of the logarithm of each step time.")
    deviation: float = Field(
        default=0.0,
        ge=0,
        le=3,
        description="How far the cluster deviates from the assumptions of the cost model, in standard deviations of "
        "the prior.",
    )
    slow_nodes: dict[str, Positive] = Field(
        default={}, description="The slowdown factor of each slow node, by name (`node0000`, `node0001`, ...)."
    )
    node_losses: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="The second at which each lost node is lost, by name."
    )
    faults: dict[Literal["crash", "hang", "start_hang", "exit"], Share] = Field(
        default={},
        description="The probability per launch that a rank raises an exception, stops, never starts or is killed.",
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="The seed for the deviation, noise and faults.")

    @model_validator(mode="after")
    def _consistent(self) -> SimulationSection:
        if (total := sum(self.faults.values())) > 1:
            message = f"the probabilities add up to {total:g}, more than 1"
            raise fault("faults", message, "Lower them: at most one fault is simulated per attempt.")
        return self


class ClusterSection(Section):
    """Where trials run."""

    kind: Literal["ray", "local", "simulated"] = Field(
        default="ray",
        description="The kind of cluster: `ray` is a running Ray cluster or a private one on this machine, `local` is "
        "this machine without Ray, and `simulated` runs the cost model in virtual time.",
    )
    address: str | None = Field(
        default=None,
        description="The address of a running Ray cluster. If null, a private one is started on this machine.",
    )
    num_nodes: Size = Field(default=1, description="The number of nodes to lease.")
    min_nodes: Size | None = Field(
        default=None,
        description="The minimum number of nodes to start and continue with. More nodes join as they become available. "
        "If null, the minimum is `num_nodes`.",
    )
    max_wait_s: Duration | None = Field(
        default=None,
        alias="max_wait",
        description="How long to wait for `min_nodes`, such as `30m`. If null, there is no limit.",
    )
    queue: Identifier = Field(default="default", description="The queue that this sweep is in (see docs/service.md).")
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(
        default=0,
        description="The priority of the sweep. A sweep with a higher priority pauses sweeps with a lower one and "
        "takes their nodes.",
    )
    devices_per_node: Size | None = Field(
        default=None, description="The number of devices to use on each node. If null, all devices are used."
    )
    device: DeviceChoice = Field(
        default="auto",
        description="The type of device: `rocm` stands for AMD GPUs, `xpu` for Intel GPUs and `npu` for Ascend NPUs. "
        "`auto` uses accelerators if there are any, and CPU cores otherwise.",
    )
    device_memory_bytes: ByteSize | None = Field(
        default=None,
        alias="device_memory",
        description="The memory limit of a rank, such as `2GiB`, including the context and communicators. If null, the "
        "limit is the memory of the device. On machines without a GPU, this limit takes the place of device "
        "memory.",
    )
    env: Environment = Field(
        default={},
        description="Environment variables for every rank. They override those of the node and the defaults in "
        "docs/devices.md. Trials with different values are never compared.",
    )
    simulation: SimulationSection | None = Field(
        default=None, description="The parameters of the cluster, for `kind: simulated`."
    )
    isolation: Literal["node", "device"] = Field(
        default="node",
        description="Whether trials share nodes: with `node`, they never do; with `device`, small trials share a node.",
    )
    price_per_device_hour: Positive | None = Field(
        default=None,
        description="The price of a device-hour in any currency, used to report costs. If null, costs are reported in "
        "device-hours.",
    )
    exclude_nodes: list[str] = Field(default=[], description="The names of leased nodes that trials must not use.")
    exclude_slow_nodes: bool = Field(
        default=False,
        description="Whether to exclude nodes that `tune-cluster probe` found to be slow or could not measure.",
    )

    @property
    def nodes(self) -> tuple[int, int]:
        """Minimum and maximum number of nodes to hold."""
        return self.min_nodes or self.num_nodes, self.num_nodes

    @model_validator(mode="after")
    def _consistent(self) -> ClusterSection:
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            message = f"min_nodes ({self.min_nodes}) is greater than num_nodes ({self.num_nodes})"
            raise fault("min_nodes", message, "Lower min_nodes.")
        if self.kind != "ray" and self.address is not None:
            raise fault(
                "address", f"an address is not allowed with kind: {self.kind}", "Remove the address, or set kind: ray."
            )
        if (self.simulation is not None) != (self.kind == "simulated"):
            message = "kind: simulated and the section 'simulation' require each other"
            raise fault("simulation", message, "Set both, or neither.")
        self._check_nodes()
        self._check_env()
        return self

    def _check_env(self) -> None:
        """Refuse variables that the launcher of the ranks sets."""
        for name, value in self.env.items():
            if (owner := owner_of(name)) is not None:
                raise fault(f"env.{name}", f"{name} is set by {owner}", "Remove the variable.")
            if "\0" in value:
                raise fault(f"env.{name}", "the value contains a NUL byte", "Remove the byte.")

    def _check_nodes(self) -> None:
        """Refuse nodes in ``simulation`` that the cluster does not have."""
        if self.simulation is None:
            return
        last = f"node{self.num_nodes - 1:04d}"
        names = {f"node{i:04d}" for i in range(self.num_nodes)}
        for key in ("slow_nodes", "node_losses"):
            for name in getattr(self.simulation, key):
                if name not in names:
                    raise fault(
                        f"simulation.{key}", f"unknown node {name[:80]!r}", f"The nodes are node0000 to {last}."
                    )


class MeasureSection(Section):
    """How a trial is measured."""

    min_warmup_steps: int = Field(
        default=Protocol().min_warmup_steps, ge=1, le=10**6, description="The minimum number of warm-up steps."
    )
    max_warmup_steps: int = Field(
        default=Protocol().max_warmup_steps, ge=1, le=10**6, description="The maximum number of warm-up steps."
    )
    warmup_tolerance: Positive = Field(
        default=Protocol().warmup_tolerance,
        description="The warm-up ends when two consecutive step times differ by at most this fraction.",
    )
    num_steps: int = Field(default=Protocol().num_steps, ge=1, le=10**6, description="The number of measured steps.")
    max_steps: int = Field(
        default=Protocol().max_steps,
        ge=1,
        le=10**6,
        description="The maximum number of measured steps, for step times that vary too much.",
    )
    max_relative_spread: Positive = Field(
        default=Protocol().max_relative_spread,
        description="The spread of the step times above which more steps are measured: their interquartile range "
        "divided by their median.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> MeasureSection:
        for low, high in (("min_warmup_steps", "max_warmup_steps"), ("num_steps", "max_steps")):
            if getattr(self, low) > getattr(self, high):
                message = f"{high} ({getattr(self, high)}) is less than {low} ({getattr(self, low)})"
                raise fault(high, message, f"Raise {high} or lower {low}.")
        return self

    def to_protocol(self) -> Protocol:
        return self.to(Protocol)


class BudgetSection(Section):
    """When to stop. The first limit that is reached ends the sweep."""

    max_trials: Size = Field(default=50, description="The maximum number of trials, including the baseline.")
    device_hours: Positive | None = Field(
        default=None, description="The maximum number of device-hours. If null, there is no limit."
    )
    wall_time_s: Duration | None = Field(
        default=None,
        alias="wall_time",
        description="The maximum running time of the sweep, such as `10m` or `2h`. Pauses do not count. If null, there "
        "is no limit.",
    )
    consecutive_failures: Size = Field(default=5, description="The maximum number of consecutive failed trials.")
    strikes_per_node: Size = Field(
        default=3, description="The number of consecutive losses or hangs after which the node responsible is excluded."
    )


class DeadlinesSection(Section):
    """How many seconds a trial may spend in each phase before it is killed. Deadlines are longer if the cost model
    expects slow steps."""

    starting_s: Positive = Field(
        default=Deadlines().starting_s, description="The time from the launch until all ranks are training."
    )
    warmup_s: Positive = Field(default=Deadlines().warmup_s, description="The time for warm-up steps.")
    measuring_s: Positive = Field(default=Deadlines().measuring_s, description="The time for measured steps.")
    stall_s: Positive = Field(default=Deadlines().stall_s, description="The maximum time without progress on any rank.")
    compile_s: Positive = Field(
        default=Deadlines().compile_s,
        description="The total compilation time. The other deadlines are paused while a rank compiles.",
    )
    placing_s: Positive = Field(
        default=600.0,
        description="The maximum time to wait for nodes while no trial is running. The sweep then stops and can be "
        "resumed.",
    )

    def to_deadlines(self) -> Deadlines:
        return self.to(Deadlines)


class TrackingSection(Section):
    """Where to record results in MLflow."""

    uri: str | None = Field(
        default=None,
        pattern=URI_PATTERN,
        description="The MLflow tracking URI, without credentials: `http(s)://host:port` or "
        "`sqlite:////absolute/path.db`. If null, a SQLite store in the `--home` directory is used.",
    )
    experiment: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="The name of the MLflow experiment. If null, it is named after the model and the hardware.",
    )
    report: bool = Field(
        default=True,
        description="Whether to attach the report page and its plots to the sweep's MLflow run. This takes a few "
        "seconds at the end.",
    )


def check_runner(value: str) -> str:
    if _RUNNER.fullmatch(value) is None:
        raise fault(
            None, f"expected MODULE:FUNCTION, got {value[:80]!r}", "Use a value such as my_package.runner:main."
        )
    return value


# Sections ``confirm`` and ``gate``: proof of a finalist

_SOAKS: dict[str, float | None] = {"auto": None, "off": 0.0}


class Switchable(Section):
    """A section, or the word ``off``."""

    _is_on: bool = PrivateAttr(default=True)

    @property
    def is_on(self) -> bool:
        return self._is_on


class PromotedSection(Section):
    """The rounds of a promotion, which those of a verification are compared with. Written by `verify`."""

    own: list[Positive] = Field(
        min_length=1,
        description="The speed of the configuration in each round of its promotion, in tokens/s/p (per device).",
    )
    baseline: list[Positive] = Field(
        default=[], description="The speed of the baseline in the same rounds, if measured."
    )
    tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(description="The slowdown to tolerate, as a fraction.")
    hardware: dict[str, str] = Field(
        default={}, description="The entries of the fingerprint that must match for speeds to be comparable."
    )

    @model_validator(mode="after")
    def _paired(self) -> PromotedSection:
        if self.baseline and len(self.baseline) != len(self.own):
            message = f"'baseline' has {len(self.baseline)} speeds, but 'own' has {len(self.own)}"
            raise fault("baseline", message, "List one speed per round in each.")
        return self

    def to_settings(self) -> PromotedRounds:
        return self.to(PromotedRounds)


class ConfirmSection(Switchable):
    """How to re-measure the fastest trials before one of them is confirmed."""

    finalists: Annotated[int, Field(ge=1, le=20)] = Field(
        default=ConfirmSettings().num_finalists,
        description="The maximum number of trials to re-measure, chosen from those that may be the fastest.",
    )
    min_rounds: Annotated[int, Field(ge=2, le=100)] = Field(
        default=ConfirmSettings().min_rounds, description="The minimum number of rounds."
    )
    max_rounds: Annotated[int, Field(ge=2, le=100)] = Field(
        default=ConfirmSettings().max_rounds, description="The maximum number of rounds."
    )
    budget_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=ConfirmSettings().budget_share,
        description="The fraction of `device_hours` and `wall_time` to reserve for the confirmation and the loss gate.",
    )

    soak: Literal["auto", "off"] | Duration = Field(
        default="auto",
        description="The length of the soak, one longer run each of the winner and the baseline before the winner is "
        "confirmed. It is the time that the measured steps would take at the speed of the rounds. `auto` "
        "makes the soak as long as all rounds together, at least 30s, and skips it on simulated clusters.",
    )
    always: bool = Field(
        default=ConfirmSettings().always,
        description="Whether to re-measure the fastest trials even if none of them is likely to be faster than the "
        "baseline.",
    )
    promoted: PromotedSection | None = Field(
        default=None,
        description="The rounds of a promotion, which those of a verification are compared with. Written by `verify`. "
        "Rounds continue until they show whether the finalist has become slower since its promotion.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> ConfirmSection:
        if self.max_rounds < self.min_rounds:
            message = f"max_rounds ({self.max_rounds}) is less than min_rounds ({self.min_rounds})"
            raise fault("max_rounds", message, "Raise max_rounds.")
        return self

    def to_settings(self) -> ConfirmSettings:
        return self.to(
            ConfirmSettings,
            num_finalists=self.finalists,
            soak_s=_SOAKS[self.soak] if isinstance(self.soak, str) else self.soak,
            promoted=self.promoted.to_settings() if self.promoted else None,
        )


class GateSection(Switchable):
    """How to check that the losses of the winner match those of the baseline."""

    num_steps: Annotated[int, Field(ge=2, le=10_000)] = Field(
        default=GateSettings().num_steps, description="The number of steps to train the baseline and the finalist for."
    )
    loss_tolerance: Positive | None = Field(
        default=None,
        description="The allowed relative deviation of the loss. If null, it depends on the number format (see "
        "docs/loss-gate.md).",
    )
    grad_norm_tolerance: Positive | None = Field(
        default=None,
        description="The allowed relative deviation of the gradient norm. If null, it depends on the number format.",
    )
    command: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(
        default=[],
        max_length=64,
        description="The command of a custom evaluation of the finalist, as a program and its arguments, run without a "
        "shell. `{facts}` is replaced by the path of a JSON file that describes the finalist. The finalist "
        "passes if the exit code is 0. If empty, there is no evaluation.",
    )
    command_timeout_s: Duration = Field(
        default=GateSettings().command_timeout_s,
        alias="command_timeout",
        description="The time limit for the evaluation.",
    )

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> GateSection:
        if any("\0" in part for part in self.command):
            raise fault("command", "an argument contains a NUL character", "Remove the character.")
        context = info.context or {}
        is_run_here = context.get("check_files", True) and not context.get("is_remote", False)
        if self.command and is_run_here and shutil.which(self.command[0]) is None:
            where = "is not executable" if "/" in self.command[0] else "is not on PATH"
            raise fault(
                "command.0", f"program {self.command[0]!r} {where}", "Install the program, or set its full path."
            )
        return self

    def to_settings(self) -> GateSettings:
        return self.to(GateSettings)


def _off(section: Switchable, example: str) -> Any:
    section._is_on = False
    return (
        ShortForms({}, others=("off",), remedy=f"Use a value such as {example}."),
        Word("off", section),
        PlainSerializer(lambda value: value.model_dump(mode="json", by_alias=True) if value.is_on else "off"),
    )


ConfirmValue = Annotated[ConfirmSection, *_off(ConfirmSection(), "{max_rounds: 8}")]
GateValue = Annotated[GateSection, *_off(GateSection(), "{num_steps: 50}")]


# Section ``profile``: which trials run again under the profiler

MAX_STEPS = 20
"""Maximum number of recorded steps: traces grow with the steps, and three are usually enough."""
_PROFILE = ProfileSpec()

Step = Annotated[int, Field(ge=1, le=10_000)]
Rank = Annotated[int, Field(ge=0, lt=2**20)]


Ranks = Annotated[list[Rank], Word("stages", []), PlainSerializer(lambda ranks: ranks or "stages")]


class ProfileSection(Switchable):
    """Which trials to rerun at the end, under the PyTorch profiler."""

    _is_auto: bool = PrivateAttr(default=False)

    trials: list[Literal["winner", "baseline"]] = Field(
        default=["winner"],
        min_length=1,
        description="The trials to profile: `winner`, `baseline` or both. For other trials, use `tune-cluster "
        "profile`.",
    )
    start_step: Step = Field(
        default=_PROFILE.start_step,
        description="The first step to record, counted from 1 and including the warm-up. The very first steps compile "
        "and allocate.",
    )
    stop_step: Step = Field(default=_PROFILE.stop_step, description="The last step to record.")
    ranks: Ranks = Field(
        default=[],
        json_schema_extra={"default": "stages"},
        description="The ranks to record. `stages` records the first rank of every pipeline stage.",
    )
    memory: bool = Field(
        default=_PROFILE.memory, description="Whether to record allocations too: a timeline and the peak."
    )
    stack: bool = Field(
        default=_PROFILE.stack, description="Whether to record Python call stacks too, which makes traces large."
    )
    communication: bool = Field(
        default=_PROFILE.communication,
        description="Whether to count collectives per module and flag redundant ones, in one additional step.",
    )
    output: str | None = Field(
        default=None,
        description="An additional directory to copy traces to. If null, they are only in the sweep's directory.",
    )

    _resolve = field_validator("output")(resolve)

    @model_validator(mode="after")
    def _consistent(self) -> ProfileSection:
        if self.stop_step < self.start_step:
            raise fault(
                "stop_step",
                f"stop_step ({self.stop_step}) is before start_step ({self.start_step})",
                "Raise stop_step, or lower start_step.",
            )
        if self.stop_step - self.start_step >= MAX_STEPS:
            raise fault(
                "stop_step",
                f"{self.stop_step - self.start_step + 1} steps would be recorded; the limit is {MAX_STEPS}",
                "Three steps are usually enough.",
            )
        for key, values in (("trials", self.trials), ("ranks", self.ranks)):
            if len(set(map(str, values))) < len(values):
                raise fault(key, "an item is listed twice", "Remove one of the two.")
        return self

    @property
    def is_auto(self) -> bool:
        """Whether baseline and winner are profiled automatically if that is cheap compared with the sweep."""
        return self._is_auto

    def to_spec(self) -> ProfileSpec:
        return self.to(ProfileSpec)


def _auto_profile() -> ProfileSection:
    section = ProfileSection(trials=["baseline", "winner"])
    section._is_auto = True
    return section


def _profile_json(value: ProfileSection) -> Any:
    if not value.is_on:
        return "off"
    return "auto" if value.is_auto else value.model_dump(mode="json", by_alias=True)


AUTO_PROFILE = _auto_profile()
_NO_PROFILE = ProfileSection()
_NO_PROFILE._is_on = False
ProfileValue = Annotated[
    ProfileSection,
    ShortForms({}, others=("auto", "off"), remedy="Use a value such as {trials: [baseline, winner]}."),
    Word("off", _NO_PROFILE),
    Word("auto", AUTO_PROFILE),
    PlainSerializer(_profile_json),
]


# Section ``notify``: receivers of notifications

NotifyEvent = Literal["finished", "budget", "failed", "paused", "cancelled", "repeated_failure"]
EVENTS: tuple[NotifyEvent, ...] = get_args(NotifyEvent)
_WEBHOOK_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def _webhook_variable(value: str) -> str:
    """Refuse an environment variable whose name does not look like that of a secret: its value would not be
    redacted.

    The message does not repeat what was written: it may be the secret itself.
    """
    if _WEBHOOK_VARIABLE.fullmatch(value) is None:
        raise fault(
            None,
            "expected the name of the environment variable that holds the webhook URL",
            "Keep the URL itself out of the file: anyone who knows it can post to it.",
        )
    if not is_secret_name(value):
        raise fault(
            None,
            f"{value} does not look like the name of a secret, so its value would not be redacted",
            "Use a name that ends in WEBHOOK, such as TEAM_WEBHOOK.",
        )
    return value


class NotifySection(Section):
    """Where to send notifications about the sweep. Each receiver gets every notification at least once, in order."""

    webhook_env: Annotated[str, AfterValidator(_webhook_variable)] | None = Field(
        default=None, description="The environment variable that contains the URL to post notifications to, as JSON."
    )
    webhook_file: str | None = Field(
        default=None, description="The file that contains the URL, for a controller on another node."
    )
    command: list[Annotated[str, Field(min_length=1, max_length=4096)]] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="The program to run and its arguments, without a shell. It receives JSON on standard input and "
        "`TUNE_CLUSTER_EVENT` in its environment.",
    )
    on: list[NotifyEvent] = Field(
        default=list(EVENTS),
        min_length=1,
        description=f"The events to send notifications for: {', '.join(f'`{event}`' for event in EVENTS)}.",
    )
    after_failures: Size = Field(
        default=3,
        description="The number of consecutive failed trials that counts as a `repeated_failure`. An excluded node "
        "also counts.",
    )

    _resolve = field_validator("webhook_file")(resolve)

    @model_validator(mode="after")
    def _consistent(self) -> NotifySection:
        if self.webhook_env is not None and self.webhook_file is not None:
            raise fault("webhook_file", "webhook_env and webhook_file are mutually exclusive", "Remove one of them.")
        if not self.is_on:
            raise fault(None, "no receiver is configured", "Set webhook_env, webhook_file or command.")
        if self.command is not None and any("\0" in part for part in self.command):
            raise fault("command", "an argument contains a NUL character", "Remove the character.")
        if len(set(self.on)) != len(self.on):
            raise fault("on", "an event is listed twice", "Remove one of the two.")
        return self

    @property
    def is_on(self) -> bool:
        """Whether any receiver is configured."""
        return not (self.webhook_env is None and self.webhook_file is None and self.command is None)
