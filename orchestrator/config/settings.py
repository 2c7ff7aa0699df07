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
        raise fault(None, f"expected a duration with a unit{received(value)}", "For example: 90s, 10m or 2h.")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > MAX_DURATION_S:
        raise fault(None, f"{show(value)} is out of range", "The maximum is 36500d.")
    return seconds


def _parse_size(value: Any) -> int:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) == 0:
        raise fault(None, f"expected a size with a unit{received(value)}", "For example: 512MiB or 80GB.")
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
        raise fault(
            None,
            "the path is empty or contains a NUL character",
            "Set the path of a file or directory, or remove the key.",
        )
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
"""Environment variables with their values; a number is passed as written."""


# Sections made from the table of knobs: ``baseline``, ``space`` and the patterns in it

_WORLD_SIZE = (
    "Allowed numbers of ranks (pp x dp_replicate x dp_shard x cp x tp). Default: all leased devices, or those "
    "of cluster.min_nodes."
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
    """The configuration used today, one value per knob. Omitted knobs have their default; in your training program
    they keep the value in its command, and `from_run` keeps all of them."""

    own: CustomBaseline | None = Field(
        default=None, description="Values of custom knobs by name. Omitted knobs keep the value in the command."
    )

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KNOB_NAMES}


class PatternSection(_PatternKnobs):  # type: ignore[misc]
    """Knobs and accepted values; matches a candidate when all of them match."""

    own: CustomFilter | None = Field(default=None, description="Custom knobs and accepted values.")

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
    """The search space: one value (fixed) or a list of choices per knob. Omitted knobs keep the value of the
    baseline."""

    own: CustomSpace | None = Field(
        default=None,
        description="Custom knobs of your training program: `--flag`, `file:dotted.key`, `$NAME`, or a "
        "placeholder of its command, each with a value, a list, or a mapping of values, flag, "
        "memory and when.",
    )
    inside: InsideSection | None = Field(
        default=None,
        description="Knobs that your training program has no option for; the hook sets them inside the program.",
    )
    forbid: Patterns = Field(default=(), description="Candidates that match any of these patterns are excluded.")
    require: Patterns = Field(default=(), description="Candidates must match all of these patterns.")
    balance: bool = Field(
        default=False,
        description="For every layout of the space, also try the layers and recompute per stage and chunk that "
        "the cost model predicts to be fastest within memory. Uses only the kinds of recompute in "
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
    """A simulated cluster: virtual time, step times and memory from the cost model."""

    accelerator: Annotated[str, AfterValidator(_known_accelerator)] = Field(
        description="Accelerator from the catalogue, configs/accelerators, like ascend-910b."
    )
    noise: Share = Field(default=0.0, description="Standard deviation of the logarithm of each step time.")
    deviation: float = Field(
        default=0.0,
        ge=0,
        le=3,
        description="Deviation of the machine from the cost model's assumptions, in standard deviations of the prior.",
    )
    slow_nodes: dict[str, Positive] = Field(
        default={}, description="Slowdown factor by node (node0000, node0001, ...)."
    )
    node_losses: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default={}, description="Second at which a node is lost, by node."
    )
    faults: dict[Literal["crash", "hang", "start_hang", "exit"], Share] = Field(
        default={}, description="Probability per launch that a rank raises, stops, never starts or is killed."
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of deviation, noise and faults.")

    @model_validator(mode="after")
    def _consistent(self) -> SimulationSection:
        if (total := sum(self.faults.values())) > 1:
            raise fault(
                "faults",
                f"the probabilities add up to {total:g}, more than 1",
                "Lower them: at most one fault is simulated per attempt.",
            )
        return self


class ClusterSection(Section):
    """Where trials run."""

    kind: Literal["ray", "local", "simulated"] = Field(
        default="ray",
        description="ray: a running Ray cluster, or a private one on this host; local: this host without Ray; "
        "simulated: the cost model in virtual time.",
    )
    address: str | None = Field(
        default=None, description="Address of a running Ray cluster; null starts a private one on this host."
    )
    num_nodes: Size = Field(default=1, description="Nodes to lease.")
    min_nodes: Size | None = Field(
        default=None,
        description="Minimum number of nodes to start and continue with; null: num_nodes. More nodes join as they "
        "become available.",
    )
    max_wait_s: Duration | None = Field(
        default=None,
        alias="max_wait",
        description='How long to wait for min_nodes, like "30m"; null: no limit.',
    )
    queue: Identifier = Field(default="default", description="Queue of this sweep; see docs/service.md.")
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(
        default=0, description="A sweep with a higher priority takes nodes from lower ones and pauses them."
    )
    devices_per_node: Size | None = Field(default=None, description="Devices per node; null: all.")
    device: DeviceChoice = Field(
        default="auto",
        description="auto: accelerators if present, else CPU cores; rocm: AMD GPUs; xpu: Intel GPUs; npu: Ascend.",
    )
    device_memory_bytes: ByteSize | None = Field(
        default=None,
        alias="device_memory",
        description='Memory limit of a rank, like "2GiB", including context and communicators; null: the memory of the '
        "device. On machines without a GPU it takes the place of device memory.",
    )
    env: Environment = Field(
        default={},
        description="Environment variables of every rank. They override those of the host and the defaults in "
        "docs/devices.md, and trials with different values are not compared.",
    )
    simulation: SimulationSection | None = Field(
        default=None, description="Parameters of the cluster for kind: simulated."
    )
    isolation: Literal["node", "device"] = Field(
        default="node", description="node: trials never share a node; device: small trials share one."
    )
    price_per_device_hour: Positive | None = Field(
        default=None, description="Price in any currency, used to show costs; null: costs are shown in device-hours."
    )
    exclude_nodes: list[str] = Field(default=[], description="Leased nodes that trials must not use, by name.")
    exclude_slow_nodes: bool = Field(
        default=False, description="Exclude nodes that `tune-cluster probe` found slow or could not measure."
    )

    @property
    def nodes(self) -> tuple[int, int]:
        """Minimum and maximum number of nodes to hold."""
        return self.min_nodes or self.num_nodes, self.num_nodes

    @model_validator(mode="after")
    def _consistent(self) -> ClusterSection:
        if self.min_nodes is not None and self.min_nodes > self.num_nodes:
            raise fault(
                "min_nodes",
                f"min_nodes ({self.min_nodes}) is greater than num_nodes ({self.num_nodes})",
                "Lower min_nodes.",
            )
        if self.kind != "ray" and self.address is not None:
            raise fault(
                "address", f"an address is not allowed with kind: {self.kind}", "Remove the address, or set kind: ray."
            )
        if (self.simulation is not None) != (self.kind == "simulated"):
            raise fault(
                "simulation",
                "kind: simulated and the section 'simulation' require each other",
                "Set both, or neither.",
            )
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
        default=Protocol().min_warmup_steps, ge=1, le=10**6, description="Minimum number of warm-up steps."
    )
    max_warmup_steps: int = Field(
        default=Protocol().max_warmup_steps, ge=1, le=10**6, description="Maximum number of warm-up steps."
    )
    warmup_tolerance: Positive = Field(
        default=Protocol().warmup_tolerance,
        description="Warm-up ends when two consecutive step times differ by at most this fraction.",
    )
    num_steps: int = Field(default=Protocol().num_steps, ge=1, le=10**6, description="Number of measured steps.")
    max_steps: int = Field(
        default=Protocol().max_steps,
        ge=1,
        le=10**6,
        description="Maximum number of measured steps, used while step times vary too much.",
    )
    max_relative_spread: Positive = Field(
        default=Protocol().max_relative_spread,
        description="More steps are measured while the interquartile range divided by the median is above this.",
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
    """When to stop, whichever comes first."""

    max_trials: Size = Field(default=50, description="Maximum number of trials, including the baseline.")
    device_hours: Positive | None = Field(default=None, description="Maximum device-hours; null: no limit.")
    wall_time_s: Duration | None = Field(
        default=None,
        alias="wall_time",
        description='Maximum running time of the sweep, like "10m" or "2h"; pauses do not count. null: no limit.',
    )
    consecutive_failures: Size = Field(default=5, description="Maximum number of consecutive failed trials.")
    strikes_per_node: Size = Field(
        default=3, description="A node is excluded after this many consecutive losses or hangs attributed to it."
    )


class DeadlinesSection(Section):
    """Seconds a trial may spend before it is killed; longer where the cost model expects slow steps."""

    starting_s: Positive = Field(
        default=Deadlines().starting_s, description="From launch until all ranks are training."
    )
    warmup_s: Positive = Field(default=Deadlines().warmup_s, description="Warm-up.")
    measuring_s: Positive = Field(default=Deadlines().measuring_s, description="Measured steps.")
    stall_s: Positive = Field(default=Deadlines().stall_s, description="Maximum time without progress on any rank.")
    compile_s: Positive = Field(
        default=Deadlines().compile_s,
        description="Total compilation time; the other deadlines are paused while a rank compiles.",
    )
    placing_s: Positive = Field(
        default=600.0,
        description="Maximum wait for nodes while no trial runs; the sweep then stops and can be resumed.",
    )

    def to_deadlines(self) -> Deadlines:
        return self.to(Deadlines)


class TrackingSection(Section):
    """Where results are recorded in MLflow."""

    uri: str | None = Field(
        default=None,
        pattern=URI_PATTERN,
        description="MLflow tracking URI without credentials: http(s)://host:port or "
        "sqlite:////absolute/path.db; null: a SQLite store in the tune-cluster home folder.",
    )
    experiment: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="MLflow experiment; null: named after model and hardware.",
    )
    report: bool = Field(
        default=True,
        description="Attach the report page and its plots to the MLflow run of the sweep; takes a few seconds at the "
        "end.",
    )


def check_runner(value: str) -> str:
    if _RUNNER.fullmatch(value) is None:
        raise fault(None, f"expected MODULE:FUNCTION, got {value[:80]!r}", "For example: my_package.runner:main.")
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
    """Rounds of a promotion, the reference for those of a verification; written by `verify`."""

    own: list[Positive] = Field(
        min_length=1,
        description="Speed of the configuration in each round of its promotion, in tokens/s/p (per device).",
    )
    baseline: list[Positive] = Field(default=[], description="Speed of the baseline in the same rounds, if measured.")
    tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(description="Relative loss of speed that is ignored.")
    hardware: dict[str, str] = Field(
        default={}, description="Entries of the fingerprint that must match for speeds to be comparable."
    )

    @model_validator(mode="after")
    def _paired(self) -> PromotedSection:
        if self.baseline and len(self.baseline) != len(self.own):
            raise fault(
                "baseline",
                f"'baseline' has {len(self.baseline)} speeds, but 'own' has {len(self.own)}",
                "List one speed per round in each.",
            )
        return self

    def to_settings(self) -> PromotedRounds:
        return self.to(PromotedRounds)


class ConfirmSection(Switchable):
    """How the fastest trials are measured again before one of them is confirmed."""

    finalists: Annotated[int, Field(ge=1, le=20)] = Field(
        default=ConfirmSettings().num_finalists,
        description="Maximum number of trials to confirm, chosen from those that may be the fastest.",
    )
    min_rounds: Annotated[int, Field(ge=2, le=100)] = Field(
        default=ConfirmSettings().min_rounds, description="Minimum number of rounds."
    )
    max_rounds: Annotated[int, Field(ge=2, le=100)] = Field(
        default=ConfirmSettings().max_rounds, description="Maximum number of rounds."
    )
    budget_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=ConfirmSettings().budget_share,
        description="Fraction of device_hours and wall_time reserved for confirmation and gate.",
    )

    soak: Literal["auto", "off"] | Duration = Field(
        default="auto",
        description="Length of the soak, one longer run each of winner and baseline before the winner is confirmed: "
        "the time that its measured steps would take at the speed of the rounds. auto: as long as all rounds "
        "together, at least 30s, and no soak on simulated clusters.",
    )
    always: bool = Field(
        default=ConfirmSettings().always,
        description="Measure the fastest trials again even if none of them is likely to be faster than the baseline.",
    )
    promoted: PromotedSection | None = Field(
        default=None,
        description="Written by `verify`: rounds continue until they show whether the finalist has become "
        "slower since its promotion.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> ConfirmSection:
        if self.max_rounds < self.min_rounds:
            raise fault(
                "max_rounds",
                f"max_rounds ({self.max_rounds}) is less than min_rounds ({self.min_rounds})",
                "Raise max_rounds.",
            )
        return self

    def to_settings(self) -> ConfirmSettings:
        return self.to(
            ConfirmSettings,
            num_finalists=self.finalists,
            soak_s=_SOAKS[self.soak] if isinstance(self.soak, str) else self.soak,
            promoted=self.promoted.to_settings() if self.promoted else None,
        )


class GateSection(Switchable):
    """Whether the winner trains the same model as the baseline."""

    num_steps: Annotated[int, Field(ge=2, le=10_000)] = Field(
        default=GateSettings().num_steps, description="Steps trained by baseline and finalist."
    )
    loss_tolerance: Positive | None = Field(
        default=None,
        description="Allowed relative deviation of the loss; null: by number format, see docs/loss-gate.md.",
    )
    grad_norm_tolerance: Positive | None = Field(
        default=None, description="Allowed relative deviation of the gradient norm; null: depends on the number format."
    )
    command: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(
        default=[],
        max_length=64,
        description="Custom evaluation of the finalist: program and arguments, run without a shell. `{facts}` "
        "is replaced by the path of a JSON file that describes the finalist. Exit code 0 means "
        "passed. Empty: no evaluation.",
    )
    command_timeout_s: Duration = Field(
        default=GateSettings().command_timeout_s, alias="command_timeout", description="Time limit of the evaluation."
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
        ShortForms({}, others=("off",), remedy=f"For example: {example}."),
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
    """Trials to run again at the end, under the PyTorch profiler."""

    _is_auto: bool = PrivateAttr(default=False)

    trials: list[Literal["winner", "baseline"]] = Field(
        default=["winner"],
        min_length=1,
        description="Trials to profile: winner, baseline. Use `tune-cluster profile` for others.",
    )
    start_step: Step = Field(
        default=_PROFILE.start_step,
        description="First recorded step, counted from 1 including warm-up; the very first steps compile and allocate.",
    )
    stop_step: Step = Field(default=_PROFILE.stop_step, description="Last recorded step.")
    ranks: Ranks = Field(
        default=[],
        json_schema_extra={"default": "stages"},
        description="Ranks to record; stages: the first rank of every pipeline stage.",
    )
    memory: bool = Field(default=_PROFILE.memory, description="Also record allocations: a timeline, and the peak.")
    stack: bool = Field(default=_PROFILE.stack, description="Also record Python call stacks; traces become large.")
    communication: bool = Field(
        default=_PROFILE.communication,
        description="Count collectives per module and flag redundant ones, in one additional step.",
    )
    output: str | None = Field(
        default=None, description="Additional folder that traces are copied to; null: only the folder of the sweep."
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
    ShortForms({}, others=("auto", "off"), remedy="For example: {trials: [baseline, best]}."),
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
    """Receivers of notifications about the sweep. Each gets every notification at least once, in order."""

    webhook_env: Annotated[str, AfterValidator(_webhook_variable)] | None = Field(
        default=None, description="Environment variable with the URL to which notifications are posted as JSON."
    )
    webhook_file: str | None = Field(default=None, description="File with the URL, for a controller on another host.")
    command: list[Annotated[str, Field(min_length=1, max_length=4096)]] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Program and arguments, run without a shell: receives JSON on standard input and "
        "TUNE_CLUSTER_EVENT in its environment.",
    )
    on: list[NotifyEvent] = Field(
        default=list(EVENTS), min_length=1, description="Events to notify of: " + ", ".join(EVENTS) + "."
    )
    after_failures: Size = Field(
        default=3, description="repeated_failure: this many consecutive trials failed, or a node was excluded."
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
