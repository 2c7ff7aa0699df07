"""All sections of a sweep file but ``workload``, and the types of single values in them.

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
from orchestrator.space.file_types import OneOrMany, Section, ShortForms, Word, fault, off_is_false, show
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
"""A hundred years: the system's clocks and timers take no much longer ones."""
MAX_SIZE_BYTES = 2**63 - 1


def _parse_duration(value: Any) -> float:
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) == 0:
        raise fault(
            None, f"expected a duration with its unit, got {show(value)}", 'Write it like "90s", "10m" or "2h".'
        )
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > MAX_DURATION_S:
        raise fault(None, f"{show(value)} is out of range", "Use at most 36500d.")
    return seconds


def _parse_size(value: Any) -> int:
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None or float(match[1]) == 0:
        raise fault(None, f"expected a size with its unit, got {show(value)}", 'Write it like "512MiB" or "80GB".')
    size = float(match[1]) * _BYTES[match[2]]
    if size > MAX_SIZE_BYTES:
        raise fault(None, f"{show(value)} is out of range", "Use at most 8000000TiB.")
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
            "Use 1 to 63 lower-case letters, digits, '.', '_' or '-', starting with a letter or digit.",
        )
    return value


Identifier = Annotated[
    str, AfterValidator(_identifier), WithJsonSchema({"type": "string", "pattern": f"^{NAME_PATTERN}$"})
]


def resolve(value: str | None, info: ValidationInfo) -> str | None:
    """Make a path absolute, from the folder of the sweep file."""
    if value is None:
        return None
    if not value or "\0" in value:
        raise fault(None, "not a path", "Name a file or folder, or leave the key out.")
    folder = Path((info.context or {}).get("folder", "."))
    return os.path.normpath(folder.absolute() / value)


def is_there(path: Path) -> bool:
    """Whether anything lies at this path; nothing does where no file system could take such a name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def word(value: Any, key: str | None = None) -> str:
    """The value as the text that a program gets.

    Raises:
        PydanticCustomError: it is neither text nor a number.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return argument_text(value)
    what = "nothing" if value is None else show(value)
    raise fault(key, f"expected text or a number, got {what}", "Put the word in quotes.")


def _texts(value: Any) -> Any:
    return {key: word(item, str(key)) for key, item in value.items()} if isinstance(value, Mapping) else value


_VARIABLE = re.compile(r"[A-Za-z_]\w*")


def _variable_name(name: str) -> str:
    if _VARIABLE.fullmatch(name) is None:
        raise fault(None, f"{show(name)} is no name of an environment variable", "Use letters, digits and _.")
    return name


VariableName = Annotated[str, AfterValidator(_variable_name)]
Environment = Annotated[
    dict[VariableName, str],
    BeforeValidator(_texts),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": ["string", "number"]}}),
]
"""Environment variables with their values; a number is the text it is written as."""


# Sections made from the table of knobs: ``baseline``, ``space`` and the patterns in it

_WORLD_SIZE = (
    "Allowed numbers of ranks, pp x dp_replicate x dp_shard x cp x tp; left out: the whole lease, or the part of it "
    "that is always held (cluster.min_nodes)."
)


def _choices(value_type: Any) -> Any:
    return Annotated[tuple[value_type, ...], OneOrMany()]


def _patterns(*, resolved: bool) -> dict[str, Any]:
    """Pydantic fields, one per knob; ``resolved``: those of a pattern, which compares with what ``auto`` came to."""
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
    """The configuration used today: one value per knob, the knob's default where left out; of your own training program
    what its command says, which is all that `from_run` means."""

    own: CustomBaseline | None = Field(
        default=None, description="Values of knobs of your own, by name; those left out are as the command says."
    )

    def values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KNOB_NAMES}


class PatternSection(_PatternKnobs):  # type: ignore[misc]
    """Knobs and accepted values; matches a candidate when all of them match."""

    own: CustomFilter | None = Field(default=None, description="Knobs of your own and accepted values.")

    @model_validator(mode="after")
    def _not_empty(self) -> PatternSection:
        if not self.accepted():
            raise fault(None, "an empty pattern matches everything", "Name at least one knob.")
        return self

    def accepted(self) -> dict[str, tuple[Any, ...]]:
        given = {name: getattr(self, name) for name in (*KNOB_NAMES, "world_size")}
        return {**{name: values for name, values in given.items() if values is not None}, **(self.own or {})}


def _to_tuple(value: Any) -> Any:
    """The value with lists, the only sequences of YAML, as tuples."""
    return tuple(value) if isinstance(value, list) else value


Patterns = Annotated[tuple[PatternSection, ...], BeforeValidator(_to_tuple)]


class SpaceSection(_SpaceKnobs):  # type: ignore[misc]
    """The search space: every knob one value (fixed) or a list of choices; left out, it keeps the baseline's value."""

    own: CustomSpace | None = Field(
        default=None,
        description="Knobs of your own training program: `--flag`, `file:dotted.key`, `$NAME`, or a placeholder of its "
        "command, each with a value, a list, or a mapping of values, flag, memory and when.",
    )
    inside: InsideSection | None = Field(
        default=None,
        description="Knobs for which your own training program has no option, set inside it by our hook.",
    )
    forbid: Patterns = Field(default=(), description="Candidates matching any of these patterns are left out.")
    require: Patterns = Field(default=(), description="Candidates must match all of these patterns.")
    balance: bool = Field(
        default=False,
        description="Also try, for every layout of the space, the layers and the recompute per stage and chunk that "
        "the cost model finds fastest within the memory, using the kinds of recompute that the space names.",
    )

    def choices(self, baseline: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """Values of every knob; those left out take the one of ``baseline``."""
        given = {name: getattr(self, name) for name in KNOB_NAMES} | self.set_inside.choices()
        return {name: (baseline[name],) if values is None else values for name, values in given.items()}

    @model_validator(mode="after")
    def _validate_custom_knobs(self) -> SpaceSection:
        self.custom_knobs()
        return self

    def custom_knobs(self) -> tuple[CustomKnob, ...]:
        """The user's knobs, each after those that its conditions name."""
        return custom_knobs(self.own or {})

    @property
    def set_inside(self) -> InsideSection:
        """What is set within the program; nothing where the file has no such section."""
        return self.inside or InsideSection()


# Sections ``cluster``, ``search``, ``measure``, ``budget``, ``deadlines`` and ``tracking``

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
        return self.to(Protocol)


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
        return self.to(Deadlines)


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


# Sections ``confirm`` and ``gate``: how a finalist is proven

_SOAKS: dict[str, float | None] = {"auto": None, "off": 0.0}


class Switchable(Section):
    """A section that may be the word ``off`` instead."""

    _is_on: bool = PrivateAttr(default=True)

    @property
    def is_on(self) -> bool:
        return self._is_on


class PromotedSection(Section):
    """Rounds of a promotion that those of a verification are compared with; written by `verify`."""

    own: list[Positive] = Field(
        min_length=1, description="Speed of the configuration in each round of its promotion, in tokens/s/p."
    )
    baseline: list[Positive] = Field(default=[], description="Speed of the baseline in the same rounds, if measured.")
    tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(description="Relative loss of speed that does not count.")
    hardware: dict[str, str] = Field(
        default={}, description="Entries of the fingerprint that must be the same for speeds to be compared."
    )

    @model_validator(mode="after")
    def _paired(self) -> PromotedSection:
        if self.baseline and len(self.baseline) != len(self.own):
            raise fault(
                "baseline", f"{len(self.baseline)} speeds beside {len(self.own)} of own", "Write one per round."
            )
        return self

    def to_settings(self) -> PromotedRounds:
        return self.to(PromotedRounds)


class ConfirmSection(Switchable):
    """How the fastest trials are measured again before one of them is believed."""

    finalists: Annotated[int, Field(ge=1, le=20)] = Field(
        default=ConfirmSettings().num_finalists, description="Trials to confirm: those that may be the fastest."
    )
    min_rounds: Annotated[int, Field(ge=2, le=100)] = Field(
        default=ConfirmSettings().min_rounds, description="Times each is measured again, at least."
    )
    max_rounds: Annotated[int, Field(ge=2, le=100)] = Field(
        default=ConfirmSettings().max_rounds, description="Times each is measured again, at most."
    )
    budget_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=ConfirmSettings().budget_share,
        description="Share of device_hours and wall_time that the search leaves over for confirmation and gate.",
    )

    soak: Literal["auto", "off"] | Duration = Field(
        default="auto",
        description="One longer run each of winner and baseline before the winner is confirmed: how long its measured "
        "steps take at the speed of the rounds. auto: as long as its rounds together, and at least 30s; none on "
        "clusters that do not exist.",
    )
    always: bool = Field(
        default=ConfirmSettings().always,
        description="Measure the fastest trials again even where none may be faster than the baseline.",
    )
    promoted: PromotedSection | None = Field(
        default=None,
        description="Written by `verify`: rounds go on until they show whether the finalist has lost speed since its "
        "promotion.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> ConfirmSection:
        if self.max_rounds < self.min_rounds:
            raise fault("max_rounds", f"{self.max_rounds} is below min_rounds {self.min_rounds}", "Raise it.")
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
        default=GateSettings().num_steps, description="Steps that baseline and finalist train with the same seed."
    )
    loss_tolerance: Positive | None = Field(
        default=None, description="Relative deviation of the loss allowed; null: by number format, docs/loss-gate.md."
    )
    grad_norm_tolerance: Positive | None = Field(
        default=None, description="Relative deviation of the gradient norm allowed; null: by number format."
    )
    command: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(
        default=[],
        max_length=64,
        description="Your own evaluation of the finalist: program and arguments, run without a shell; `{facts}` stands "
        "for a JSON file about it. Exit code 0 passes. Empty: none.",
    )
    command_timeout_s: Duration = Field(
        default=GateSettings().command_timeout_s, alias="command_timeout", description="How long it may take."
    )

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> GateSection:
        if any("\0" in part for part in self.command):
            raise fault("command", "a NUL character in an argument", "Remove it.")
        context = info.context or {}
        is_run_here = context.get("check_files", True) and not context.get("is_remote", False)
        if self.command and is_run_here and shutil.which(self.command[0]) is None:
            where = "cannot be run" if "/" in self.command[0] else "is not on PATH"
            raise fault("command.0", f"the program {self.command[0]!r} {where}", "Install it, or give its whole path.")
        return self

    def to_settings(self) -> GateSettings:
        return self.to(GateSettings)


def _off(section: Switchable) -> Any:
    section._is_on = False
    return (
        ShortForms({}, others=("off",)),
        Word("off", section),
        PlainSerializer(lambda value: value.model_dump(mode="json", by_alias=True) if value.is_on else "off"),
    )


ConfirmValue = Annotated[ConfirmSection, *_off(ConfirmSection())]
GateValue = Annotated[GateSection, *_off(GateSection())]


# Section ``profile``: which trials run again under the profiler

MAX_STEPS = 20
"""Steps recorded at most: traces grow with the steps, and three tell as much."""
_PROFILE = ProfileSpec()

Step = Annotated[int, Field(ge=1, le=10_000)]
Rank = Annotated[int, Field(ge=0, lt=2**20)]


Ranks = Annotated[list[Rank], Word("stages", []), PlainSerializer(lambda ranks: ranks or "stages")]


class ProfileSection(Switchable):
    """Trials run again, at the end, under torch's profiler."""

    _is_auto: bool = PrivateAttr(default=False)

    trials: list[Literal["winner", "baseline"]] = Field(
        default=["winner"],
        min_length=1,
        description="Which trials: winner, baseline. `tune-cluster profile` takes any other.",
    )
    start_step: Step = Field(
        default=_PROFILE.start_step,
        description="First recorded step, counted from 1 with the warm-up: the first ones compile and allocate.",
    )
    stop_step: Step = Field(default=_PROFILE.stop_step, description="Last recorded step.")
    ranks: Ranks = Field(
        default=[],
        json_schema_extra={"default": "stages"},
        description="Ranks to record; stages: the first rank of every pipeline stage.",
    )
    memory: bool = Field(default=_PROFILE.memory, description="Record allocations too: a timeline, and the peak.")
    stack: bool = Field(default=_PROFILE.stack, description="Record Python's call stacks too; traces get large.")
    communication: bool = Field(
        default=_PROFILE.communication,
        description="Count collectives per module and flag redundant ones, in one further step.",
    )
    output: str | None = Field(
        default=None, description="Folder that traces are copied to as well; null: the sweep's own folder has them."
    )

    _resolve = field_validator("output")(resolve)

    @model_validator(mode="after")
    def _consistent(self) -> ProfileSection:
        if self.stop_step < self.start_step:
            raise fault(
                "stop_step",
                f"stop_step {self.stop_step} comes before start_step {self.start_step}",
                "Both steps are recorded; make stop_step at least start_step.",
            )
        if self.stop_step - self.start_step >= MAX_STEPS:
            raise fault(
                "stop_step", f"records more than {MAX_STEPS} steps", f"Record {MAX_STEPS} or fewer; 3 tell as much."
            )
        for key, values in (("trials", self.trials), ("ranks", self.ranks)):
            if len(set(map(str, values))) < len(values):
                raise fault(key, "the same one is listed twice", "Leave one out.")
        return self

    @property
    def is_auto(self) -> bool:
        """Whether baseline and winner are profiled automatically, if that is cheap compared with the sweep."""
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
    ShortForms({}, others=("auto", "off")),
    Word("off", _NO_PROFILE),
    Word("auto", AUTO_PROFILE),
    PlainSerializer(_profile_json),
]


# Section ``notify``: who is told when something happens to the sweep

NotifyEvent = Literal["finished", "budget", "failed", "paused", "cancelled", "repeated_failure"]
EVENTS: tuple[NotifyEvent, ...] = get_args(NotifyEvent)
_WEBHOOK_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def _webhook_variable(value: str) -> str:
    """Refuse an environment variable whose name does not look like a secret's: its value would not be redacted.

    The message does not repeat what was written: it may be the secret itself.
    """
    if _WEBHOOK_VARIABLE.fullmatch(value) is None:
        raise fault(
            None,
            "expected the name of an environment variable that holds the webhook's URL",
            "Keep the URL itself out of the file: whoever knows it can post there.",
        )
    if not is_secret_name(value):
        raise fault(
            None,
            f"{value} does not look like the name of a secret",
            "Name it like TUNE_CLUSTER_WEBHOOK or TEAM_WEBHOOK.",
        )
    return value


class NotifySection(Section):
    """Who is told when something happens to the sweep. Each way gets every notification at least once, in order."""

    webhook_env: Annotated[str, AfterValidator(_webhook_variable)] | None = Field(
        default=None, description="Environment variable with the URL that notifications are posted to, as JSON."
    )
    webhook_file: str | None = Field(
        default=None, description="File with that URL instead: where the controller runs on another host."
    )
    command: list[Annotated[str, Field(min_length=1, max_length=4096)]] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Program and arguments, run without a shell: JSON on its input, TUNE_CLUSTER_EVENT in its "
        "environment.",
    )
    on: list[NotifyEvent] = Field(
        default=list(EVENTS), min_length=1, description="What to tell: " + ", ".join(EVENTS) + "."
    )
    after_failures: Size = Field(
        default=3, description="repeated_failure: this many trials in a row failed, or a node is not used any more."
    )

    _resolve = field_validator("webhook_file")(resolve)

    @model_validator(mode="after")
    def _consistent(self) -> NotifySection:
        if self.webhook_env is not None and self.webhook_file is not None:
            raise fault("webhook_file", "webhook_env names the URL already", "Keep one of the two.")
        if not self.is_on:
            raise fault(None, "no receiver is configured", "Give webhook_env, webhook_file or command.")
        if self.command is not None and any("\0" in part for part in self.command):
            raise fault("command", "a NUL character in an argument", "Remove it.")
        if len(set(self.on)) != len(self.on):
            raise fault("on", "the same event is listed twice", "Remove one.")
        return self

    @property
    def is_on(self) -> bool:
        """Whether there is anybody to tell."""
        return not (self.webhook_env is None and self.webhook_file is None and self.command is None)
