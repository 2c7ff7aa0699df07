"""Types of knob values in a sweep file: sections, errors and short forms, layers per stage, recompute, and the rest.
Also their short text form."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from trials.files import digest
from trials.layout_rules import has_sane_chunks
from trials.legality import FP32_MAX, FP32_TINY
from trials.patterns import pattern_problem
from trials.sizes import virtual_stage
from trials.spec import (
    GATHERED,
    Candidate,
    Counts,
    Layout,
    LoaderTuning,
    LossScale,
    Precision,
    Recompute,
    Schedule,
    SelectiveRecompute,
    gather_pattern,
)

T = TypeVar("T")

# Building blocks of the sections of a sweep file: base class, faults, and annotations for short forms and lists


class Section(BaseModel):
    """Base of all parts of a sweep file: closed, strict, immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True)

    def to(self, cls: type[T], **others: Any) -> T:
        """Convert to the dataclass ``cls``: the fields that both have, and ``others``."""
        names = {field.name for field in dataclasses.fields(cls)} & type(self).model_fields.keys() - others.keys()  # type: ignore[arg-type]
        values = {name: getattr(self, name) for name in names}
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}, **others)


def fault(key: str | None, message: str, remedy: str) -> PydanticCustomError:
    """Create an error about ``key`` of the section being validated (None: the section itself)."""
    context = {"text": message, "key": key or "", "remedy": remedy}
    return PydanticCustomError("sweep_fault", "{text}", context)


def show(value: Any) -> str:
    """Format a value of the file for an error message, as in YAML."""
    text = (
        {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else repr(value)
    )
    return text if len(text) <= 60 else f"{text[:57]}..."


def received(value: Any) -> str:
    """End of a message ``expected ...``: the value in the file, with its type where that is the mistake."""
    if value is None:
        return ", but the value is empty (null)"
    if isinstance(value, Mapping | list | tuple):
        return f", got a {'mapping' if isinstance(value, Mapping) else 'list'}"
    return f", got the string {show(value)}" if isinstance(value, str) else f", got {show(value)}"


class ShortForms:
    """Annotation: also accept some plain words, short for the mappings in ``expand``.

    ``others``: words that an enclosing type accepts, for the message.
    """

    def __init__(self, expand: Mapping[str, Mapping[str, Any]], *, others: tuple[str, ...] = (), remedy: str) -> None:
        self.expand = expand
        self.words = ", ".join(map(repr, (*others, *expand)))
        self.remedy = remedy

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._widen, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        inner = handler(schema)
        return {"anyOf": [{"enum": list(self.expand)}, inner]} if self.expand else inner

    def _widen(self, value: Any) -> Any:
        if isinstance(value, str) and value in self.expand:
            return self.expand[value]
        if isinstance(value, Mapping | BaseModel):
            return value
        raise fault(None, f"expected {self.words} or a mapping{received(value)}", self.remedy)


class Word:
    """Annotation: also accept one word for ``value``, in addition to the type's own values.

    YAML 1.1 parses a bare ``off`` as false and ``on`` as true. If the word is one of these, they are accepted too.
    """

    def __init__(self, word: str, value: Any) -> None:
        self.spellings = (word, word == "on") if word in ("off", "on") else (word,)
        self.value = value

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(self._take, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        inner = handler(schema)
        return {"anyOf": [{"enum": list(self.spellings)}, *inner.get("anyOf", [inner])]}

    def _take(self, value: Any, handler: Callable[[Any], Any]) -> Any:
        return self.value if any(value is word or value == word for word in self.spellings) else handler(value)


Degree = Annotated[int, Field(ge=1, le=2**20)]


class OneOrMany:
    """Annotation for a tuple: a single value stands for a tuple of one; empty and repeated choices are refused."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        several = core_schema.no_info_after_validator_function(self._check, handler(source))
        return core_schema.no_info_before_validator_function(self._wrap, several)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        array = handler(schema)
        return {"anyOf": [array["items"], {**array, "minItems": 1, "uniqueItems": True}]}

    @staticmethod
    def _wrap(value: Any) -> Any:
        return tuple(value) if isinstance(value, list | tuple) else (value,)

    @staticmethod
    def _check(values: tuple[Any, ...]) -> tuple[Any, ...]:
        if not values:
            raise fault(None, "the list is empty", "List at least one value.")
        for i, value in enumerate(values):
            if value in values[:i]:
                raise fault(None, f"{show(value)} is listed twice", f"Remove item {i + 1} from the list.")
        return values


# Knob values whose meaning depends on the layout: layers per stage, and how many of them recompute

ALL_LAYERS = 2**31 - 1
"""Number that represents ``all`` layers; clipped to the layers of a stage."""

LayerCount = int | Counts
"""Layers as written: the first n of every chunk and stage, or numbers per chunk and stage; ``()`` and 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSplit:
    """Split of layers over stages. ``rows``: one list per chunk, of offsets from the even share, or of counts."""

    kind: Literal["even", "offset", "counts"] = "even"
    rows: Counts = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeChoice:
    """A recompute policy as written, before it is resolved against a layout; see :class:`trials.spec.Recompute`."""

    full: LayerCount = 0
    select: tuple[tuple[str, LayerCount], ...] = ()
    """Pattern and number of layers, sorted by pattern."""
    communication: LayerCount = 0


@functools.lru_cache(maxsize=4096)
def even_split(num_layers: int, pp: int, num_virtual_stages: int, schedule: Schedule) -> Counts:
    """Split layers over chunks and stages as evenly as possible. The first stages in model order get the remainder."""
    layout = Layout(pp=pp, num_virtual_stages=num_virtual_stages, schedule=schedule)
    size, left = divmod(num_layers, pp * num_virtual_stages)
    return tuple(
        tuple(size + (virtual_stage(layout, chunk, stage) < left) for stage in range(pp))
        for chunk in range(num_virtual_stages)
    )


def resolve_stage_layers(
    split: StageSplit | Counts, *, num_layers: int, pp: int, num_virtual_stages: int, schedule: Schedule
) -> Counts:
    """Return the layers of every chunk and stage; ``()`` without a pipeline.

    Rows of a different shape than the layout's are returned unchanged, and far more stages than layers give none. The
    legality rules reject such layouts.
    """
    if pp == 1:
        return ()
    if not isinstance(split, StageSplit):
        return split
    if split.kind == "counts":
        return split.rows
    if not has_sane_chunks(num_layers, pp=pp, num_virtual_stages=num_virtual_stages):
        return ()
    if split.kind == "even":
        return even_split(num_layers, pp, num_virtual_stages, schedule)
    share = num_layers // (pp * num_virtual_stages)
    rows = split.rows * num_virtual_stages if len(split.rows) == 1 else split.rows
    return tuple(tuple(share + offset for offset in row) for row in rows)


def layers_of(layout: Layout, num_layers: int) -> Counts:
    """Return the layers of every chunk and stage; without a pipeline, all in one."""
    return layout.stage_layers if layout.pp > 1 else ((num_layers,),)


@functools.lru_cache(maxsize=2**14)
def resolve_recompute(choice: RecomputeChoice | Recompute, present: Counts) -> Recompute:
    """Return the canonical policy for a model with ``present`` layers per chunk and stage.

    Numbers are clipped to the existing layers. Fully recomputed layers are excluded from the other parts. Rows of a
    different shape are returned unchanged: a legality rule rejects them.
    """
    if isinstance(choice, Recompute):
        select = tuple((part.pattern, part.num_layers) for part in choice.selective)
        choice = RecomputeChoice(full=choice.full, select=select, communication=choice.communication)
    full = _resolve(choice.full, present)
    select = tuple((pattern, _left(_resolve(count, present), full)) for pattern, count in sorted(choice.select))
    return Recompute(
        full=full,
        selective=tuple(SelectiveRecompute(pattern=p, num_layers=counts) for p, counts in select if counts),
        communication=_left(_resolve(choice.communication, present), full),
    )


def _resolve(count: LayerCount, present: Counts) -> Counts:
    """Return ``count`` per chunk and stage, clipped to the existing layers; ``()`` if no layer is left."""
    if isinstance(count, int):
        count = tuple(tuple(count for _ in row) for row in present)
    if _same_shape(count, present):
        count = tuple(
            tuple(max(0, min(n, most)) for n, most in zip(row, limits, strict=True))
            for row, limits in zip(count, present, strict=True)
        )
    return count if any(map(any, count)) else ()


def _left(counts: Counts, full: Counts) -> Counts:
    """Return ``counts`` without those covered by the fully recomputed layers."""
    if not full or not _same_shape(counts, full):
        return counts
    left = tuple(
        tuple(n if n > done else 0 for n, done in zip(row, rows, strict=True))
        for row, rows in zip(counts, full, strict=True)
    )
    return left if any(map(any, left)) else ()


def _same_shape(one: Counts, other: Counts) -> bool:
    return [len(row) for row in one] == [len(row) for row in other]


# Types of the knobs ``stage_layers`` and ``recompute`` in a sweep file

MAX_PATTERNS = 64
_MAX_LAYERS = 10**6
_ROWS = "List one number per stage, such as [2, 1, 1, 0], or give one such list per chunk."


def _rows(value: Any, *, low: int) -> Counts:
    """Parse numbers per stage, or a list of such lists, one per chunk."""
    nested = any(isinstance(row, list | tuple) for row in value)
    for i, row in enumerate(value if nested else [value]):
        place = str(i) if nested else None
        if not isinstance(row, list | tuple):
            raise fault(place, f"expected a list of integers, one per stage{received(row)}", _ROWS)
        if not row:
            raise fault(place, "the list is empty", _ROWS)
        for j, number in enumerate(row):
            if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= _MAX_LAYERS:
                message = f"expected an integer from {low} to {_MAX_LAYERS}{received(number)}"
                remedy = "Remove the quotes." if isinstance(number, str) and number.isdecimal() else _ROWS
                raise fault(f"{i}.{j}" if nested else str(j), message, remedy)
    return tuple(tuple(row) for row in (value if nested else [value]))


def _write_rows(rows: Counts) -> Any:
    return list(rows[0]) if len(rows) == 1 else [list(row) for row in rows]


_COUNT_REMEDY = "Use a value such as 'all', 4, [4, 0] (per stage) or [[4, 0], [2, 0]] (per chunk and stage)."


def _count(value: Any) -> LayerCount:
    if value == "all":
        return ALL_LAYERS
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_LAYERS:
        return value
    if isinstance(value, list | tuple):
        rows = _rows(value, low=0)
        return rows if any(map(any, rows)) else 0
    expected = "'all', a layer count, or a list with one layer count per stage"
    raise fault(None, f"expected {expected}{received(value)}", _COUNT_REMEDY)


def _write_count(count: LayerCount) -> Any:
    return "all" if count == ALL_LAYERS else count if isinstance(count, int) else _write_rows(count)


def _lists(minimum: int) -> list[dict[str, Any]]:
    numbers = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": minimum}}
    return [numbers, {"type": "array", "minItems": 1, "items": numbers}]


_COUNT_SCHEMA = {"anyOf": [{"enum": ["all"]}, {"type": "integer", "minimum": 0}, *_lists(0)]}
CountValue = Annotated[Any, BeforeValidator(_count), PlainSerializer(_write_count), WithJsonSchema(_COUNT_SCHEMA)]


def _pattern(value: str) -> str:
    problem = pattern_problem(value)
    if problem is not None:
        raise fault(None, problem, "Use a regular expression that matches the path of an operator inside its layer.")
    return value


_GATHERS_REMEDY = (
    "Match 'attention', 'feed_forward' or one of their projections wq, wk, wv, w1 and w3, as in {'attention.*': all}."
)


def _gathers(value: Any) -> LayerCount | dict[str, LayerCount]:
    """Parse a count for all gathers, or a mapping with counts by pattern; return the latter by sub-layer."""
    if not isinstance(value, Mapping):
        return _count(value)
    chosen: dict[str, LayerCount] = {}
    for pattern, written in value.items():
        problem = pattern_problem(pattern) if isinstance(pattern, str) else f"{show(pattern)} is not a pattern"
        if problem is not None:
            raise fault(None, problem, _GATHERS_REMEDY)
        matched = [name for name in GATHERED if _reads(name, pattern)]
        if not matched:
            raise fault(None, f"{show(pattern)} matches no module that reads gathered sequences", _GATHERS_REMEDY)
        count = _count(written)
        for name in matched:
            if chosen.setdefault(name, count) != count:
                message = f"different layer counts for projections in {name}, which read the same gathered sequence"
                raise fault(None, message, "Use one pattern for all projections of the module.")
    return {name: count for name, count in chosen.items() if count != 0} or 0


def _reads(sub_layer: str, pattern: str) -> bool:
    """Whether the pattern matches the sub-layer, or a projection in it."""
    paths = (sub_layer, *(f"{sub_layer}.{name}" for name in GATHERED[sub_layer]))
    return any(re.fullmatch(pattern, path) for path in paths)


_GATHERS_SCHEMA = {
    "anyOf": [*_COUNT_SCHEMA["anyOf"], {"type": "object", "additionalProperties": _COUNT_SCHEMA, "minProperties": 1}]
}


class RecomputeSection(Section):
    """A mapping sets the layers to recompute, by kind. Each count is `all`, an integer n (the first n layers of every
    chunk and stage), a list with one count per stage, or a list with one such list per chunk."""

    full: CountValue = Field(default=0, description="The layers that keep only their input.")
    select: dict[Annotated[str, AfterValidator(_pattern)], CountValue] = Field(
        default={},
        max_length=MAX_PATTERNS,
        description="The layers that do not keep the outputs of certain operators, by pattern. A pattern is a regular "
        "expression for the full path of an operator or module inside its layer.",
    )
    communication: Annotated[Any, BeforeValidator(_gathers), WithJsonSchema(_GATHERS_SCHEMA)] = Field(
        default=0,
        description="The layers that gather their sequence shards a second time, in the backward pass. A mapping sets "
        "the layers by pattern of the modules that read the shards, such as `{'attention.*': all}`.",
    )

    def to_choice(self) -> RecomputeChoice:
        gathers = self.communication if isinstance(self.communication, dict) else {}
        by_pattern = {gather_pattern(name): count for name, count in gathers.items()}
        for pattern in by_pattern.keys() & self.select.keys():
            raise fault(
                "select",
                f"{show(pattern)} is also selected by communication",
                "Remove the pattern from one of the two.",
            )
        select = self.select | by_pattern
        return RecomputeChoice(
            full=self.full,
            select=tuple(sorted((pattern, count) for pattern, count in select.items() if count != 0)),
            communication=0 if gathers else self.communication,
        )


def _write_recompute(value: RecomputeChoice) -> Any:
    parts: dict[str, Any] = {}
    if value.full:
        parts["full"] = _write_count(value.full)
    select = {pattern: _write_count(count) for pattern, count in value.select}
    if value.communication:
        parts["communication"] = _write_count(value.communication)
    elif gathers := {name: select.pop(gather_pattern(name)) for name in GATHERED if gather_pattern(name) in select}:
        parts["communication"] = gathers
    if select:
        parts["select"] = select
    if not parts:
        return "none"
    return "full" if parts == {"full": "all"} else parts


class _OrList:
    """Annotation: also accept a bare list for the layers recomputed in full, if it cannot be a list of choices."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._widen, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [*handler(schema)["anyOf"], *_lists(0)]}

    @staticmethod
    def _widen(value: Any) -> Any:
        return {"full": value} if isinstance(value, list) else value


_RECOMPUTE = (
    ShortForms(
        {"none": {"full": 0}, "full": {"full": "all"}},
        remedy="To set layers per stage, use a mapping such as {full: [4, 0]}.",
    ),
    AfterValidator(RecomputeSection.to_choice),
    PlainSerializer(_write_recompute),
)
RecomputeValue = Annotated[RecomputeSection, *_RECOMPUTE]
BaselineRecompute = Annotated[RecomputeSection, *_RECOMPUTE, _OrList()]


def _offsets(value: Any) -> Counts:
    if not isinstance(value, list | tuple):
        raise fault(None, f"expected a list{received(value)}", "List one offset per stage, such as [-2, 1, 1, 0].")
    rows = _rows(value, low=-_MAX_LAYERS)
    total, most = sum(map(sum, rows)), sum(map(len, rows)) - 1
    if not 0 <= total <= most:
        remedy = (
            "Offsets are added to layers // stages and must add up to the remainder, which is 0 if the stages "
            "divide the layers."
        )
        raise fault(None, f"the offsets add up to {total:+d}; expected 0 to {most}", remedy)
    return rows


def _stage_counts(value: Any) -> Counts:
    if not isinstance(value, list | tuple):
        raise fault(
            None, f"expected a list{received(value)}", "List one layer count per stage, such as [10, 11, 11, 8]."
        )
    return _rows(value, low=0)


class StageLayersSection(Section):
    """`offset` and `counts` are lists with one integer per stage. With several chunks per rank, use one such list per
    chunk."""

    offset: Annotated[Any, BeforeValidator(_offsets), WithJsonSchema({"anyOf": _lists(-_MAX_LAYERS)})] = Field(
        default=None,
        description="The number of layers to add to layers // stages, as in MindFormers. The sum must be the "
        "remainder, which is 0 if the stages divide the layers evenly. A single list applies to every chunk.",
    )
    counts: Annotated[Any, BeforeValidator(_stage_counts), WithJsonSchema({"anyOf": _lists(0)})] = Field(
        default=None, description="The number of layers per stage. The sum must be the number of layers in the model."
    )

    @model_validator(mode="after")
    def _one(self) -> StageLayersSection:
        if (self.offset is None) == (self.counts is None):
            raise fault(
                None, "expected exactly one of 'offset' and 'counts'", "Set one of them, or use stage_layers: even."
            )
        return self

    def to_split(self) -> StageSplit:
        if self.counts is not None:
            return StageSplit(kind="counts", rows=self.counts)
        return StageSplit(kind="offset", rows=self.offset) if any(map(any, self.offset)) else StageSplit()


def _write_split(split: StageSplit) -> Any:
    return "even" if split.kind == "even" else {split.kind: _write_rows(split.rows)}


StageLayersValue = Annotated[
    StageLayersSection,
    ShortForms({"even": {"offset": [0]}}, remedy="Use a value such as {offset: [-1, 1]} or {counts: [3, 5]}."),
    AfterValidator(StageLayersSection.to_split),
    PlainSerializer(_write_split),
]


# Types of the knobs on precision, data reading and kernels in a sweep file


def _names(value: Any) -> tuple[str, ...]:
    remedy = "List operators by their names in torch.nn.functional, such as [linear, rms_norm]."
    if not isinstance(value, list | tuple):
        raise fault(None, f"expected a list of operator names{received(value)}", remedy)
    for i, name in enumerate(value):
        if not isinstance(name, str) or not name.isidentifier() or len(name) > 100:
            raise fault(str(i), f"{show(name)} is not the name of an operator", remedy)
    return tuple(sorted(set(value)))


def _module_patterns(value: Any) -> tuple[str, ...]:
    remedy = r"List regular expressions for module paths, such as ['layers\.0', '.*norm', output]."
    if not isinstance(value, list | tuple):
        raise fault(None, f"expected a list of patterns{received(value)}", remedy)
    for i, pattern in enumerate(value):
        problem = pattern_problem(pattern) if isinstance(pattern, str) else f"{show(pattern)} is not a pattern"
        if problem is not None:
            raise fault(str(i), problem, remedy)
    return tuple(sorted(set(value)))


ModulePatterns = Annotated[
    tuple[str, ...],
    BeforeValidator(_module_patterns),
    WithJsonSchema({"type": "array", "items": {"type": "string", "minLength": 1}}),
]
OperatorNames = Annotated[
    tuple[str, ...],
    BeforeValidator(_names),
    WithJsonSchema({"type": "array", "items": {"type": "string", "pattern": r"^[A-Za-z_]\w*$"}}),
]


class LossScaleSection(Section):
    """Loss scaling, for float16 only."""

    initial: float = Field(default=LossScale().initial, ge=FP32_TINY, le=FP32_MAX, description="The initial scale.")
    growth_factor: float = Field(
        default=LossScale().growth_factor,
        gt=1,
        le=FP32_MAX,
        description="The factor that the scale is multiplied by after `growth_interval` consecutive finite steps.",
    )
    growth_interval: int = Field(
        default=LossScale().growth_interval,
        ge=1,
        le=2**31 - 1,
        description="The number of consecutive finite steps before the scale grows.",
    )
    backoff_factor: float = Field(
        default=LossScale().backoff_factor,
        gt=0,
        lt=1,
        description="The factor that the scale is multiplied by after `backoff_interval` consecutive overflowing "
        "steps.",
    )
    backoff_interval: int = Field(
        default=LossScale().backoff_interval,
        ge=1,
        le=2**31 - 1,
        description="The number of consecutive overflowing steps before the scale shrinks.",
    )
    dynamic: bool = Field(
        default=LossScale().dynamic, description="Whether the scale changes. If false, it stays at `initial`."
    )


class PrecisionSection(Section):
    """A mapping sets the level and its details."""

    level: Literal["O0", "O1", "O1-fp8", "O2", "O2-fp8"] = Field(
        description="The precision level: `O0` is fp32, `O1` is autocast, and `O2` has 16-bit parameters with fp32 "
        "master weights. `O1-fp8` and `O2-fp8` also run the matmuls of the layers in 8-bit floats."
    )
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description="The 16-bit type for `O1` and `O2`. Defaults to bfloat16."
    )
    loss_scale: LossScaleSection | None = Field(
        default=None, description="Loss scaling, for float16 only. Defaults to dynamic scaling that starts at 2^15."
    )
    white: OperatorNames = Field(
        default=(),
        description="The operators that `O1` always runs in 16 bits, regardless of autocast, such as `rms_norm`.",
    )
    black: OperatorNames = Field(
        default=(), description="The operators that `O1` always runs in fp32, regardless of autocast."
    )
    keep_fp32: ModulePatterns = Field(
        default=(),
        description="Patterns for the paths or classes of modules whose weights and computation `O2` keeps in fp32, "
        "such as `.*norm` or `LayerNorm`.",
    )
    fp8_gather: bool = Field(
        default=False,
        description="Whether FSDP gathers the weights of 8-bit matmuls in 8-bit floats, for `O1-fp8` and `O2-fp8`.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> PrecisionSection:
        if self.level == "O0" and self.dtype not in (None, "float32"):
            raise fault("dtype", f"level O0 uses float32, not {self.dtype}", "Use level O1 or O2, or remove dtype.")
        if self.level != "O0" and self.dtype == "float32":
            raise fault(
                "dtype", f"level {self.level} requires a 16-bit type", "Use bfloat16 or float16, or switch to level O0."
            )
        if self.level.endswith("-fp8") and self.dtype == "float16":
            base = self.level.removesuffix("-fp8")
            raise fault("dtype", f"level {self.level} requires bfloat16", f"Remove dtype, or use level {base}.")
        if self.loss_scale is not None and self.dtype != "float16":
            raise fault("loss_scale", "loss scaling requires float16", "Remove loss_scale, or set dtype: float16.")
        if (self.white or self.black) and self.level != "O1":
            raise fault(
                "white" if self.white else "black",
                f"level {self.level} does not support white and black lists",
                "Use level O1, or remove the lists.",
            )
        if self.keep_fp32 and not self.level.startswith("O2"):
            raise fault("keep_fp32", f"level {self.level} has no 16-bit weights", "Use level O2, or remove keep_fp32.")
        if self.fp8_gather and not self.level.endswith("-fp8"):
            raise fault(
                "fp8_gather",
                f"level {self.level} has no 8-bit matmuls",
                "Use level O1-fp8 or O2-fp8, or remove fp8_gather.",
            )
        if twice := set(self.white) & set(self.black):
            raise fault(
                "black", f"{min(twice)!r} is on both the white and the black list", "Remove it from one of the lists."
            )
        return self

    def to_precision(self) -> Precision:
        dtype = self.dtype or ("float32" if self.level == "O0" else "bfloat16")
        scale = self.loss_scale or LossScaleSection()
        loss_scale = scale.to(LossScale) if dtype == "float16" else None
        return Precision(
            level=self.level,
            dtype=dtype,
            loss_scale=loss_scale,
            white=self.white,
            black=self.black,
            keep_fp32=self.keep_fp32,
            fp8_gather=self.fp8_gather,
        )


class DataloaderSection(Section):
    """A mapping searches like `auto`, within its limits."""

    tuning_steps: int = Field(
        default=LoaderTuning().tuning_steps,
        ge=1,
        le=10**6,
        description="The number of batches to read per setting, for at most 0.4 s.",
    )
    max_workers: int = Field(
        default=LoaderTuning().max_workers,
        ge=1,
        le=1024,
        description="The maximum number of data loader workers to try.",
    )

    def to_tuning(self) -> LoaderTuning:
        return LoaderTuning(**self.model_dump())


class CudnnSection(Section):
    """cuDNN benchmarks its algorithms from the first to the last of these steps. Later steps use the result."""

    first: int = Field(ge=1, le=10**6, description="The first step.")
    last: int = Field(ge=1, le=10**6, description="The last step.")

    @model_validator(mode="after")
    def _ordered(self) -> CudnnSection:
        if self.last < self.first:
            raise fault(
                "last",
                f"the last step ({self.last}) is before the first ({self.first})",
                "Raise 'last' or lower 'first'.",
            )
        return self

    def to_range(self) -> tuple[int, ...]:
        return self.first, self.last


def _write_precision(value: Precision) -> Any:
    written: dict[str, Any] = {"level": value.level, "dtype": value.dtype}
    if value.dtype == "float16":
        scale = value.loss_scale or LossScale()
        written["loss_scale"] = {name: getattr(scale, name) for name in LossScaleSection.model_fields}
    lists = {"white": list(value.white), "black": list(value.black), "keep_fp32": list(value.keep_fp32)}
    gather = {"fp8_gather": True} if value.fp8_gather else {}
    return written | {name: names for name, names in lists.items() if names} | gather


def _write_tuning(value: LoaderTuning | None) -> Any:
    if value is None:
        return "manual"
    written = {"tuning_steps": value.tuning_steps, "max_workers": value.max_workers}
    return "auto" if value == LoaderTuning() else written


def _write_range(value: tuple[int, ...]) -> Any:
    return {"first": value[0], "last": value[1]} if value else "off"


def off_is_false(value: Any) -> Any:
    """Accept false for ``off``, because YAML 1.1 parses a bare ``off`` as false."""
    return "off" if value is False else value


LEVELS = ("O0", "O1", "O1-fp8", "O2", "O2-fp8")
CUDNN_ON = (1, 10)
"""Steps in which cuDNN measures with a plain ``on``."""
PrecisionValue = Annotated[
    PrecisionSection,
    ShortForms(
        {level: {"level": level} for level in LEVELS}, remedy="Use a value such as {level: O2, dtype: float16}."
    ),
    AfterValidator(PrecisionSection.to_precision),
    PlainSerializer(_write_precision),
]
DataloaderValue = Annotated[
    DataloaderSection,
    ShortForms({"auto": {}}, others=("manual",), remedy="Use a value such as {max_workers: 8}."),
    AfterValidator(DataloaderSection.to_tuning),
    Word("manual", None),
    PlainSerializer(_write_tuning),
]
CudnnValue = Annotated[
    CudnnSection,
    ShortForms({}, others=("off", "on"), remedy="Use a value such as {first: 1, last: 10}."),
    AfterValidator(CudnnSection.to_range),
    Word("on", CUDNN_ON),
    Word("off", ()),
    PlainSerializer(_write_range),
]
CompileValue = Annotated[
    Literal["off", "block", "model"],
    BeforeValidator(off_is_false),
    WithJsonSchema({"enum": ["off", "block", "model", False]}),
]


# Knob values as short text: for parameters, tables and messages

DTYPE_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_MAX_LIST_CHARS = 40


def plain(value: Any) -> str | int | float | bool:
    """Format a knob value as a scalar, unique per value: ``full:4``, ``O1-bf16``."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Precision):
        return precision_text(value)
    if isinstance(value, Recompute | RecomputeChoice):
        return recompute_text(value)
    if isinstance(value, StageSplit):
        return value.kind if value.kind == "even" else f"{value.kind} {counts_text(value.rows)}"
    if value is None:
        return "manual"
    if isinstance(value, LoaderTuning):
        return "auto" if value == LoaderTuning() else f"auto:{value.tuning_steps}x{value.max_workers}"
    if isinstance(value, tuple):
        return steps_text(value)
    raise TypeError(f"not a knob value: {value!r}")


def plain_knob(name: str, value: Any, candidate: Candidate) -> str | int | float | bool:
    """Format a value like :func:`plain`, but omit what the rest of the candidate implies."""
    if name == "stage_layers":
        return stage_layers_text(candidate.layout)
    return recompute_text(value, candidate.layout) if name == "recompute" else plain(value)


def precision_text(precision: Precision) -> str:
    """Format a precision: ``O0``, ``O1-bf16``, ``O1-bf16+softmax-linear`` (operators forced to 16 bits and to fp32). A
    loss scale other than the default adds a tag derived from its numbers; so do long lists."""
    if precision.level == "O0":
        return "O0"
    level = precision.level if precision.is_fp8 else f"{precision.level}-{DTYPE_SHORT[precision.dtype]}"
    gather = "-gather" if precision.fp8_gather else ""
    return f"{level}{gather}{lists_text(precision)}{loss_scale_text(precision)}"


def lists_text(precision: Precision) -> str:
    """Format operators forced to 16 bits, and operators or modules in fp32: ``+softmax-linear``; long lists as tag."""
    wide = (*precision.black, *precision.keep_fp32)
    lists = "".join(f"+{name}" for name in precision.white) + "".join(f"-{name}" for name in wide)
    return f"+lists~{digest([precision.white, wide])[:6]}" if len(lists) > _MAX_LIST_CHARS else lists


def loss_scale_text(precision: Precision) -> str:
    """Return a tag derived from the numbers of a loss scale; empty for the default."""
    custom = precision.loss_scale not in (None, LossScale())
    return f"~{digest(precision.loss_scale)[:6]}" if custom else ""


def counts_text(counts: Counts) -> str:
    """Format counts: ``20,8``; a slash separates chunks, and three or more equal numbers are counted:
    ``11x3,8/10,11x3``."""
    return "/".join(",".join(_runs(map(str, row))) for row in counts)


def _runs(words: Iterable[str]) -> Iterator[str]:
    for word, group in itertools.groupby(words):
        number = len(list(group))
        yield from [f"{word}x{number}"] if number > 2 else [word] * number


def recompute_text(value: Recompute | RecomputeChoice, layout: Layout | None = None, separator: str = ":") -> str:
    """Format recompute: ``none``, ``full:4``, ``full:13,5 ~feed_forward\\.mul:40 comm:4,0``.

    A single number covers all layers, if ``layout`` gives their number. A question mark precedes numbers that do not
    fit the layout.
    """
    if isinstance(value, Recompute):
        select = tuple((part.pattern, part.num_layers) for part in value.selective)
        value = RecomputeChoice(full=value.full, select=select, communication=value.communication)
    named = [("full", value.full), *((pattern_text(p), count) for p, count in value.select)]
    named.append(("comm", value.communication))
    return " ".join(f"{name}{separator}{count_text(count, layout)}" for name, count in named if count) or "none"


def count_text(count: LayerCount, layout: Layout | None) -> str:
    if isinstance(count, int):
        return "all" if count == ALL_LAYERS else str(count)
    if layout is None:
        return counts_text(count)
    if layout.pp > 1 and count == layout.stage_layers:
        return str(sum(map(sum, count)))
    fits = [len(row) for row in count] == [layout.pp] * layout.num_virtual_stages
    return counts_text(count) if fits else f"?{counts_text(count)}"


def pattern_text(pattern: str) -> str:
    """Format a pattern, readable unless it could be confused with the surrounding text."""
    is_simple = len(pattern) <= _MAX_LIST_CHARS and re.fullmatch(r"[^\s:#~][^\s:]*", pattern)
    return f"~{pattern}" if is_simple else f"~#{digest(pattern)[:8]}"


def stage_layers_text(layout: Layout) -> str:
    """Return ``even``, or the layers of every stage."""
    counts = layout.stage_layers
    if layout.pp == 1:
        return "even"
    total = sum(map(sum, counts))
    even = even_split(total, layout.pp, layout.num_virtual_stages, layout.schedule)
    return "even" if counts == even else counts_text(counts)


def steps_text(steps: tuple[int, ...]) -> str:
    """Format a range of steps: ``1-10``; ``off`` for none."""
    return "-".join(map(str, steps)) or "off"


def show_pattern(pattern: Mapping[str, tuple[Any, ...]]) -> str:
    """Format a pattern: ``tp 2, precision O1-bf16|O2-bf16``."""
    return ", ".join(f"{name} {'|'.join(str(plain(v)) for v in values)}" for name, values in pattern.items())
