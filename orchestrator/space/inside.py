"""Section ``space.inside``: knobs without an option in the user's program. The hook sets them inside the program.

Built-in knobs are only set in a different way: names, cost model, dominance and the loss gate treat them as usual. The
others are custom knobs named ``inside:dotted.key`` after their key in the hook's file.

Values that a program refused are not tried again: :class:`Refusals`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, create_model

from cluster.candidate_table import FIELDS, CandidateTable
from orchestrator.space.file_types import (
    ALL_LAYERS,
    CUDNN_ON,
    OneOrMany,
    RecomputeChoice,
    Section,
    fault,
    precision_text,
)
from orchestrator.space.knobs import AS_IS, INSIDE, KNOBS, CustomKnob, CustomValues, Knob, is_inside
from trials.spec import Candidate, LoaderTuning, Precision

_ROWS = {knob.name: knob for knob in KNOBS}
MICRO_BATCH = "micro_batch_size"
BATCH_ARGUMENTS = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Fields of ``TrainingArguments`` that together set :data:`MICRO_BATCH`."""


def _values(value_type: Any) -> Any:
    return Annotated[tuple[value_type, ...], OneOrMany()] | None


def _row(name: str, note: str, is_fit: Callable[[Any], bool] | None = None, remedy: str = "") -> Any:
    """Define a built-in knob as a key of the section, limited to values that can be set inside a program."""

    def check(value: Any) -> Any:
        if is_fit is not None and not is_fit(value):
            raise fault(None, f"{name} cannot be set to this value by the hook", remedy)
        return value

    return _values(Annotated[_ROWS[name].type, AfterValidator(check)]), Field(default=None, description=note)


def _own(value_type: Any, note: str) -> Any:
    return _values(Literal["as_is"] | value_type), Field(default=None, description=note)


def _is_all_or_none(value: RecomputeChoice) -> bool:
    return value in (RecomputeChoice(), RecomputeChoice(full=ALL_LAYERS))


_FIELDS: dict[str, Any] = {
    MICRO_BATCH: _row(
        MICRO_BATCH,
        "The number of samples in a micro-batch of transformers' `Trainer`. Gradient accumulation changes "
        "with it, so that the global batch stays the same.",
    ),
    "num_workers": _row(
        "num_workers", "The number of workers of the `DataLoader` that feeds training. Requires a map-style dataset."
    ),
    "dataloader": _row(
        "dataloader",
        "`auto` finds the number of workers and the prefetch factor by hill climbing while the program starts.",
        lambda value: value in (None, LoaderTuning()),
        "Use 'manual' or 'auto'.",
    ),
    "prefetch_factor": _row("prefetch_factor", "The number of batches that this `DataLoader` prefetches per worker."),
    "pin_memory": _row("pin_memory", "Whether this `DataLoader` copies batches into page-locked memory."),
    "persistent_workers": _row("persistent_workers", "Whether this `DataLoader` keeps its workers between epochs."),
    "precision": _row(
        "precision",
        "`O0`, or `O1` to run the forward pass under autocast to bfloat16.",
        lambda value: value in (Precision(), Precision(level="O1", dtype="bfloat16")),
        "Use 'O0' or 'O1'.",
    ),
    "recompute": _row(
        "recompute",
        "`full` recomputes the repeated block in the backward pass.",
        _is_all_or_none,
        "Use 'none' or 'full'.",
    ),
    "compile": _row("compile", "Whether to compile the repeated block or the model."),
    "attention": _row("attention", "The kernel of `scaled_dot_product_attention`."),
    "matmul_precision": _row("matmul_precision", "PyTorch's precision for fp32 matrix products."),
    "cudnn_benchmark": _row(
        "cudnn_benchmark",
        "Whether cuDNN benchmarks its kernels.",
        lambda value: value in ((), CUDNN_ON),
        "Use 'off' or 'on'.",
    ),
    "memory_format": _row(
        "memory_format",
        "`nhwc` puts the model and its inputs into the channels-last format.",
        lambda value: value != "auto",
        "Use 'nchw' or 'nhwc'.",
    ),
    "ddp_bucket_mb": _own(
        Annotated[float, Field(gt=0, le=2**20)],
        "The size of the gradient buckets of `DistributedDataParallel`, in MiB.",
    ),
    "ddp_gradient_as_bucket_view": _own(bool, "Whether gradients are views into these buckets."),
    "ddp_static_graph": _own(bool, "Whether `DistributedDataParallel` assumes the same graph in every step."),
    "allocator": _own(Annotated[str, Field(min_length=1)], "The value of `PYTORCH_CUDA_ALLOC_CONF`."),
}
_Knobs: Any = create_model("_Knobs", __base__=Section, **_FIELDS)


def _is_field(name: str) -> str:
    if not name.isidentifier():
        raise fault(None, f"{name[:60]!r} is not a field of TrainingArguments", "Use a field name, such as bf16.")
    return name


class InsideSection(_Knobs):  # type: ignore[misc]
    """The hook sets these knobs before the first forward pass (see docs/your-own-training.md). A built-in knob with the
    value in `baseline` changes nothing, and neither does `as_is` for the other knobs."""

    training_arguments: Annotated[
        dict[Annotated[str, AfterValidator(_is_field)], CustomValues], Field(max_length=64)
    ] = Field(default={}, description="Fields of transformers' `TrainingArguments` that the program sets in code.")

    def choices(self) -> dict[str, tuple[Any, ...]]:
        """Return the values to try of the section's built-in knobs."""
        given = {name: getattr(self, name) for name in BUILT_IN}
        return {name: values for name, values in given.items() if values is not None}

    def custom_knobs(self) -> tuple[CustomKnob, ...]:
        """Return the section's other knobs as custom knobs."""
        given = {name: getattr(self, name) for name in OTHERS}
        given |= {f"{ARGUMENTS}.{name}": values for name, values in self.training_arguments.items()}
        return tuple(
            CustomKnob(name=f"{INSIDE}:{key}", values=values) for key, values in given.items() if values is not None
        )


ARGUMENTS = "training_arguments"
BUILT_IN = tuple(name for name in InsideSection.model_fields if name in _ROWS)
"""Knobs of candidates that can be set inside a program."""
OTHERS = tuple(name for name in InsideSection.model_fields if name not in (*BUILT_IN, ARGUMENTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideBaseline:
    """The unchanged program's values of knobs that can be set inside it."""

    values: Mapping[str, Any] = field(default_factory=dict)
    """The baseline's value of each built-in knob that is set inside the program."""
    global_batch_size: int = 1
    num_microbatches: int = 1
    """Micro-batches of an optimiser step on a rank."""


NOTHING_INSIDE = InsideBaseline()
"""Baseline of a sweep that sets nothing inside a program."""


def knobs_set(candidate: Candidate, today: InsideBaseline) -> dict[str, Any]:
    """Return the hook's settings for a candidate, by the keys of its file; empty if the program is unchanged."""
    changed = {name: value for name, was in today.values.items() if (value := _ROWS[name].read(candidate)) != was}
    changed.pop(MICRO_BATCH, None)
    if not candidate.loader.num_workers:
        changed = {name: value for name, value in changed.items() if name not in _OF_WORKERS or value is True}
    found = dict(_written(changed))
    if batch := _batch_set(candidate, today):
        found[ARGUMENTS] = batch
    for choice in candidate.own:
        if choice.name.startswith(f"{INSIDE}:"):
            key, _, field = choice.name.removeprefix(f"{INSIDE}:").partition(".")
            value = choice.value
            value = int(value) if isinstance(value, float) and value.is_integer() else value
            if field:
                found.setdefault(key, {})[field] = value
            else:
                found[key] = value
    return found


def _batch_set(candidate: Candidate, today: InsideBaseline) -> dict[str, int]:
    """Return the fields that divide the global batch like the candidate; empty if the program does so itself."""
    if MICRO_BATCH not in today.values:
        return {}
    sizes = (candidate.micro_batch_size, max(1, candidate.num_microbatches(today.global_batch_size)))
    is_changed = sizes != (today.values[MICRO_BATCH], today.num_microbatches)
    return dict(zip(BATCH_ARGUMENTS, sizes, strict=True)) if is_changed else {}


_OF_WORKERS = ("prefetch_factor", "persistent_workers")
"""Knobs that have an effect only with loading processes."""


def _written(changed: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in changed.items():
        if name == "dataloader":
            if value is not None:
                yield "num_workers", "auto"
        elif name == "num_workers" and changed.get("dataloader") is not None:
            continue
        elif name == "precision":
            yield name, precision_text(value)
        elif name == "recompute":
            yield name, "full" if value.full else "none"
        elif name == "cudnn_benchmark":
            yield name, value != ()
        else:
            yield name, value


def section_of(candidate: Candidate, named: Mapping[str, Any]) -> dict[str, Any]:
    """Write the candidate as a section, limited to the knobs of the section ``named``."""
    own = {choice.name: choice.value for choice in candidate.own}
    found: dict[str, Any] = {}
    for name, given in named.items():
        if name == ARGUMENTS:
            found[name] = {field: own.get(f"{INSIDE}:{name}.{field}", AS_IS) for field in given}
        elif name in BUILT_IN:
            found[name] = _as_written(name, _ROWS[name].read(candidate))
        else:
            found[name] = own.get(f"{INSIDE}:{name}", AS_IS)
    return found


def _as_written(name: str, value: Any) -> Any:
    if name == "dataloader":
        return "manual" if value is None else "auto"
    if name == "precision":
        return value.level
    if name == "recompute":
        return "full" if value.full else "none"
    if name == "cudnn_benchmark":
        return "on" if value else "off"
    return value


# Consequences of a refusal, which is a property of the program as its command starts it

_SHAPE_THE_PROGRAM = ("compile", ARGUMENTS)
"""Inside knobs that can cause the refusal of others: they change the program's behavior."""
_DEPENDS_ON_BATCH = ("ddp_static_graph",)
"""Knobs refused by a program that accumulates gradients, which depends on its micro-batch size."""
_WHATEVER_VALUE = ("prefetch_factor", "ddp_bucket_mb", "allocator")
"""Knobs with many values, refused because the program lacks something, not because of a value."""


class Refusals:
    """Rules out candidates with a knob value that the program refused, if they start the program in the same way."""

    def __init__(self, candidates: Sequence[Candidate], today: InsideBaseline) -> None:
        self._table = CandidateTable.of(candidates)
        self._today = today

    @functools.cached_property
    def _set(self) -> tuple[list[dict[str, Any]], NDArray[np.int32]]:
        """Return the distinct settings of the hook, and each row's index among them."""
        reads = {"loader", "own", *(_ROWS[name].part for name in self._today.values)}
        if MICRO_BATCH in self._today.values:
            reads.add("layout")
        return self._table.each(sorted(reads), lambda candidate: knobs_set(candidate, self._today))

    def add(self, witness: Candidate, refused: Sequence[str]) -> dict[int, str]:
        """Return the rule id, ``refused-<knob>``, of each candidate ruled out, by row.

        Args:
            refused: the witness's refused knobs, by their keys in the hook's file.
        """
        wanted, found = knobs_set(witness, self._today), dict[int, str]()
        for name in refused:
            if name not in wanted:
                continue
            values, places = self._set
            alike = np.array([_is_alike(name, wanted[name], one.get(name)) for one in values], dtype=bool)[places]
            for row in np.flatnonzero(alike & self._starts_alike(witness, name)).tolist():
                found.setdefault(row, f"refused-{name.replace('_', '-')}")
        return found

    def _starts_alike(self, witness: Candidate, name: str) -> NDArray[np.bool_]:
        """Return by row whether the candidate agrees with the witness in everything that may have caused the refusal of
        ``name``."""
        free = {*self._today.values, *_OF_WORKERS, MICRO_BATCH} - set(_SHAPE_THE_PROGRAM)
        if "precision" in self._today.values:
            free.update(knob.name for knob in KNOBS if knob.part == "precision")
        if name in _DEPENDS_ON_BATCH:
            free.discard(MICRO_BATCH)
        alike = np.ones(len(self._table), dtype=bool)
        for part in FIELDS:
            rows = [knob for knob in KNOBS if knob.part == part and knob.name not in free]
            described = _custom_of_command if part == "own" else _described(rows)
            values, places = self._table.each((part,), described)
            wanted = described(witness)
            alike &= np.array([one == wanted for one in values], dtype=bool)[places]
        return alike


def _described(rows: Sequence[Knob]) -> Callable[[Candidate], tuple[Any, ...]]:
    return lambda candidate: tuple(knob.read(candidate) for knob in rows)


def _custom_of_command(candidate: Candidate) -> tuple[Any, ...]:
    """Return custom knobs in the command, and inside knobs that change the program's behavior."""
    arguments = f"{INSIDE}:{ARGUMENTS}."
    return tuple(one for one in candidate.own if not is_inside(one.name) or one.name.startswith(arguments))


def _is_alike(name: str, refused: Any, value: Any) -> bool:
    """Whether a value of the knob is refused if another one was. None: the candidate does not set the knob."""
    if value is None:
        return False
    if name == "num_workers" and refused != "auto":  # one worker may work if several do not
        return bool(value == "auto" or value >= refused > 0 or value == refused)
    return name in _WHATEVER_VALUE or bool(value == refused)
