"""Types of the knobs ``stage_layers`` and ``recompute`` as they stand in a sweep file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from orchestrator.space.knobs.layer_choices import ALL_LAYERS, LayerCount, RecomputeChoice, StageSplit
from orchestrator.space.knobs.sections import Section, ShortForms, fault, show
from trials.legality.rules import pattern_problem
from trials.spec import Counts

MAX_PATTERNS = 64
_MAX_LAYERS = 10**6
_ROWS = "Write one number per stage, like [2, 1, 1, 0]; one such list per chunk."


def _rows(value: Any, *, low: int, words: str) -> Counts:
    """Numbers per stage, or a list of such lists, one per chunk."""
    nested = any(isinstance(row, list | tuple) for row in value)
    for i, row in enumerate(value if nested else [value]):
        if not isinstance(row, list | tuple) or not row:
            raise fault(str(i) if nested else None, f"expected {words}, got {show(row)}", _ROWS)
        for j, number in enumerate(row):
            if not isinstance(number, int) or isinstance(number, bool) or not low <= number <= _MAX_LAYERS:
                message = f"expected a whole number from {low} to {_MAX_LAYERS}, got {show(number)}"
                raise fault(f"{i}.{j}" if nested else str(j), message, _ROWS)
    return tuple(tuple(row) for row in (value if nested else [value]))


def _write_rows(rows: Counts) -> Any:
    return list(rows[0]) if len(rows) == 1 else [list(row) for row in rows]


def _count(value: Any) -> LayerCount:
    if value == "all":
        return ALL_LAYERS
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_LAYERS:
        return value
    words = "all, a number of layers, or numbers per stage"
    if isinstance(value, list | tuple):
        rows = _rows(value, low=0, words=words)
        return rows if any(map(any, rows)) else 0
    raise fault(None, f"expected {words}, got {show(value)}", "Write it like all, 4, [4, 0] or [[4, 0], [2, 0]].")


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
        raise fault(None, problem, "Write a regular expression for an operator's path inside its layer.")
    return value


class RecomputeSection(Section):
    """What to recompute instead of keeping it. Each number: `all`, n (the first n layers of every chunk and stage),
    a list (one per stage) or a list of such lists (one per chunk)."""

    full: CountValue = Field(default=0, description="Layers that keep only their input.")
    select: dict[Annotated[str, AfterValidator(_pattern)], CountValue] = Field(
        default={},
        max_length=MAX_PATTERNS,
        description="Pattern of operators whose outputs are not kept, to the layers it applies to. A pattern is a "
        "regular expression for the whole path of an operator, or of a module, inside its layer.",
    )
    communication: CountValue = Field(
        default=0, description="Layers that gather their sequence shards again in the backward pass."
    )

    def to_choice(self) -> RecomputeChoice:
        select = tuple(sorted((pattern, count) for pattern, count in self.select.items() if count != 0))
        return RecomputeChoice(full=self.full, select=select, communication=self.communication)


def _write_recompute(value: RecomputeChoice) -> Any:
    parts: dict[str, Any] = {}
    if value.full:
        parts["full"] = _write_count(value.full)
    if value.select:
        parts["select"] = {pattern: _write_count(count) for pattern, count in value.select}
    if value.communication:
        parts["communication"] = _write_count(value.communication)
    if not parts:
        return "none"
    return "full" if parts == {"full": "all"} else parts


class _OrList:
    """Annotation: also take a bare list for the layers recomputed in full, where it cannot mean choices."""

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
        remedy="Write none, full, or a mapping; layers per stage as {full: [4, 0]}.",
    ),
    AfterValidator(RecomputeSection.to_choice),
    PlainSerializer(_write_recompute),
)
RecomputeValue = Annotated[RecomputeSection, *_RECOMPUTE]
BaselineRecompute = Annotated[RecomputeSection, *_RECOMPUTE, _OrList()]


def _offsets(value: Any) -> Counts:
    if not isinstance(value, list | tuple):
        raise fault(None, f"expected a list, got {show(value)}", "Write one offset per stage, like [-2, 1, 1, 0].")
    rows = _rows(value, low=-_MAX_LAYERS, words="numbers per stage")
    total, most = sum(map(sum, rows)), sum(map(len, rows)) - 1
    if not 0 <= total <= most:
        remedy = "They are added to layers // stages and make up its remainder: 0 where the stages divide the layers."
        raise fault(None, f"the offsets sum to {total:+d}, which is outside 0..{most}", remedy)
    return rows


def _stage_counts(value: Any) -> Counts:
    if not isinstance(value, list | tuple):
        raise fault(None, f"expected a list, got {show(value)}", "Write one number per stage, like [10, 11, 11, 8].")
    return _rows(value, low=0, words="numbers per stage")


class StageLayersSection(Section):
    """Uneven layers per stage, either way; a list has one number per stage, a list of lists one such list per chunk."""

    offset: Annotated[Any, BeforeValidator(_offsets), WithJsonSchema({"anyOf": _lists(-_MAX_LAYERS)})] = Field(
        default=None,
        description="Added to layers // stages, as in MindFormers; sums to the remainder, 0 where it divides. "
        "One list for several chunks applies to each.",
    )
    counts: Annotated[Any, BeforeValidator(_stage_counts), WithJsonSchema({"anyOf": _lists(0)})] = Field(
        default=None, description="Number of layers itself; sums to the layers of the model."
    )

    @model_validator(mode="after")
    def _one(self) -> StageLayersSection:
        if (self.offset is None) == (self.counts is None):
            raise fault(None, "expected either offset or counts", "Give one of the two, or write even.")
        return self

    def to_split(self) -> StageSplit:
        if self.counts is not None:
            return StageSplit(kind="counts", rows=self.counts)
        return StageSplit(kind="offset", rows=self.offset) if any(map(any, self.offset)) else StageSplit()


def _write_split(split: StageSplit) -> Any:
    return "even" if split.kind == "even" else {split.kind: _write_rows(split.rows)}


StageLayersValue = Annotated[
    StageLayersSection,
    ShortForms({"even": {"offset": [0]}}, remedy="Write even, {offset: [-1, 1]} or {counts: [3, 5]}."),
    AfterValidator(StageLayersSection.to_split),
    PlainSerializer(_write_split),
]
