"""All knobs of the search, ours and the user's own, and the canonical form: knob values to candidates and back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from orchestrator.space.file_types import (
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
    fault,
    layers_of,
    resolve_recompute,
    resolve_stage_layers,
    show,
)
from orchestrator.text import one_line
from trials.legality import holds_plain
from trials.spec import (
    Candidate,
    Kernels,
    Layout,
    Loader,
    LoaderTuning,
    LossScale,
    Model,
    Offload,
    OwnChoice,
    OwnModel,
    Precision,
    ResNetModel,
    Schedule,
    ScriptModel,
    decoder_of,
)

# The user's own knobs: what they are, which of their combinations differ, and how they stand in a sweep file
#
# An own knob is an argument (``--flag``), a key of a configuration file (``file:dotted.key``), an environment variable
# (``$NAME``), a placeholder of the command (``name``), or whatever else the recipe of the workload knows by its name.

OwnScalar = str | int | float | bool
Memory = Literal["rises", "falls", "none"]
INHERITED = "inherited"
"""Shown value of an own knob that a candidate leaves as the command says."""
_NAME = re.compile(r"--?[A-Za-z][\w.+/-]*|\$[A-Za-z_]\w*|[A-Za-z_]\w*:[\w.+/-]+|[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnKnob:
    """One of the user's own knobs, with the values to try."""

    name: str
    """As in the sweep file: ``--flag``, ``file:dotted.key``, ``$NAME``, or a placeholder of the command."""
    values: tuple[OwnScalar, ...]
    flag: str | None = None
    """The argument that a placeholder stands for, where the command does not have the placeholder."""
    memory: Memory | None = None
    """How the memory needed changes along ``values``; None: nobody knows."""
    when: tuple[tuple[str, tuple[OwnScalar, ...]], ...] = ()
    """Pairs of another own knob and its values with which this one applies; all have to hold."""

    def applies(self, chosen: Mapping[str, OwnScalar]) -> bool:
        """Whether it has an effect beside these choices; a knob that is not applied itself meets no condition."""
        return all(name in chosen and _is_among(chosen[name], values) for name, values in self.when)


def chosen(knobs: Sequence[OwnKnob], values: Mapping[str, OwnScalar]) -> tuple[OwnChoice, ...]:
    """The canonical choices, by name: knobs whose conditions do not hold are left out.

    Args:
        knobs: every knob after those that its conditions name, see :func:`in_order`.
        values: of some knobs; those without a value are inherited from the command.
    """
    kept: dict[str, OwnScalar] = {}
    for knob in knobs:
        if knob.name in values and knob.applies(kept):
            kept[knob.name] = values[knob.name]
    return tuple(OwnChoice(name=name, value=kept[name]) for name in sorted(kept))


def combinations(knobs: Sequence[OwnKnob]) -> Iterator[tuple[OwnChoice, ...]]:
    """The canonical choices of every combination of values, some of them several times."""
    names = [knob.name for knob in knobs]
    for values in product(*(knob.values for knob in knobs)):
        yield chosen(knobs, dict(zip(names, values, strict=True)))


def in_order(knobs: Sequence[OwnKnob]) -> tuple[OwnKnob, ...]:
    """The knobs by name, each after those that its conditions name.

    Raises:
        ValueError: with the name of a knob whose conditions lead back to itself.
    """
    by_name = {knob.name: knob for knob in sorted(knobs, key=lambda knob: knob.name)}
    done: dict[str, OwnKnob] = {}

    def visit(knob: OwnKnob, above: tuple[str, ...]) -> None:
        if knob.name in above:
            raise ValueError(knob.name)
        for name, _ in knob.when:
            if name in by_name and name not in done:
                visit(by_name[name], (*above, knob.name))
        done[knob.name] = knob

    for knob in by_name.values():
        visit(knob, ())
    return tuple(done.values())


def memory_ranks(knobs: Sequence[OwnKnob]) -> dict[str, dict[OwnChoice, int]]:
    """By the name of every knob whose effect on memory is known: a number per choice that rises with it."""
    signs = {"rises": 1, "falls": -1, "none": 0}
    return {
        knob.name: {
            OwnChoice(name=knob.name, value=value): signs[knob.memory] * place
            for place, value in enumerate(knob.values)
        }
        for knob in knobs
        if knob.memory is not None
    }


def _is_among(value: OwnScalar, values: Sequence[OwnScalar]) -> bool:
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in values)


def own_text(value: Any) -> str:
    """A value in names and tables: ``on`` and ``off`` for truth values, whole numbers without a point, on one line."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return one_line(argument_text(value))


def argument_text(value: Any) -> str:
    """A value as a word of a command, an environment variable or in the place of a placeholder."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return str(int(value))  # 5e7 is a whole number to whoever reads arguments
    return str(value)


# Own knobs in sweep files


def _scalar(value: Any) -> Any:
    if isinstance(value, bool | int | float) or (isinstance(value, str) and value):
        return value
    what = "nothing" if value in (None, "") else show(value)
    raise fault(None, f"expected text, a number, true or false, got {what}", "Leave a knob out to keep what there is.")


def own_name(name: str) -> str:
    """The name of an own knob as it stands in a sweep file.

    Raises:
        PydanticCustomError: it is none.
    """
    if _NAME.fullmatch(name) is None:
        remedy = "Write --flag, file:dotted.key, $NAME, or the name of a placeholder of the command."
        raise fault(None, f"{show(name)} names no argument, key or variable", remedy)
    return name


_SCHEMA = {"type": ["string", "number", "boolean"]}
OwnValue = Annotated[Any, BeforeValidator(_scalar), WithJsonSchema(_SCHEMA)]
OwnName = Annotated[str, AfterValidator(own_name)]
OwnValues = Annotated[tuple[OwnValue, ...], OneOrMany()]
OwnGiven = Annotated[dict[OwnName, OwnValue], Field(max_length=64)]
OwnAccepted = Annotated[dict[OwnName, OwnValues], Field(max_length=64)]


class OwnKnobSection(Section):
    """One of the user's own knobs, in full."""

    values: OwnValues = Field(description="Values to try; true and false put an argument in or leave it out.")
    flag: str | None = Field(
        default=None, pattern=r"^--?[A-Za-z][\w.-]*$", description="The argument that a placeholder stands for."
    )
    memory: Memory | None = Field(
        default=None,
        description="Whether each next value needs more device memory (rises), less (falls) or as much (none), at "
        "most; then running out of memory with one rules out others. Null: nobody knows.",
    )
    when: OwnAccepted = Field(
        default={}, description="Other own knobs with the values that this one needs to have an effect."
    )


class _OwnForm:
    """Annotation of :class:`OwnKnobSection`: a value or a list of values stands for one that has nothing else."""

    @staticmethod
    def widen(value: Any) -> Any:
        return value if isinstance(value, Mapping | OwnKnobSection) else {"values": value}


OwnKnobValue = Annotated[OwnKnobSection, BeforeValidator(_OwnForm.widen, json_schema_input_type=Any)]
OwnSpace = Annotated[dict[OwnName, OwnKnobValue], Field(max_length=64)]


def own_knobs(space: Mapping[str, OwnKnobSection]) -> tuple[OwnKnob, ...]:
    """The knobs of ``space.own``, in an order in which conditions can be settled.

    Raises:
        PydanticCustomError: a condition that names no knob or value of these, or leads back to itself.
    """
    for name, section in space.items():
        for other, values in section.when.items():
            known = space[other].values if other in space and other != name else ()
            if not known:
                message = f"{show(other)} is no other knob of space.own"
                others = ", ".join(one for one in space if one != name) or "none"
                raise fault(f"own.{name}.when", message, f"There are {others}.")
            for value in values:
                if not _is_among(value, known):
                    message = f"{other} is never {own_text(value)}"
                    raise fault(f"own.{name}.when.{other}", message, f"Its values are {_listed(known)}.")
    knobs = [
        OwnKnob(
            name=name,
            values=section.values,
            flag=section.flag,
            memory=section.memory,
            when=tuple(sorted(section.when.items())),
        )
        for name, section in space.items()
    ]
    try:
        return in_order(knobs)
    except ValueError as error:
        raise fault(f"own.{error}.when", "leads back to itself", "Let conditions name knobs without it.") from None


def _listed(values: Sequence[OwnScalar]) -> str:
    return ", ".join(map(own_text, values))


# The type :class:`Knob`: one thing about a candidate that can be set


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One thing about a candidate that can be set."""

    name: str
    type: Any
    """Type of its values as they stand in a sweep file."""
    default: Any
    """Value, as it would stand in a file, for a baseline that leaves the knob out."""
    part: str
    """Field of Candidate that it belongs to."""
    read: Callable[[Candidate], Any]
    """Gets its value back from a candidate."""
    description: str
    """Text for the JSON Schema and ``docs/sweep-file.md``."""
    resolved_type: Any = None
    """Type in ``forbid`` and ``require`` patterns, where it differs."""
    single_type: Any = None
    """Type in ``baseline``, where it differs: a list there cannot be a list of choices."""
    resolve: Callable[[Any, Candidate, int], Any] | None = None
    """Resolves a value for a candidate of a model with that many layers, where its meaning depends on the layout."""


# The knobs of the parallel layout, with their types, defaults and descriptions


def _resolve_stage_layers(value: Any, candidate: Candidate, num_layers: int) -> Any:
    layout = candidate.layout
    return resolve_stage_layers(
        value,
        num_layers=num_layers,
        pp=layout.pp,
        num_virtual_stages=layout.num_virtual_stages,
        schedule=layout.schedule,
    )


def _knob(name: str, value_type: Any, description: str, **options: Any) -> Knob:
    default = options.pop("default", getattr(Layout(), name))
    return Knob(
        name=name,
        type=value_type,
        default=default,
        part="layout",
        read=lambda candidate: getattr(candidate.layout, name),
        description=description,
        **options,
    )


LAYOUT_KNOBS: tuple[Knob, ...] = (
    _knob("pp", Degree, "Pipeline-parallel degree: stages the layers are spread over."),
    _knob(
        "schedule",
        Schedule,
        "Order of forward and backward passes in a pipeline; zbv is zero bubble with two V-shaped chunks per rank.",
    ),
    _knob(
        "num_virtual_stages",
        Degree,
        "Chunks of layers per pipeline rank: at least 2 for interleaved, any number for gpipe, 1 for 1f1b. "
        "Becomes 2 with zbv and 1 where pp is 1.",
    ),
    _knob(
        "stage_layers",
        StageLayersValue,
        "Layers per stage: even (what is left over goes to the first stages in model order), {offset: [-2, 1, 1, 0]} "
        "or {counts: [10, 11, 11, 8]}; one list per chunk where there are several.",
        default="even",
        resolve=_resolve_stage_layers,
    ),
    _knob("dp_replicate", Degree, "Data-parallel replicas (outer degree): every replica holds all states."),
    _knob("dp_shard", Degree, "Data-parallel ranks that share one copy of what `zero_stage` names."),
    _knob(
        "zero_stage",
        Annotated[int, Field(ge=0, le=3)],
        "What `dp_shard` shards: 1 optimiser states, 2 also gradients, 3 also parameters. "
        "Becomes 0 where dp_shard is 1.",
    ),
    _knob(
        "gradient_reduction",
        Literal["each", "last"],
        "When ZeRO stages 2 and 3 reduce gradients while accumulating: after each micro-batch, or after the last and "
        "keep them whole until then. Becomes each where zero_stage is below 2.",
    ),
    _knob(
        "replicate_with",
        Literal["auto", "ddp", "fsdp2"],
        "Engine of replication without sharding; auto: ddp where tp is 1, stages have one chunk and shard_embedding "
        "is off, else fsdp2. ZeRO-1 always uses buckets of its own, ZeRO-2 and 3 FSDP2.",
        default="auto",
        resolved_type=Literal["ddp", "fsdp2"],
    ),
    _knob(
        "shard_embedding",
        bool,
        "Shard embedding and head over all data-parallel ranks, whatever the layers do. "
        "Becomes false without data-parallel ranks.",
    ),
    _knob("cp", Degree, "Context-parallel degree: parts every sequence is split into."),
    _knob(
        "cp_method",
        Literal["all_gather", "ulysses", "ring"],
        "How attention sees the whole sequence: gather keys and values, exchange sequence for heads (Ulysses), or pass "
        "keys and values around (ring).",
    ),
    _knob("tp", Degree, "Tensor-parallel degree, kept inside a node."),
    _knob(
        "sequence_parallel",
        bool,
        "Shard the norm regions along the sequence over the tp ranks. Becomes false where tp is 1.",
    ),
    _knob(
        "tp_engine",
        Literal["auto", "dtensor", "local"],
        "dtensor: PyTorch's own; local: plain tensors with explicit collectives; auto: local where dtensor cannot "
        "do it (num_copies 2, DDP or ZeRO-1, recompute of communication), else dtensor.",
        default="auto",
        resolved_type=Literal["dtensor", "local"],
    ),
    _knob(
        "num_copies",
        Literal[1, 2],
        "2 runs each micro-batch as two halves, one's collectives behind the other's computation. "
        "Becomes 1 where tp is 1.",
    ),
)


# The knobs beside the layout: micro-batch, recompute, precision, data reading and kernels


def _resolve_recompute(value: Any, candidate: Candidate, num_layers: int) -> Any:
    return resolve_recompute(value, layers_of(candidate.layout, num_layers))


def _loader(name: str, value_type: Any, description: str, **options: Any) -> Knob:
    default = options.pop("default", getattr(Loader(), name, None))
    field = options.pop("field", name)
    return Knob(
        name=name,
        type=value_type,
        default=default,
        part="loader",
        read=lambda candidate: getattr(candidate.loader, field),
        description=description,
        **options,
    )


def _kernel(name: str, value_type: Any, description: str, **options: Any) -> Knob:
    default = options.pop("default", getattr(Kernels(), name, None))
    field = options.pop("field", name)
    return Knob(
        name=name,
        type=value_type,
        default=default,
        part="kernels",
        read=lambda candidate: getattr(candidate.kernels, field),
        description=description,
        **options,
    )


def _offload(name: str, description: str) -> Knob:
    return Knob(
        name=f"offload_{name}",
        type=bool,
        default=False,
        part="offload",
        read=lambda candidate: getattr(candidate.offload, name),
        description=description,
    )


RUN_KNOBS: tuple[Knob, ...] = (
    Knob(
        name="micro_batch_size",
        type=Degree,
        default=1,
        part="micro_batch_size",
        read=lambda c: c.micro_batch_size,
        description="Samples (sequences) per data-parallel rank per micro-batch.",
    ),
    Knob(
        name="recompute",
        type=RecomputeValue,
        default="none",
        part="recompute",
        read=lambda c: c.recompute,
        description="none, full (keep only every layer's input), or a mapping that says how many layers of each "
        "stage recompute what, like {full: [4, 0]}; in `baseline` a bare list means the same.",
        single_type=BaselineRecompute,
        resolve=_resolve_recompute,
    ),
    Knob(
        name="precision",
        type=PrecisionValue,
        default="O0",
        part="precision",
        read=lambda c: c.precision,
        description="O0 (fp32), O1 (autocast), O2 (16-bit parameters, fp32 masters), both with bfloat16, or O1-fp8 "
        "(O1 with the layers' matmuls in 8-bit floats); or a mapping of level, dtype, loss_scale, white, black.",
    ),
    _offload("activations", "Keep in host memory what layers need for the backward pass."),
    _offload("optimizer", "Keep states of the optimiser and master weights in host memory, and step there."),
    _loader(
        "dataloader",
        DataloaderValue,
        "manual: num_workers and prefetch_factor as given; auto: found by hill climbing before training, which makes "
        "those two 0; or a mapping of tuning_steps and max_workers.",
        default="manual",
        field="tuning",
    ),
    _loader(
        "num_workers",
        Annotated[int, Field(ge=0, le=1024)],
        "Data-loading processes per rank; 0 loads in the training process.",
    ),
    _loader(
        "prefetch_factor",
        Annotated[int, Field(ge=0, le=1024)],
        "Batches ahead per data-loading process (0: the default of 2). Becomes 0 without such processes.",
        default=2,
    ),
    _loader("pin_memory", bool, "Page-locked host memory for asynchronous copies to a GPU."),
    _loader(
        "persistent_workers",
        bool,
        "Keep data-loading processes from one epoch to the next. Becomes false without such processes.",
    ),
    _loader(
        "full_batch",
        bool,
        "Every rank reads the whole global batch and keeps its rows, instead of reading only those.",
    ),
    _kernel(
        "compile",
        CompileValue,
        'off, block (every repeated layer) or model. A bare `off` and `"off"` mean the same here.',
    ),
    _kernel(
        "compile_mode",
        Literal["default", "reduce-overhead", "max-autotune"],
        "Mode of torch.compile. Becomes default where compile is off.",
    ),
    _kernel(
        "attention",
        Literal["auto", "flash", "efficient", "cudnn", "math"],
        "Kernel of scaled dot-product attention. Becomes auto for models without attention.",
    ),
    _kernel("matmul_precision", Literal["highest", "high", "medium"], "Precision of fp32 matrix products (TF32)."),
    _kernel(
        "cudnn_benchmark",
        CudnnValue,
        "off, or {first: 1, last: 10}: steps in which cuDNN measures its convolutions. "
        "Becomes off for models without convolutions.",
        default="off",
        field="cudnn_tuning_range",
    ),
    _kernel(
        "memory_format",
        Literal["nchw", "nhwc", "auto"],
        "Memory format of convolutions; auto: by number format, verified by timing both. "
        "Becomes nchw for models without convolutions.",
    ),
    _kernel(
        "loss_chunks",
        Annotated[int, Field(ge=1, le=2**20)],
        "Parts of a micro-batch's positions whose logits and loss are computed one after the other.",
    ),
)


# All knobs of the search, one table: name, type, default, place in a :class:`~trials.spec.Candidate`

KNOBS = (*LAYOUT_KNOBS, *RUN_KNOBS)
KNOB_NAMES = tuple(knob.name for knob in KNOBS)


# Canonical form: knob values to candidates and back, so that one candidate has one spelling

DEFAULT_PREFETCH_FACTOR = 2


@dataclass(frozen=True, slots=True)
class Rest:
    """A data-parallel degree that takes up the devices which the other axes leave of ``num_devices``.

    As ``dp_shard`` it does so where something is to be sharded, and is 1 elsewhere.
    """

    num_devices: int

    def of(self, taken: int) -> int:
        """What is left beside ``taken``; where that does not divide, so much that legality rules find fault."""
        return max(1, self.num_devices // max(1, taken))


def build_candidate(
    values: Mapping[str, Any], model: Model, own: Sequence[OwnKnob] = (), own_values: Mapping[str, OwnScalar] = {}
) -> Candidate:
    """The canonical candidate of a full set of knob values, and of values of the user's own knobs."""
    layout = build_layout(values, model.num_layers)
    recompute = resolve_recompute(values["recompute"], layers_of(layout, model.num_layers))
    engine = engine_for(values["tp_engine"], model)
    engine = resolve_tp_engine(engine, layout, recomputes_communication=recompute.communication != ())
    return Candidate(
        layout=with_tp_engine(layout, engine),
        micro_batch_size=values["micro_batch_size"],
        recompute=recompute,
        precision=canonical_precision(values["precision"]),
        loader=build_loader(values),
        kernels=build_kernels(values, model),
        offload=build_offload(values),
        own=chosen(own, own_values),
    )


def knob_values(candidate: Candidate) -> dict[str, Any]:
    """Values of all knobs: the inverse of :func:`build_candidate` for canonical candidates."""
    return {knob.name: knob.read(candidate) for knob in KNOBS}


def build_layout(values: Mapping[str, Any], num_layers: int) -> Layout:
    """The layout in canonical form, with ``replicate_with: auto`` and the layers per stage resolved.

    ``tp_engine`` depends on the recompute policy too and is left at its default, for :func:`with_tp_engine`.
    """
    pp, schedule = values["pp"], values["schedule"]
    chunks = 2 if schedule == "zbv" else values["num_virtual_stages"]
    engine = values["replicate_with"]
    if engine == "auto":
        is_plain = values["tp"] == 1 and (pp == 1 or chunks == 1) and not values["shard_embedding"]
        engine = "ddp" if is_plain else "fsdp2"
    replicate, shard = _data_parallel(values)
    layout = Layout(
        pp=pp,
        dp_replicate=replicate,
        dp_shard=shard,
        cp=values["cp"],
        tp=values["tp"],
        zero_stage=values["zero_stage"],
        gradient_reduction=values["gradient_reduction"],
        replicate_with=engine,
        shard_embedding=values["shard_embedding"],
        sequence_parallel=values["sequence_parallel"],
        num_copies=values["num_copies"],
        cp_method=values["cp_method"],
        schedule=schedule,
        num_virtual_stages=chunks,
        stage_layers=resolve_stage_layers(
            values["stage_layers"], num_layers=num_layers, pp=pp, num_virtual_stages=chunks, schedule=schedule
        ),
    )
    return canonical_layout(layout)


def _data_parallel(values: Mapping[str, Any]) -> tuple[int, int]:
    """``dp_replicate`` and ``dp_shard``, with what is to take up the rest of the devices resolved."""
    replicate, shard = values["dp_replicate"], values["dp_shard"]
    taken = values["pp"] * values["cp"] * values["tp"]
    if isinstance(shard, Rest):
        rest, others = (replicate, 1) if isinstance(replicate, Rest) else (shard, replicate)
        shard = rest.of(taken * others) if values["zero_stage"] else 1
    return (replicate.of(taken * shard) if isinstance(replicate, Rest) else replicate), shard


def canonical_layout(layout: Layout) -> Layout:
    """The layout with knobs of an axis at their defaults where its degree is 1: they mean nothing there.

    Sharding comes with its engine, which also replicates: no choice of one there.
    """
    has_pipeline, has_tp = layout.pp > 1, layout.tp > 1
    zero_stage = layout.zero_stage if layout.dp_shard > 1 else 0
    has_engine_choice = layout.dp_replicate * layout.cp > 1 and zero_stage == 0
    schedule = layout.schedule if has_pipeline else "1f1b"
    chunks = (2 if schedule == "zbv" else layout.num_virtual_stages) if has_pipeline else 1
    return dataclasses.replace(
        layout,
        zero_stage=zero_stage,
        gradient_reduction=layout.gradient_reduction if zero_stage >= 2 else "each",
        replicate_with=layout.replicate_with if has_engine_choice else "ddp",
        shard_embedding=layout.shard_embedding and layout.dp * layout.cp > 1,
        sequence_parallel=layout.sequence_parallel and has_tp,
        tp_engine=layout.tp_engine if has_tp else "dtensor",
        num_copies=layout.num_copies if has_tp else 1,
        cp_method=layout.cp_method if layout.cp > 1 else "all_gather",
        schedule=schedule,
        num_virtual_stages=chunks,
        stage_layers=layout.stage_layers if has_pipeline else (),
    )


def engine_for(engine: str, model: Model) -> str:
    """The engine as asked for; tensor parallelism of the user's modules goes by a plan, which only one engine reads."""
    return "dtensor" if isinstance(model, OwnModel) and engine == "auto" else engine


def resolve_tp_engine(engine: str, layout: Layout, *, recomputes_communication: bool) -> str:
    """The engine of tensor parallelism: ``auto`` becomes ``local`` for what DTensors cannot do."""
    if engine != "auto":
        return engine
    needs_local = layout.num_copies > 1 or holds_plain(layout) or recomputes_communication
    return "local" if needs_local else "dtensor"


def with_tp_engine(layout: Layout, engine: Any) -> Layout:
    """The layout with that engine where there is tensor parallelism."""
    return dataclasses.replace(layout, tp_engine=engine) if layout.tp > 1 else layout


def canonical_precision(precision: Precision) -> Precision:
    """The precision with O0 as float32, a loss scale for float16 and nothing else, and its lists sorted."""
    if precision.level == "O0":
        return Precision()
    scale = (precision.loss_scale or LossScale()) if precision.dtype == "float16" else None
    white, black = tuple(sorted(set(precision.white))), tuple(sorted(set(precision.black)))
    return dataclasses.replace(precision, loss_scale=scale, white=white, black=black)


def build_offload(values: Mapping[str, Any]) -> Offload:
    """What waits in host memory, from the values of its knobs."""
    return Offload(activations=values["offload_activations"], optimizer=values["offload_optimizer"])


def build_loader(values: Mapping[str, Any]) -> Loader:
    """The loader in canonical form, from the values of its knobs."""
    tuning: LoaderTuning | None = values["dataloader"]
    return canonical_loader(
        Loader(
            num_workers=values["num_workers"],
            prefetch_factor=values["prefetch_factor"],
            pin_memory=values["pin_memory"],
            persistent_workers=values["persistent_workers"],
            full_batch=values["full_batch"],
            tuning=tuning,
        )
    )


def canonical_loader(loader: Loader) -> Loader:
    """The loader without settings that mean nothing.

    Without workers there is nothing to prefetch or to keep; a tuned loader finds its numbers itself; 0 batches ahead
    with workers means the default.
    """
    num_workers = 0 if loader.tuning is not None else loader.num_workers
    return dataclasses.replace(
        loader,
        num_workers=num_workers,
        prefetch_factor=(loader.prefetch_factor or DEFAULT_PREFETCH_FACTOR) if num_workers else 0,
        persistent_workers=loader.persistent_workers and (num_workers > 0 or loader.tuning is not None),
    )


def build_kernels(values: Mapping[str, Any], model: Model) -> Kernels:
    """The kernels in canonical form, from the values of their knobs."""
    kernels = Kernels(
        compile=values["compile"],
        compile_mode=values["compile_mode"],
        attention=values["attention"],
        matmul_precision=values["matmul_precision"],
        cudnn_tuning_range=values["cudnn_benchmark"],
        memory_format=values["memory_format"],
        loss_chunks=values["loss_chunks"],
    )
    return canonical_kernels(kernels, model)


def canonical_kernels(kernels: Kernels, model: Model) -> Kernels:
    """The kernels with defaults for settings of absent compilers and for kernels of absent operators."""
    default = Kernels()
    compiles = kernels.compile != "off"
    if isinstance(model, ScriptModel):
        has_attention = has_convolutions = True  # as far as anybody knows
    else:
        has_attention, has_convolutions = decoder_of(model) is not None, isinstance(model, ResNetModel)
    return dataclasses.replace(
        kernels,
        backend=kernels.backend if compiles else default.backend,
        compile_mode=kernels.compile_mode if compiles else default.compile_mode,
        attention=kernels.attention if has_attention else default.attention,
        cudnn_tuning_range=kernels.cudnn_tuning_range if has_convolutions else (),
        memory_format=kernels.memory_format if has_convolutions else default.memory_format,
    )
