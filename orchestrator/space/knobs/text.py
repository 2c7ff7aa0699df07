"""Knob values as short text: for parameters, tables and messages."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from orchestrator.space.knobs.layer_choices import ALL_LAYERS, LayerCount, RecomputeChoice, StageSplit, even_split
from trials.codec import digest
from trials.spec import Candidate, Counts, Layout, LoaderTuning, LossScale, Precision, Recompute

DTYPE_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_MAX_LIST_CHARS = 40


def plain(value: Any) -> str | int | float | bool:
    """A knob value as a scalar, different for different values: ``full:4``, ``O1-bf16``."""
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
    """The value as :func:`plain` writes it, shorter where the rest of the candidate explains it."""
    if name == "stage_layers":
        return stage_layers_text(candidate.layout)
    return recompute_text(value, candidate.layout) if name == "recompute" else plain(value)


def precision_text(precision: Precision) -> str:
    """``O0``, ``O1-bf16``, ``O1-bf16+softmax-linear``: operators forced to 16 bits and to fp32; a loss scale other
    than the default adds a tag derived from its numbers, and so do long lists."""
    if precision.level == "O0":
        return "O0"
    level = precision.level if precision.level == "O1-fp8" else f"{precision.level}-{DTYPE_SHORT[precision.dtype]}"
    return f"{level}{lists_text(precision)}{loss_scale_text(precision)}"


def lists_text(precision: Precision) -> str:
    """``+softmax-linear``: operators forced to 16 bits and to fp32; long lists as a tag."""
    lists = "".join(f"+{name}" for name in precision.white) + "".join(f"-{name}" for name in precision.black)
    return f"+lists~{digest([precision.white, precision.black])[:6]}" if len(lists) > _MAX_LIST_CHARS else lists


def loss_scale_text(precision: Precision) -> str:
    """A tag derived from the numbers of a loss scale other than the default; else empty."""
    custom = precision.loss_scale not in (None, LossScale())
    return f"~{digest(precision.loss_scale)[:6]}" if custom else ""


def counts_text(counts: Counts) -> str:
    """``20,8``; chunks are separated by a slash, and three or more of a kind are counted: ``11x3,8/10,11x3``."""
    return "/".join(",".join(_runs(map(str, row))) for row in counts)


def _runs(words: Iterable[str]) -> Iterator[str]:
    for word, group in itertools.groupby(words):
        number = len(list(group))
        yield from [f"{word}x{number}"] if number > 2 else [word] * number


def recompute_text(value: Recompute | RecomputeChoice, layout: Layout | None = None, separator: str = ":") -> str:
    """``none``, ``full:4``, ``full:13,5 ~feed_forward\\.mul:40 comm:4,0``.

    A single number is that of all layers, where ``layout`` says how many there are. A question mark stands before
    numbers that do not fit the layout.
    """
    if isinstance(value, Recompute):
        select = tuple((part.pattern, part.num_layers) for part in value.selective)
        value = RecomputeChoice(full=value.full, select=select, communication=value.communication)
    named = [("full", value.full), *((_pattern_text(p), count) for p, count in value.select)]
    named.append(("comm", value.communication))
    return " ".join(f"{name}{separator}{_count_text(count, layout)}" for name, count in named if count) or "none"


def _count_text(count: LayerCount, layout: Layout | None) -> str:
    if isinstance(count, int):
        return "all" if count == ALL_LAYERS else str(count)
    if layout is None:
        return counts_text(count)
    if layout.pp > 1 and count == layout.stage_layers:
        return str(sum(map(sum, count)))
    fits = [len(row) for row in count] == [layout.pp] * layout.num_virtual_stages
    return counts_text(count) if fits else f"?{counts_text(count)}"


def _pattern_text(pattern: str) -> str:
    """Kept readable where it cannot be mistaken for what stands around it."""
    is_simple = len(pattern) <= _MAX_LIST_CHARS and re.fullmatch(r"[^\s:#~][^\s:]*", pattern)
    return f"~{pattern}" if is_simple else f"~#{digest(pattern)[:8]}"


def stage_layers_text(layout: Layout) -> str:
    """``even``, or the layers of every stage."""
    counts = layout.stage_layers
    if layout.pp == 1:
        return "even"
    total = sum(map(sum, counts))
    even = even_split(total, layout.pp, layout.num_virtual_stages, layout.schedule)
    return "even" if counts == even else counts_text(counts)


def steps_text(steps: tuple[int, ...]) -> str:
    """``1-10``; ``off`` for none."""
    return "-".join(map(str, steps)) or "off"


def show_pattern(pattern: Mapping[str, tuple[Any, ...]]) -> str:
    """``tp 2, precision O1-bf16|O2-bf16``."""
    return ", ".join(f"{name} {'|'.join(str(plain(v)) for v in values)}" for name, values in pattern.items())
