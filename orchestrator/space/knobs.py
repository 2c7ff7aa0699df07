"""All knobs of the search: built-in ones, one row each, and custom ones."""

from __future__ import annotations

import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from orchestrator.space.file_types import (
    DTYPE_SHORT,
    BaselineRecompute,
    CompileValue,
    CudnnValue,
    DataloaderValue,
    Degree,
    OneOrMany,
    PrecisionValue,
    RecomputeValue,
    Section,
    StageLayersValue,
    count_text,
    fault,
    layers_of,
    lists_text,
    loss_scale_text,
    pattern_text,
    plain,
    received,
    resolve_recompute,
    resolve_stage_layers,
    show,
    stage_layers_text,
    steps_text,
)
from orchestrator.text import one_line
from trials.spec import (
    Candidate,
    Counts,
    CPMethod,
    CustomChoice,
    Kernels,
    Model,
    Precision,
    ResNetModel,
    Schedule,
    ScriptModel,
    UserModel,
    decoder_of,
)

# Custom knobs: definition, distinct combinations, and form in a sweep file. A custom knob is an argument (``--flag``),
# a key of a configuration file (``file:dotted.key``), an environment variable (``$NAME``), a placeholder of the command
# (``name``), or anything else that the workload's recipe resolves by name.

CustomScalar = str | int | float | bool
Memory = Literal["rises", "falls", "none"]
Role = Literal[
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "persistent_workers",
    "compile",
    "compile_mode",
    "precision",
    "matmul_precision",
    "memory_format",
    "cudnn_benchmark",
    "attention",
    "recompute",
    "micro_batch_size",
    "zero_stage",
    "offload_optimizer",
    "offload_activations",
]
"""Built-in knobs that a custom knob can correspond to."""
INHERITED = "inherited"
"""Shown value of a custom knob that a candidate does not set."""
INSIDE = "inside"
"""Custom knobs ``inside:dotted.key`` are set inside the running program, see :mod:`orchestrator.space.inside`."""
AS_IS = "as_is"
"""Value of such a knob that does not change the program."""
_NAME = re.compile(r"--?[A-Za-z][\w.+/-]*|\$[A-Za-z_]\w*|[A-Za-z_]\w*:[\w.+/-]+|[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomKnob:
    """One custom knob, with the values to try."""

    name: str
    """As in the sweep file: ``--flag``, ``file:dotted.key``, ``$NAME``, or a placeholder in the command."""
    values: tuple[CustomScalar, ...]
    flag: str | None = None
    """Argument for a placeholder's value, if the command does not contain the placeholder."""
    memory: Memory | None = None
    """Direction of memory along ``values``; None: unknown."""
    role: str | None = None
    """Corresponding built-in knob; None: implied by its name, or none."""
    when: tuple[tuple[str, tuple[CustomScalar, ...]], ...] = ()
    """Conditions: pairs of another custom knob and its values; all must hold."""

    def applies(self, chosen: Mapping[str, CustomScalar]) -> bool:
        """Whether it has an effect with these choices; a knob that does not apply meets no condition."""
        return all(name in chosen and _is_among(chosen[name], values) for name, values in self.when)


def chosen(knobs: Sequence[CustomKnob], values: Mapping[str, CustomScalar]) -> tuple[CustomChoice, ...]:
    """Return the canonical choices, by name, without knobs whose conditions do not hold.

    Args:
        knobs: each after the knobs in its conditions, see :func:`in_order`.
        values: values of some knobs; knobs without one inherit it from the command.
    """
    kept: dict[str, CustomScalar] = {}
    for knob in knobs:
        is_left = is_inside(knob.name) and values.get(knob.name) == AS_IS
        if knob.name in values and not is_left and knob.applies(kept):
            kept[knob.name] = values[knob.name]
    return tuple(CustomChoice(name=name, value=kept[name]) for name in sorted(kept))


def combinations(knobs: Sequence[CustomKnob]) -> Iterator[tuple[CustomChoice, ...]]:
    """Yield the canonical choices of every combination of values, with duplicates."""
    names = [knob.name for knob in knobs]
    for values in product(*(knob.values for knob in knobs)):
        yield chosen(knobs, dict(zip(names, values, strict=True)))


def is_inside(name: str) -> bool:
    """Whether a custom knob of this name is set inside the running program."""
    return name.startswith(f"{INSIDE}:")


def inside_name(name: str) -> str:
    """The name of a knob below ``space.inside``; of any other knob its name."""
    return name.removeprefix(f"{INSIDE}:")


def in_order(knobs: Sequence[CustomKnob]) -> tuple[CustomKnob, ...]:
    """Sort the knobs by name, each after the knobs in its conditions.

    Raises:
        ValueError: the conditions of a knob form a cycle; with its name.
    """
    by_name = {knob.name: knob for knob in sorted(knobs, key=lambda knob: knob.name)}
    done: dict[str, CustomKnob] = {}

    def visit(knob: CustomKnob, above: tuple[str, ...]) -> None:
        if knob.name in above:
            raise ValueError(knob.name)
        for name, _ in knob.when:
            if name in by_name and name not in done:
                visit(by_name[name], (*above, knob.name))
        done[knob.name] = knob

    for knob in by_name.values():
        visit(knob, ())
    return tuple(done.values())


def memory_ranks(knobs: Sequence[CustomKnob]) -> dict[str, dict[CustomChoice, int]]:
    """Return, for each knob with a known effect on memory, a number per choice that grows with memory."""
    signs = {"rises": 1, "falls": -1, "none": 0}
    return {
        knob.name: {
            CustomChoice(name=knob.name, value=value): signs[knob.memory] * place
            for place, value in enumerate(knob.values)
        }
        for knob in knobs
        if knob.memory is not None
    }


def roles_of(knobs: Sequence[CustomKnob]) -> dict[str, str]:
    """Return the corresponding built-in knob of each, if the sweep file defines it."""
    return {knob.name: knob.role for knob in knobs if knob.role is not None}


def _is_among(value: CustomScalar, values: Sequence[CustomScalar]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def custom_value_text(value: Any) -> str:
    """Format a value for names and tables: ``on`` and ``off`` for truth values, whole numbers without a point, on one
    line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return one_line(argument_text(value))


def argument_text(value: Any) -> str:
    """Format a value for a command, an environment variable or a placeholder."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return str(int(value))  # whole numbers without exponent, for argument parsers
    return str(value)


# Custom knobs in sweep files


def _scalar(value: Any) -> Any:
    if isinstance(value, bool | int | float) or (isinstance(value, str) and value):
        return value
    what = ", but the string is empty" if value == "" else received(value)
    raise fault(None, f"expected a string, number or boolean{what}", "To keep a knob's current value, remove the knob.")


def custom_knob_name(name: str) -> str:
    """Validate the name of a custom knob in a sweep file.

    Raises:
        PydanticCustomError: the name is invalid.
    """
    if _NAME.fullmatch(name) is None:
        remedy = "Use --flag, file:dotted.key, $NAME, or the name of a placeholder in the command."
        raise fault(None, f"{show(name)} is not an argument, a key or a variable", remedy)
    return name


_SCHEMA = {"type": ["string", "number", "boolean"]}
CustomValue = Annotated[Any, BeforeValidator(_scalar), WithJsonSchema(_SCHEMA)]
CustomKnobName = Annotated[str, AfterValidator(custom_knob_name)]
CustomValues = Annotated[tuple[CustomValue, ...], OneOrMany()]
CustomBaseline = Annotated[dict[CustomKnobName, CustomValue], Field(max_length=64)]
CustomFilter = Annotated[dict[CustomKnobName, CustomValues], Field(max_length=64)]


class CustomKnobSection(Section):
    """One custom knob, in full."""

    values: CustomValues = Field(description="The values to try. `true` adds a flag, and `false` omits it.")
    flag: str | None = Field(
        default=None, pattern=r"^--?[A-Za-z][\w.-]*$", description="The argument that the placeholder stands for."
    )
    memory: Memory | None = Field(
        default=None,
        description="How device memory changes from one value to the next: rises, falls, or none for no change. "
        "Lets an out-of-memory failure rule out other values. Null: unknown.",
    )
    role: Role | None = Field(
        default=None,
        description="Built-in knob with the same effect, if not clear from the name; `explain` then suggests "
        "this knob in its place.",
    )
    when: CustomFilter = Field(
        default={}, description="Other custom knobs, with the values at which this one has an effect."
    )


class _CustomKnobForm:
    """Annotation of :class:`CustomKnobSection`: a value or list of values is short for a knob with only values."""

    @staticmethod
    def widen(value: Any) -> Any:
        return value if isinstance(value, Mapping | CustomKnobSection) else {"values": value}


CustomKnobValue = Annotated[CustomKnobSection, BeforeValidator(_CustomKnobForm.widen, json_schema_input_type=Any)]
CustomSpace = Annotated[dict[CustomKnobName, CustomKnobValue], Field(max_length=64)]


def custom_knobs(space: Mapping[str, CustomKnobSection]) -> tuple[CustomKnob, ...]:
    """Return the knobs of ``space.own``, in an order in which conditions can be resolved.

    Raises:
        PydanticCustomError: a condition names an unknown knob or value, or the conditions form a cycle.
    """
    for name, section in space.items():
        for other, values in section.when.items():
            known = space[other].values if other in space and other != name else ()
            if not known:
                message = f"{show(other)} is not another knob of space.own"
                others = ", ".join(one for one in space if one != name) or "none"
                raise fault(f"own.{name}.when", message, f"Defined knobs: {others}.")
            for value in values:
                if not _is_among(value, known):
                    message = f"{other} cannot have the value {custom_value_text(value)}"
                    raise fault(f"own.{name}.when.{other}", message, f"Possible values: {_listed(known)}.")
    knobs = [
        CustomKnob(
            name=name,
            values=section.values,
            flag=section.flag,
            memory=section.memory,
            role=section.role,
            when=tuple(sorted(section.when.items())),
        )
        for name, section in space.items()
    ]
    try:
        return in_order(knobs)
    except ValueError as error:
        raise fault(f"own.{error}.when", "the conditions form a cycle", "Remove one of them.") from None


def _listed(values: Sequence[CustomScalar]) -> str:
    return ", ".join(map(custom_value_text, values))


# Signs: the elements of short names, see ``notation.py``

PLACEHOLDER = r"\{([^}]+)\}"
"""Placeholder for a value in the text of a sign."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One element of the short notation; ``{N}`` and similar in its texts are placeholders for values."""

    text: str
    """Text in names: ``pp{N}``."""
    meaning: str
    shows: Callable[[Candidate], Any]
    """Returns the sign's values for a candidate: the value of its placeholders, or a list of values by placeholder, one
    per occurrence; True without placeholders; None or False if the sign is not in the name."""
    is_suffix: bool = False
    """Whether it follows another sign without a space."""
    after: str = ""
    """Knob whose signs it follows in names, if not its own."""
    knobs: tuple[str, ...] = ()
    """Names of the knobs that it describes; in a row, additional to the row's own."""

    @property
    def placeholders(self) -> list[str]:
        return re.findall(PLACEHOLDER, self.text)

    @property
    def general(self) -> str:
        """The sign with letters for its values: ``ppN``; a suffix follows three dots."""
        text = _with_letters(self.text)
        return f"…{text}" if self.is_suffix else text

    @property
    def general_meaning(self) -> str:
        """The meaning with letters for its values, without a redundant value at its end."""
        return _with_letters(re.sub(rf": {PLACEHOLDER}$", "", self.meaning))


def _with_letters(text: str) -> str:
    return text.replace("{", "").replace("}", "")


_suffix = functools.partial(Sign, is_suffix=True)


# The table of knobs

Fields = Mapping[str, Any]
"""Fields of one part of a candidate; fields of preceding rows are already canonical."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A settable property of a candidate."""

    name: str
    type: Any
    """Type of its values in a sweep file."""
    default: Any
    """Value, as in a sweep file, for a baseline without the knob."""
    part: str
    """Field of :class:`Candidate` that contains it."""
    field: str
    """Field of that part; empty if the knob is the entire part."""
    read: Callable[[Candidate], Any]
    """Returns its value from a candidate."""
    description: str
    """Text for the JSON Schema and ``docs/sweep-file.md``."""
    signs: tuple[Sign, ...]
    """Its signs in short names."""
    canonical: Callable[[Fields, Model | None], Any] | None = None
    """Returns its value in canonical form: neutral if it has no effect, so that equivalent spellings are one candidate.
    None: unchanged. Only kernels depend on the model."""
    resolved_type: Any = None
    """Type in ``forbid`` and ``require`` patterns, if different."""
    single_type: Any = None
    """Type in ``baseline``, if different: a list there cannot be a list of choices."""
    resolve: Callable[[Any, Candidate, int], Any] | None = None
    """Resolves a value for a candidate of a model with that many layers, if its meaning depends on the layout."""


def _knob(path: str, value_type: Any, description: str, *signs: Sign, **options: Any) -> Knob:
    """Define the row of a candidate's field at ``path``, with its name and default unless overridden by ``options``."""
    part, _, field = path.partition(".")
    name = options.pop("name", field or part)
    read = operator.attrgetter(path)
    return Knob(
        name=name,
        type=value_type,
        default=options.pop("default", read(Candidate())),
        part=part,
        field=field,
        read=read,
        description=description,
        signs=tuple(dataclasses.replace(sign, knobs=(name, *sign.knobs)) for sign in signs),
        **options,
    )


def _resolve_stage_layers(value: Any, candidate: Candidate, num_layers: int) -> Any:
    layout = candidate.layout
    return resolve_stage_layers(
        value,
        num_layers=num_layers,
        pp=layout.pp,
        num_virtual_stages=layout.num_virtual_stages,
        schedule=layout.schedule,
    )


def _resolve_recompute(value: Any, candidate: Candidate, num_layers: int) -> Any:
    return resolve_recompute(value, layers_of(candidate.layout, num_layers))


def _num_chunks(fields: Fields, _: Model | None) -> int:
    if fields["pp"] == 1:
        return 1
    return 2 if fields["schedule"] == "zbv" else int(fields["num_virtual_stages"])


def _replication_engine(fields: Fields, _: Model | None) -> str:
    """Return the replication engine; with sharding, there is no choice, because its engine also replicates."""
    has_choice = fields["dp_replicate"] * fields["cp"] > 1 and fields["zero_stage"] == 0
    return str(fields["replicate_with"]) if has_choice else "ddp"


def _attends(model: Model | None) -> bool:
    """Whether the model has attention, or, in a user's program, may have it."""
    assert model is not None, "kernels are those of a model"
    return isinstance(model, ScriptModel) or decoder_of(model) is not None


def _is_imported(model: Model | None) -> bool:
    return isinstance(model, UserModel)


def _convolves(model: Model | None) -> bool:
    is_known = isinstance(model, UserModel) and model.facts.has_convolutions
    return is_known or isinstance(model, ScriptModel | ResNetModel)


# Values of signs

DEFAULT_PREFETCH_FACTOR = 2


def _unless(value: Any, neutral: Any) -> Any:
    return None if value == neutral else value


def _schedule(name: Schedule, meaning: str) -> Sign:
    return Sign(name, f"schedule: {meaning}", lambda c: c.layout.pp > 1 and c.layout.schedule == name)


def _cp_method(text: str, meaning: str, method: str) -> Sign:
    return _suffix(text, meaning, lambda c: c.layout.cp > 1 and c.layout.cp_method == method)


def _canonical_cp_method(fields: Fields, _: Model | None) -> str:
    """Return the method; a hybrid of one group, or of groups of one rank, is one of the methods that it combines."""
    cp, method, degree = fields["cp"], fields["cp_method"], fields["ulysses_degree"]
    if cp == 1:
        return "all_gather"
    return {1: "ring", cp: "ulysses"}.get(degree, "hybrid") if method == "hybrid" else str(method)


def _chunks(candidate: Candidate) -> Any:
    layout = candidate.layout
    has_choice = layout.pp > 1 and layout.schedule != "zbv"
    return _unless(layout.num_virtual_stages, 1) if has_choice else None


def _replicas(candidate: Candidate) -> int | None:
    layout = candidate.layout
    is_shown = layout.dp_replicate > 1 or layout.world_size == 1 or layout.replicate_with == "fsdp2"
    return layout.dp_replicate if is_shown else None


def _shards(candidate: Candidate) -> list[dict[str, int]]:
    layout = candidate.layout
    return [{"S": layout.zero_stage, "N": layout.dp_shard}] if layout.dp_shard > 1 else []


def _num_layers(counts: Counts, candidate: Candidate) -> str | None:
    return count_text(counts, candidate.layout) if counts else None


def _selected(candidate: Candidate) -> list[dict[str, str | None]]:
    return [
        {"PATTERN": pattern_text(part.pattern).removeprefix("~"), "N": _num_layers(part.num_layers, candidate)}
        for part in candidate.recompute.selective
        if part.num_layers
    ]


def _precision(text: str, meaning: str, level: str) -> Sign:
    def shows(candidate: Candidate) -> str | None:
        return DTYPE_SHORT[candidate.precision.dtype] if candidate.precision.level == level else None

    return Sign(text, meaning, shows)


def _of_precision(write: Callable[[Precision], str]) -> Callable[[Candidate], str | None]:
    return lambda c: write(c.precision).removeprefix("~") or None if c.precision.level != "O0" else None


def _offloaded(candidate: Candidate) -> str | None:
    parts = {"act": candidate.offload.activations, "opt": candidate.offload.optimizer}
    return "+".join(part for part, is_on in parts.items() if is_on) or None


def _compiled(field: str) -> Callable[[Candidate], str | None]:
    neutral = getattr(Kernels(), field)
    return lambda c: _unless(getattr(c.kernels, field), neutral) if c.kernels.compile != "off" else None


KNOBS: tuple[Knob, ...] = (
    _knob(
        "layout.pp",
        Degree,
        "The pipeline-parallel degree: the number of stages that the layers are divided into.",
        Sign("pp{N}", "pipeline with {N} stages", lambda c: _unless(c.layout.pp, 1)),
    ),
    _knob(
        "layout.schedule",
        Schedule,
        "The order of forward and backward passes in a pipeline. `zbv` is a zero-bubble schedule with two "
        "chunks per rank in a V shape.",
        _schedule("gpipe", "all forward, then all backward"),
        _schedule("1f1b", "alternating forward and backward"),
        _schedule("interleaved", "interleaved chunks of layers"),
        _schedule("zbv", "zero bubble, V-shaped"),
        canonical=lambda f, _: f["schedule"] if f["pp"] > 1 else "1f1b",
    ),
    _knob(
        "layout.num_virtual_stages",
        Degree,
        "The number of layer chunks per pipeline rank: at least 2 for `interleaved`, any number for "
        "`gpipe`, and 1 for `1f1b`. Always 2 with `zbv`, and 1 if `pp` is 1.",
        _suffix("v{N}", "chunks of layers per stage: {N}", _chunks),
        canonical=_num_chunks,
    ),
    _knob(
        "layout.stage_layers",
        StageLayersValue,
        "The number of layers per stage: `even` (the first stages in model order get the remainder), "
        "`{offset: [-2, 1, 1, 0]}` or `{counts: [10, 11, 11, 8]}`.",
        Sign("L{A,B}", "layers per stage: {A,B}", lambda c: _unless(stage_layers_text(c.layout), "even")),
        default="even",
        resolve=_resolve_stage_layers,
        canonical=lambda f, _: f["stage_layers"] if f["pp"] > 1 else (),
    ),
    _knob(
        "layout.dp_replicate",
        Degree,
        "The number of data-parallel replicas (the outer degree). Every replica holds all states.",
        Sign("dp{N}", "data-parallel replicas: {N}", _replicas),
    ),
    _knob(
        "layout.dp_shard",
        Degree,
        "The number of data-parallel ranks that share one copy of the states sharded by `zero_stage`.",
    ),
    _knob(
        "layout.zero_stage",
        Annotated[int, Field(ge=0, le=3)],
        "Which states are sharded over the `dp_shard` ranks: 1 for optimiser states, 2 to add gradients, 3 "
        "to add parameters as well. Always 0 if `dp_shard` is 1.",
        Sign("z{S}x{N}", "ZeRO stage {S} over {N} devices", _shards, knobs=("dp_shard",)),
        canonical=lambda f, _: f["zero_stage"] if f["dp_shard"] > 1 else 0,
    ),
    _knob(
        "layout.gradient_reduction",
        Literal["each", "last"],
        "When ZeRO stages 2 and 3 reduce gradients during accumulation: after `each` micro-batch, or only "
        "after the `last` one, which keeps gradients unsharded until then. Always `each` if `zero_stage` is "
        "below 2.",
        _suffix(
            "g",
            "gradients reduced after the last micro-batch only",
            lambda c: c.layout.dp_shard > 1 and c.layout.gradient_reduction == "last",
        ),
        canonical=lambda f, _: f["gradient_reduction"] if f["zero_stage"] >= 2 else "each",
    ),
    _knob(
        "layout.replicate_with",
        Literal["auto", "ddp", "fsdp2"],
        "The engine for replication without sharding. `auto` uses `ddp` if `tp` is 1, stages have one chunk "
        "and `shard_embedding` is false; otherwise, it uses `fsdp2`. ZeRO-1 always uses its own buckets; "
        "ZeRO-2 and ZeRO-3 use FSDP2.",
        _suffix(
            "f",
            "replicated by FSDP2 instead of DDP",
            lambda c: c.layout.replicate_with == "fsdp2",
            after="dp_replicate",
        ),
        default="auto",
        resolved_type=Literal["ddp", "fsdp2"],
        canonical=_replication_engine,
    ),
    _knob(
        "layout.shard_embedding",
        bool,
        "Whether to shard the embedding and the head over all data-parallel ranks, independently of the "
        "layers. Always false without data-parallel ranks.",
        Sign("emb", "embedding and head sharded over all data-parallel devices", lambda c: c.layout.shard_embedding),
        canonical=lambda f, _: f["shard_embedding"] and f["dp_replicate"] * f["dp_shard"] * f["cp"] > 1,
    ),
    _knob(
        "layout.cp",
        Degree,
        "The context-parallel degree: the number of parts that every sequence is split into.",
        Sign("cp{N}", "every sequence over {N} devices", lambda c: _unless(c.layout.cp, 1)),
    ),
    _knob(
        "layout.cp_method",
        CPMethod,
        "How attention accesses the full sequence: `all_gather` gathers keys and values, `ulysses` "
        "exchanges the sequence dimension for heads, `ring` passes keys and values around, and `hybrid` "
        "exchanges heads among `ulysses_degree` neighbouring ranks and passes keys and values between these groups.",
        _cp_method("u", "by exchanging heads (Ulysses)", "ulysses"),
        _cp_method("r", "by passing keys and values around (ring)", "ring"),
        canonical=_canonical_cp_method,
    ),
    _knob(
        "layout.ulysses_degree",
        Degree | Literal["auto"],
        "The number of ranks that exchange heads with `cp_method: hybrid`, a divisor of `cp`. `auto` is the largest "
        "one for which `tp` times it divides the numbers of heads and key-value heads and is at most "
        "`cluster.devices_per_node`, if that is set. `hybrid` is `ring` with 1 and `ulysses` with `cp`.",
        _suffix(
            "h{N}",
            "by exchanging heads among {N} devices (Ulysses) and passing keys and values between groups (ring)",
            lambda c: c.layout.ulysses_degree if c.layout.cp_method == "hybrid" else None,
            knobs=("cp_method",),
        ),
        default="auto",
        resolved_type=Degree,
        canonical=lambda f, _: f["ulysses_degree"] if f["cp_method"] == "hybrid" else 1,
    ),
    _knob(
        "layout.tp",
        Degree,
        "The tensor-parallel degree. Its ranks are always on the same node.",
        Sign("tp{N}", "every layer over {N} devices", lambda c: _unless(c.layout.tp, 1)),
    ),
    _knob(
        "layout.sequence_parallel",
        bool,
        "Whether to shard the normalisation regions along the sequence over the `tp` ranks. Always false if `tp` is 1.",
        _suffix("sp", "with sequence parallelism", lambda c: c.layout.tp > 1 and c.layout.sequence_parallel),
        canonical=lambda f, _: f["sequence_parallel"] and f["tp"] > 1,
    ),
    _knob(
        "layout.tp_engine",
        Literal["auto", "dtensor", "local"],
        "The tensor-parallel engine: `dtensor` is PyTorch's DTensor, and `local` uses plain tensors with "
        "explicit collectives. `auto` uses `local` if `dtensor` does not support the configuration "
        "(`num_copies: 2`, DDP or ZeRO-1, recompute of communication, experts, latent attention); otherwise, and for "
        "imported modules, it uses `dtensor`.",
        _suffix(
            "l", "by the local engine instead of DTensor", lambda c: c.layout.tp > 1 and c.layout.tp_engine == "local"
        ),
        default="auto",
        resolved_type=Literal["dtensor", "local"],
        canonical=lambda f, _: f["tp_engine"] if f["tp"] > 1 else "dtensor",
    ),
    _knob(
        "layout.num_copies",
        Literal[1, 2],
        "With 2, each micro-batch is split in half, and the collectives of one half overlap with the "
        "computation of the other. Always 1 if `tp` is 1.",
        _suffix(
            "c{N}",
            "micro-batches run as {N} overlapping copies",
            lambda c: _unless(c.layout.num_copies, 1) if c.layout.tp > 1 else None,
        ),
        canonical=lambda f, _: f["num_copies"] if f["tp"] > 1 else 1,
    ),
    _knob(
        "layout.ep",
        Degree,
        "The expert-parallel degree: the number of parts that the experts of every layer are split into. It "
        "uses ranks that `dp_shard` (without ZeRO, `dp_replicate`), `cp` and `tp` already count. Requires a "
        "model with experts.",
        Sign("ep{N}", "experts of every layer over {N} devices", lambda c: _unless(c.layout.ep, 1)),
    ),
    _knob(
        "micro_batch_size",
        Degree,
        "The number of samples (sequences) in a micro-batch of a data-parallel rank.",
        Sign("mbs{N}", "micro-batch size {N}", lambda c: c.micro_batch_size),
    ),
    _knob(
        "recompute",
        RecomputeValue,
        "Which layers recompute their activations: `none`, `full` (every layer keeps only its input), or a "
        "mapping with the number of layers per stage, such as `{full: [4, 0]}`. In `baseline`, a bare list "
        "is also allowed.",
        Sign("full{N}", "layers recomputed in full: {N}", lambda c: _num_layers(c.recompute.full, c)),
        Sign("~{PATTERN}:{N}", "layers that recompute {PATTERN}: {N}", _selected),
        Sign(
            "comm:{N}",
            "layers that communicate again in the backward pass: {N}",
            lambda c: _num_layers(c.recompute.communication, c),
        ),
        default="none",
        single_type=BaselineRecompute,
        resolve=_resolve_recompute,
    ),
    _knob(
        "precision",
        PrecisionValue,
        "The precision level: `O0` (fp32), `O1` (autocast), `O2` (16-bit parameters with fp32 master "
        "weights), or `O1-fp8` or `O2-fp8`, which also run the matmuls of the layers in 8-bit floats. All "
        "but `O0` use bfloat16.",
        _precision("O0", "fp32", "O0"),
        _precision("O1-{TYPE}", "autocast to {TYPE}", "O1"),
        _precision("O1-fp8", "autocast to bf16, with 8-bit float matmuls in the layers", "O1-fp8"),
        _precision("O2-{TYPE}", "parameters in {TYPE}, fp32 masters", "O2"),
        _precision("O2-fp8", "parameters in bf16, fp32 masters, with 8-bit float matmuls in the layers", "O2-fp8"),
        _suffix("-gather", "weights gathered in 8-bit floats", lambda c: c.precision.fp8_gather),
        _suffix(
            "{+A-B}",
            "operators forced to 16 bits (+), operators or modules in fp32 (-): {+A-B}",
            _of_precision(lists_text),
        ),
        _suffix("~{ID}", "custom loss scale with the id {ID}", _of_precision(loss_scale_text)),
        default="O0",
    ),
    _knob(
        "offload.activations",
        bool,
        "Whether to keep activations for the backward pass in host memory.",
        Sign("off-{WHAT}", "in host memory: {WHAT}", _offloaded, knobs=("offload_optimizer",)),
        name="offload_activations",
    ),
    _knob(
        "offload.optimizer",
        bool,
        "Whether to keep optimiser states and master weights in host memory and run the optimiser step there.",
        name="offload_optimizer",
    ),
    _knob(
        "loader.tuning",
        DataloaderValue,
        "How to choose the data loader settings. `manual` uses `num_workers` and `prefetch_factor`. `auto` "
        "finds both by hill climbing before training; the two knobs are then 0.",
        Sign(
            "w-{HOW}",
            "number of data loader workers found before training: {HOW}",
            lambda c: None if c.loader.tuning is None else plain(c.loader.tuning),
            after="prefetch_factor",
        ),
        name="dataloader",
        default="manual",
    ),
    _knob(
        "loader.num_workers",
        Annotated[int, Field(ge=0, le=1024)],
        "The number of data loader workers per rank. With 0, the training process loads the data.",
        Sign("w{N}", "data loader workers per device: {N}", lambda c: c.loader.num_workers or None),
        canonical=lambda f, _: f["num_workers"] if f["tuning"] is None else 0,
    ),
    _knob(
        "loader.prefetch_factor",
        Annotated[int, Field(ge=0, le=1024)],
        "The number of batches that each data loader worker prefetches. 0 stands for the default of 2. "
        "Always 0 without workers.",
        _suffix(
            "p{N}",
            "batches prefetched by each: {N}",
            lambda c: _unless(c.loader.prefetch_factor, DEFAULT_PREFETCH_FACTOR) if c.loader.num_workers else None,
        ),
        default=DEFAULT_PREFETCH_FACTOR,
        canonical=lambda f, _: (f["prefetch_factor"] or DEFAULT_PREFETCH_FACTOR) if f["num_workers"] else 0,
    ),
    _knob(
        "loader.pin_memory",
        bool,
        "Whether to use page-locked host memory, for asynchronous copies to a GPU.",
        Sign("pin", "pinned host memory", lambda c: c.loader.pin_memory),
    ),
    _knob(
        "loader.persistent_workers",
        bool,
        "Whether to keep data loader workers from one epoch to the next. Always false without workers.",
        Sign("keep", "data loader workers kept between epochs", lambda c: c.loader.persistent_workers),
        canonical=lambda f, _: f["persistent_workers"] and (f["num_workers"] > 0 or f["tuning"] is not None),
    ),
    _knob(
        "loader.full_batch",
        bool,
        "Whether every rank reads the full global batch and keeps its own rows, instead of reading only those.",
        Sign("fullbatch", "every device reads the full batch", lambda c: c.loader.full_batch),
    ),
    _knob(
        "loader.batching",
        Literal["padding", "packing", "buckets"],
        "How samples of varying length become micro-batches. `padding` pads them to the longest; `packing` "
        "packs several into each row of `seq_length`; `buckets` sorts the samples of a step by length and "
        "pads them to one of 8 lengths.",
        Sign("packed", "several samples packed per row", lambda c: c.loader.batching == "packing"),
        Sign("buckets", "samples batched by length", lambda c: c.loader.batching == "buckets"),
    ),
    _knob(
        "kernels.compile",
        CompileValue,
        "What to compile: `off` (nothing), `block` (every repeated layer) or `model`. A bare `off` and "
        '`"off"` mean the same here.',
        Sign("compile", "every layer compiled", lambda c: c.kernels.compile == "block"),
        Sign("compile-model", "the model compiled as one", lambda c: c.kernels.compile == "model"),
        _suffix("-{NAME}", "backend of torch.compile: {NAME}", _compiled("backend"), after="compile_mode"),
    ),
    _knob(
        "kernels.compile_mode",
        Literal["default", "reduce-overhead", "max-autotune"],
        "The mode of `torch.compile`. Always `default` if `compile` is `off`.",
        _suffix("-{MODE}", "mode of torch.compile: {MODE}", _compiled("compile_mode")),
        canonical=lambda f, _: f["compile_mode"] if f["compile"] != "off" else "default",
    ),
    _knob(
        "kernels.dynamic",
        bool,
        "Whether to compile one graph for inputs of all lengths instead of one per length. Always false if "
        "`compile` is `off`.",
        Sign("dynamic", "one graph for all lengths", lambda c: c.kernels.dynamic),
        canonical=lambda f, _: f["dynamic"] and f["compile"] != "off",
    ),
    _knob(
        "kernels.attention",
        Literal["auto", "flash", "efficient", "cudnn", "math"],
        "The kernel for scaled dot-product attention. Always `auto` for models without attention.",
        Sign("attn-{NAME}", "attention kernel {NAME}", lambda c: _unless(c.kernels.attention, "auto")),
        canonical=lambda f, model: f["attention"] if _attends(model) else "auto",
    ),
    _knob(
        "kernels.fused",
        Literal["auto", "torch", "liger"],
        "The library of fused operators in place of those of an imported module. `torch` replaces norms, `liger` "
        "norms, gates and rotary positions, for decoders of transformers on CUDA. Always `auto` for built-in models.",
        Sign("fused-{NAME}", "fused operators of {NAME}", lambda c: _unless(c.kernels.fused, "auto")),
        canonical=lambda f, model: f["fused"] if _is_imported(model) else "auto",
    ),
    _knob(
        "kernels.matmul_precision",
        Literal["highest", "high", "medium"],
        "The precision of fp32 matrix products. `high` allows TF32, and `medium` also bfloat16.",
        Sign(
            "matmul-{NAME}",
            "precision of fp32 matrix products: {NAME}",
            lambda c: _unless(c.kernels.matmul_precision, "highest"),
        ),
    ),
    _knob(
        "kernels.cudnn_tuning_range",
        CudnnValue,
        "In which steps cuDNN benchmarks its convolution algorithms: `off`, `on`, or a range of steps such "
        "as `{first: 1, last: 10}`, which is the same as `on`. Always `off` for models without "
        "convolutions.",
        Sign(
            "cudnn{A-B}",
            "cuDNN benchmarks its algorithms in steps {A-B}",
            lambda c: _unless(steps_text(c.kernels.cudnn_tuning_range), "off"),
        ),
        name="cudnn_benchmark",
        default="off",
        canonical=lambda f, model: f["cudnn_tuning_range"] if _convolves(model) else (),
    ),
    _knob(
        "kernels.memory_format",
        Literal["nchw", "nhwc", "auto"],
        "The memory format for convolutions. `auto` chooses by number format, then times both. Always "
        "`nchw` for models without convolutions.",
        Sign("nhwc", "channels last in memory", lambda c: c.kernels.memory_format == "nhwc"),
        Sign(
            "format-auto",
            "memory format by number format",
            lambda c: c.kernels.memory_format == "auto",
            after="loss_chunks",
        ),
        canonical=lambda f, model: f["memory_format"] if _convolves(model) else "nchw",
    ),
    _knob(
        "kernels.loss_chunks",
        Annotated[int, Field(ge=1, le=2**20)],
        "The number of parts in which the logits and the loss of a micro-batch are computed, one after the other.",
        Sign("loss{N}", "head and loss in {N} parts", lambda c: _unless(c.kernels.loss_chunks, 1)),
    ),
)
KNOB_NAMES = tuple(knob.name for knob in KNOBS)
