"""From knob values to candidates and back, and the candidates that knobs span: enumerated, drawn, and their neighbours.

Valid choices depend on the layout, so layouts come first: legal ones are listed (or a random sample of very many), and
recompute policy, precision, loader and kernels are chosen given the layout.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from orchestrator.space.file_types import layers_of, resolve_recompute, resolve_stage_layers
from orchestrator.space.knobs import KNOBS, CustomKnob, CustomScalar, Knob, chosen, combinations
from orchestrator.space.notation import Features, Scalar
from trials.layout_rules import has_experts, has_latent_attention, holds_plain
from trials.spec import (
    Candidate,
    Kernels,
    Layout,
    Loader,
    LossScale,
    Model,
    Offload,
    Precision,
    Recompute,
    UserModel,
    decoder_of,
)

# Canonical form: converts knob values to candidates and back, so that each candidate has one spelling

Part = TypeVar("Part", Layout, Loader, Kernels, Offload)

_ROWS: Mapping[type, tuple[Knob, ...]] = {
    kind: tuple(knob for knob in KNOBS if knob.part == kind.__name__.lower())
    for kind in (Layout, Loader, Kernels, Offload)
}
"""Knobs of every part of a candidate with several knobs."""


@dataclass(frozen=True, slots=True)
class Rest:
    """A data-parallel degree that uses the devices left by the other axes of ``num_devices``.

    As ``dp_shard``, it does so if something is sharded, and else is 1.
    """

    num_devices: int

    def of(self, taken: int) -> int:
        """Return the remaining devices after ``taken``; if that does not divide, a number that the legality rules
        reject."""
        return max(1, self.num_devices // max(1, taken))


def build_candidate(
    values: Mapping[str, Any],
    model: Model,
    own: Sequence[CustomKnob] = (),
    custom_values: Mapping[str, CustomScalar] = {},
    *,
    devices_per_node: int | None = None,
) -> Candidate:
    """Build the canonical candidate from a full set of knob values, and values of custom knobs."""
    layout = build_layout(values, model, devices_per_node)
    recompute = resolve_recompute(values["recompute"], layers_of(layout, model.num_layers))
    engine = engine_for(values["tp_engine"], model)
    engine = resolve_tp_engine(engine, layout, recomputes_communication=recompute.repeats_gathers)
    return Candidate(
        layout=with_tp_engine(layout, engine),
        micro_batch_size=values["micro_batch_size"],
        recompute=recompute,
        precision=canonical_precision(values["precision"]),
        loader=build_part(Loader, values),
        kernels=build_part(Kernels, values, model),
        offload=build_part(Offload, values),
        own=chosen(own, custom_values),
    )


def knob_values(candidate: Candidate) -> dict[str, Any]:
    """Return the values of all knobs, the inverse of :func:`build_candidate` for canonical candidates."""
    return {knob.name: knob.read(candidate) for knob in KNOBS}


def build_layout(values: Mapping[str, Any], model: Model, devices_per_node: int | None = None) -> Layout:
    """Build the layout in canonical form, with ``auto`` and the layers per stage resolved.

    ``tp_engine`` also depends on the recompute policy and keeps its default, for :func:`with_tp_engine`.
    """
    pp, schedule = values["pp"], values["schedule"]
    chunks = 2 if schedule == "zbv" else values["num_virtual_stages"]
    engine = values["replicate_with"]
    if engine == "auto":
        is_plain = values["tp"] == 1 and (pp == 1 or chunks == 1) and not values["shard_embedding"]
        engine = "ddp" if is_plain else "fsdp2"
    replicate, shard = _data_parallel(values)
    layers = resolve_stage_layers(
        values["stage_layers"], num_layers=model.num_layers, pp=pp, num_virtual_stages=chunks, schedule=schedule
    )
    resolved = {"dp_replicate": replicate, "dp_shard": shard, "replicate_with": engine, "stage_layers": layers}
    if values["ulysses_degree"] == "auto":
        resolved["ulysses_degree"] = _ulysses_degree(values["cp"], values["tp"], model, devices_per_node)
    return build_part(Layout, {**values, **resolved, "tp_engine": Layout().tp_engine})


def _ulysses_degree(cp: int, tp: int, model: Model, devices_per_node: int | None) -> int:
    """Return the most ranks, of those that ``cp`` counts, that can exchange heads, within a node if its size is
    known."""
    decoder = decoder_of(model)
    heads = 0 if decoder is None else math.gcd(decoder.num_heads, decoder.num_kv_heads)
    most = cp if devices_per_node is None else min(cp, devices_per_node // tp)
    fitting = (size for size in range(most, 1, -1) if cp % size == 0 and heads % (tp * size) == 0)
    return next(fitting, 1)


def _data_parallel(values: Mapping[str, Any]) -> tuple[int, int]:
    """Return ``dp_replicate`` and ``dp_shard``, with the axis for the remaining devices resolved."""
    replicate, shard = values["dp_replicate"], values["dp_shard"]
    taken = values["pp"] * values["cp"] * values["tp"]
    if isinstance(shard, Rest):
        rest, others = (replicate, 1) if isinstance(replicate, Rest) else (shard, replicate)
        shard = rest.of(taken * others) if values["zero_stage"] else 1
    return (replicate.of(taken * shard) if isinstance(replicate, Rest) else replicate), shard


def build_part(kind: type[Part], values: Mapping[str, Any], model: Model | None = None) -> Part:
    """Build a part of a candidate in canonical form from its knobs' values. Kernels also depend on the model."""
    return kind(**_canonical(kind, {knob.field: values[knob.name] for knob in _ROWS[kind]}, model))


def canonical_part(part: Part, model: Model | None = None) -> Part:
    """Set every knob without effect in the part to its neutral value. Kernels also depend on the model."""
    fields = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return type(part)(**_canonical(type(part), fields, model))


def _canonical(kind: type, fields: dict[str, Any], model: Model | None) -> dict[str, Any]:
    for knob in _ROWS[kind]:
        if knob.canonical is not None:
            fields[knob.field] = knob.canonical(fields, model)
    if fields.get("compile") == "off":
        fields["backend"] = Kernels().backend  # not set by any knob
    return fields


def engine_for(engine: str, model: Model) -> str:
    """Return the configured engine. User modules follow a plan for tensor parallelism; mixtures of experts and
    latent attention keep some weights whole. Only one engine supports either."""
    if engine != "auto":
        return engine
    if isinstance(model, UserModel):
        return "dtensor"
    return "local" if has_experts(model) or has_latent_attention(model) else engine


def resolve_tp_engine(engine: str, layout: Layout, *, recomputes_communication: bool) -> str:
    """Resolve the engine of tensor parallelism: ``auto`` is ``local`` for layouts that DTensors do not support."""
    if engine != "auto":
        return engine
    needs_local = layout.num_copies > 1 or holds_plain(layout) or recomputes_communication
    return "local" if needs_local else "dtensor"


def with_tp_engine(layout: Layout, engine: Any) -> Layout:
    """Set the engine of a layout with tensor parallelism."""
    return dataclasses.replace(layout, tp_engine=engine) if layout.tp > 1 else layout


def canonical_precision(precision: Precision) -> Precision:
    """Return the precision with O0 as float32, a loss scale only for float16, and its lists sorted."""
    if precision.level == "O0":
        return Precision()
    scale = (precision.loss_scale or LossScale()) if precision.dtype == "float16" else None
    white, black = tuple(sorted(set(precision.white))), tuple(sorted(set(precision.black)))
    wide = tuple(sorted(set(precision.keep_fp32)))
    return dataclasses.replace(precision, loss_scale=scale, white=white, black=black, keep_fp32=wide)


# The search space: every candidate the knobs of a sweep span, once each, in a fixed order

Choices = Mapping[str, tuple[Any, ...]]
"""Values to try of every knob, by its name."""
MAX_SETTINGS = 200_000
"""Most combinations of the knobs of one part of a candidate; more layouts are sampled at random."""


class SpaceTooLargeError(ValueError):
    """Too many combinations of knobs; ``remedy`` names the longest lists."""

    def __init__(self, message: str, *, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Common part of candidates with one layout and micro-batch size."""

    layout: Layout
    micro_batch_size: int
    recomputes: tuple[Recompute, ...]
    """Distinct policies, resolved against the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Every distinct candidate once: per frame, the product of its recompute policies and ``parts``.

    The meaning of recompute and layers per stage depends on the layout, and the engine of tensor parallelism may depend
    on recompute. Everything else is canonical part by part, so removing duplicates per frame and part removes all of
    them.
    """

    frames: tuple[Frame, ...]
    parts: Mapping[str, tuple[Any, ...]]
    """Choices of precision, offload, loader, kernels and custom knobs, by field of Candidate."""
    product_size: int
    """Combinations of choices before duplicates are removed."""

    def __len__(self) -> int:
        return sum(map(self.num_completions, self.frames))

    @property
    def num_duplicates(self) -> int:
        return self.product_size - len(self)

    def num_completions(self, frame: Frame) -> int:
        return len(frame.recomputes) * self.num_choices

    @property
    def num_choices(self) -> int:
        """Return the number of combinations of choices that do not depend on the layout."""
        return math.prod(map(len, self.parts.values()))

    def table(self) -> CandidateTable:
        """Return all candidates, frame by frame, in the order of :meth:`completions`."""
        rows = np.arange(len(self), dtype=np.int64)
        return self.rows_of(self.policies(), rows // self.num_choices, rows % self.num_choices)

    def first_completions(self) -> CandidateTable:
        """Return the first candidate of every frame."""
        starts = np.cumsum([0, *(len(frame.recomputes) for frame in self.frames)])[:-1]
        return self.rows_of(self.policies(), starts, np.zeros(len(starts), dtype=np.int64))

    def policies(self) -> CandidateTable:
        """Return every frame with each of its recompute policies, and the first choice of everything else."""
        base = {name: values[:1] for name, values in self.parts.items()}
        layouts, sizes, recomputes = _Places(), _Places(), _Places()
        for frame in self.frames:
            layout, size = layouts.of(frame.layout), sizes.of(frame.micro_batch_size)
            for policy in frame.recomputes:
                layouts.add(layout)
                sizes.add(size)
                recomputes.add(recomputes.of(policy))
        found = {"layout": layouts, "micro_batch_size": sizes, "recompute": recomputes}
        zeros = np.zeros(len(layouts.codes), dtype=np.int32)
        return CandidateTable(
            {**{name: tuple(places.known) for name, places in found.items()}, **base},
            {**{name: np.array(p.codes, dtype=np.int32) for name, p in found.items()}, **dict.fromkeys(base, zeros)},
        )

    def rows_of(self, policies: CandidateTable, policy: NDArray[np.int64], choice: NDArray[np.int64]) -> CandidateTable:
        """Return candidates by rows of :meth:`policies` and numbers of combinations of choices."""
        values = {name: policies.values[name] for name in ("layout", "micro_batch_size", "recompute")}
        codes = {name: policies.codes[name][policy] for name in values}
        for name, choices in reversed(tuple(self.parts.items())):
            values[name] = choices
            codes[name] = (choice % len(choices)).astype(np.int32)
            choice = choice // len(choices)
        return CandidateTable(values, codes)

    def completions(self, frame: Frame) -> Iterator[Candidate]:
        """Yield the candidates with the layout and micro-batch size of ``frame``."""
        layout, micro_batch_size = frame.layout, frame.micro_batch_size
        for recompute, *values in product(frame.recomputes, *self.parts.values()):
            fields = dict(zip(self.parts, values, strict=True))
            yield Candidate(layout=layout, micro_batch_size=micro_batch_size, recompute=recompute, **fields)

    def __iter__(self) -> Iterator[Candidate]:
        for frame in self.frames:
            yield from self.completions(frame)


class _Places:
    """Distinct values in order of appearance, and indices into them."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}
        self.codes: list[int] = []

    def of(self, value: Any) -> int:
        return self.known.setdefault(value, len(self.known))

    def add(self, code: int) -> None:
        self.codes.append(code)


def make_space(
    choices: Choices, model: Model, own: Sequence[CustomKnob] = (), *, devices_per_node: int | None = None
) -> Space:
    """Build the space of ``choices`` and the custom knobs ``own`` for ``model``; of more than ``MAX_SETTINGS`` layouts,
    a random sample.

    Raises:
        SpaceTooLargeError: the knobs of the loader, of the kernels or custom knobs have more combinations.
    """
    for part in ("loader", "kernels"):
        if (size := _num_settings(choices, part)) > MAX_SETTINGS:
            raise _too_large(part, {name: len(choices[name]) for name in _knobs_of(part)}, size)
    own_sizes = {knob.name: len(knob.values) for knob in own}
    if (size := math.prod(own_sizes.values())) > MAX_SETTINGS:
        raise _too_large("workload", own_sizes, size)
    parts = {
        "precision": _distinct(choices["precision"], canonical_precision),
        "offload": _distinct(_settings(choices, "offload"), lambda values: build_part(Offload, values)),
        "loader": _distinct(_settings(choices, "loader"), lambda values: build_part(Loader, values)),
        "kernels": _distinct(_settings(choices, "kernels"), lambda values: build_part(Kernels, values, model)),
        "own": tuple(dict.fromkeys(combinations(own))),
    }
    frames = tuple(
        Frame(layout=layout, micro_batch_size=micro_batch_size, recomputes=recomputes)
        for layout, recomputes in _layouts(choices, model, devices_per_node).items()
        for micro_batch_size in choices["micro_batch_size"]
    )
    product_size = math.prod([*map(len, choices.values()), *own_sizes.values()])
    return Space(frames=frames, parts=parts, product_size=product_size)


def _layouts(choices: Choices, model: Model, devices_per_node: int | None) -> dict[Layout, tuple[Recompute, ...]]:
    """Return the distinct layouts, each with its distinct recompute policies."""
    found: dict[Layout, dict[Recompute, None]] = {}
    num_layers = model.num_layers
    engines = tuple(dict.fromkeys(engine_for(engine, model) for engine in choices["tp_engine"]))
    settings = _settings(choices, "layout")
    without_engine = _distinct(settings, lambda values: build_layout(values, model, devices_per_node))
    for layout, engine in product(without_engine, engines):
        present = layers_of(layout, num_layers)
        for choice in choices["recompute"]:
            policy = resolve_recompute(choice, present)
            resolved = resolve_tp_engine(engine, layout, recomputes_communication=policy.repeats_gathers)
            found.setdefault(with_tp_engine(layout, resolved), {})[policy] = None
    return {layout: tuple(policies) for layout, policies in found.items()}


def _knobs_of(part: str) -> list[str]:
    return [knob.name for knob in KNOBS if knob.part == part]


def _num_settings(choices: Choices, part: str) -> int:
    return math.prod(len(choices[name]) for name in _knobs_of(part))


def _settings(choices: Choices, part: str) -> Iterator[dict[str, Any]]:
    """Yield the combinations of the knobs of one part of a candidate: all, or ``MAX_SETTINGS`` at random."""
    names = _knobs_of(part)
    size = _num_settings(choices, part)
    if size <= MAX_SETTINGS:
        for values in product(*(choices[name] for name in names)):
            yield dict(zip(names, values, strict=True))
        return
    for number in sorted(random.Random(0).sample(range(size), MAX_SETTINGS)):
        setting = {}
        for name in reversed(names):
            number, place = divmod(number, len(choices[name]))
            setting[name] = choices[name][place]
        yield setting


def _distinct(values: Sequence[Any] | Iterator[Any], build: Callable[[Any], Any]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(build(value) for value in values))


def _too_large(part: str, sizes: Mapping[str, int], size: int) -> SpaceTooLargeError:
    largest = sorted(sizes, key=lambda name: sizes[name], reverse=True)[:3]
    shown = ", ".join(f"{name} ({sizes[name]})" for name in largest)
    return SpaceTooLargeError(
        f"the knobs of the {part} have {size:,} combinations, more than {MAX_SETTINGS:,}",
        remedy=f"Shorten the longest lists: {shown}.",
    )


# A space with too many candidates to list: its legal layouts, and candidates drawn or looked up one by one

MAX_ENUMERATED = 1_000_000
"""Most candidates of legal layouts that are listed and ranked individually."""
SAMPLE_SIZE = 20_000
"""Candidates sampled from a larger space without a cost model."""
MAX_MISSES = 64
"""Consecutive illegal samples after which a space counts as empty."""

Encode = Callable[[Mapping[str, Scalar]], Mapping[str, int]]
"""Whole numbers for knob values, by name."""


@dataclass(frozen=True, kw_only=True)
class LargeSpace:
    """Legal candidates without a list of them."""

    space: Space
    """Only frames that no rule on layouts rejects, at least one."""
    is_legal: Callable[[Candidate], bool]
    is_modelled: bool = False
    """Whether the cost model drew the candidates that stand for the space."""

    @property
    def message(self) -> str:
        """Describe to users how the size of the space is handled."""
        what = "those listed were sampled where the cost model predicts the best"
        if not self.is_modelled:
            what = "those listed were sampled at random, and conditional TPE explores further ones"
        return (
            f"too large to enumerate: {self.space.product_size:,} combinations of choices, {len(self.space):,} "
            f"candidates in {len(self.space.frames):,} layouts; {what}"
        )

    def draw(self, rng: random.Random) -> Candidate | None:
        """Draw a legal candidate; all layouts are equally likely. None if many samples found none."""
        for _ in range(MAX_MISSES):
            candidate = self._completion(rng.choice(self.space.frames), rng)
            if self.is_legal(candidate):
                return candidate
        return None

    def sample(self, num: int, seed: int) -> CandidateTable:
        """Draw up to ``num`` distinct legal candidates, the same for the same seed."""
        rng = random.Random(seed)
        found: dict[Candidate, None] = {}
        for _ in range(2 * num):
            candidate = self.draw(rng)
            if candidate is None or len(found) == num:
                break
            found[candidate] = None
        return CandidateTable.of(found)

    def _completion(self, frame: Frame, rng: random.Random) -> Candidate:
        fields = {name: rng.choice(values) for name, values in self.space.parts.items()}
        return Candidate(
            layout=frame.layout,
            micro_batch_size=frame.micro_batch_size,
            recompute=rng.choice(frame.recomputes),
            **fields,
        )


class Lookup:
    """Finds the candidate of a large space with the knobs nearest to given ones, part by part.

    Args:
        encode: knob values to whole numbers.
        spans: by knob, the largest difference of its numbers if ordered, else 0.
    """

    def __init__(self, large: LargeSpace, features: Features, encode: Encode, spans: Mapping[str, float]) -> None:
        self._large = large
        self._features, self._encode = features, encode
        self._names = tuple(spans)
        self._spans = np.array(list(spans.values()))

    def nearest(self, point: Mapping[str, int], rng: random.Random) -> Candidate:
        """Return the layout nearest to ``point``, with the nearest choice of every other part; ties at random.

        The distance is a sum over knobs, and parts share no knob, so the nearest parts form the nearest candidate.
        """
        wanted = np.array([point[name] for name in self._names])
        frame = self._large.space.frames[self._closest(self._frames, wanted, rng)]
        base = _first(frame, self._large.space)
        policies = self._codes(replace(base, recompute=policy) for policy in frame.recomputes)
        recompute = frame.recomputes[self._closest(policies, wanted, rng)]
        fields = {
            name: values[self._closest(self._parts[name], wanted, rng)]
            for name, values in self._large.space.parts.items()
        }
        return replace(base, recompute=recompute, **fields)

    def _closest(self, codes: NDArray[np.int64], wanted: NDArray[np.int64], rng: random.Random) -> int:
        misses = np.abs(codes - wanted)
        distance = np.where(self._spans > 0, misses / np.maximum(self._spans, 1), misses > 0).sum(axis=1)
        return int(rng.choice(np.flatnonzero(distance <= distance.min() + 1e-9)))

    @functools.cached_property
    def _frames(self) -> NDArray[np.int64]:
        space = self._large.space
        return self._codes(_first(frame, space) for frame in space.frames)

    @functools.cached_property
    def _parts(self) -> Mapping[str, NDArray[np.int64]]:
        space = self._large.space
        base = _first(space.frames[0], space)
        return {
            name: self._codes(replace(base, **{name: value}) for value in values)
            for name, values in space.parts.items()
        }

    def _codes(self, candidates: Iterator[Candidate]) -> NDArray[np.int64]:
        rows = [self._encode(self._features(candidate)) for candidate in candidates]
        return np.array([[row[name] for name in self._names] for row in rows], dtype=np.int64)


def _first(frame: Frame, space: Space) -> Candidate:
    return next(space.completions(frame))


def without_effect(candidate: Candidate) -> frozenset[str]:
    """Return the knobs without effect in this candidate because of another knob. Conditional search leaves them
    open."""
    layout, loader = candidate.layout, candidate.loader
    has_workers = loader.num_workers > 0
    conditions: Sequence[tuple[bool, tuple[str, ...]]] = (
        (layout.pp > 1, ("schedule", "num_virtual_stages", "stage_layers")),
        (layout.dp_shard > 1, ("zero_stage",)),
        (layout.zero_stage >= 2, ("gradient_reduction",)),
        (layout.dp_replicate * layout.cp > 1 and layout.zero_stage == 0, ("replicate_with",)),
        (layout.dp * layout.cp > 1, ("shard_embedding",)),
        (layout.tp > 1, ("sequence_parallel", "tp_engine", "num_copies")),
        (layout.cp > 1, ("cp_method",)),
        (layout.cp_method == "hybrid", ("ulysses_degree",)),
        (has_workers, ("prefetch_factor",)),
        (has_workers or loader.tuning is not None, ("persistent_workers",)),
        (candidate.kernels.compile != "off", ("compile_mode", "dynamic")),
    )
    return frozenset(name for is_met, names in conditions if not is_met for name in names)


# Neighbours: legal candidates with small differences from one, in a space too large to list

LAYOUT_FIELDS = tuple(field.name for field in fields(Layout))
MAX_FIELDS = 4
"""Most fields in which the layouts of neighbours differ: pp, its schedule, chunks and layers, or two degrees."""


def neighbours(large: LargeSpace, candidate: Candidate) -> list[Candidate]:
    """Return the neighbours of ``candidate``: another layout or micro-batch size, or another choice of one other
    part."""
    found = dict.fromkeys(_near(large, candidate))
    found.pop(candidate, None)
    return [near for near in found if large.is_legal(near)]


def _near(large: LargeSpace, candidate: Candidate) -> Iterator[Candidate]:
    for name, values in large.space.parts.items():
        for value in values:
            yield replace(candidate, **{name: value})
    for frame in large.space.frames:
        is_own = (frame.layout, frame.micro_batch_size) == (candidate.layout, candidate.micro_batch_size)
        if not is_own and not _is_near(frame, candidate):
            continue
        for policy in frame.recomputes:
            if is_own or _kind(policy) == _kind(candidate.recompute):
                yield replace(candidate, layout=frame.layout, micro_batch_size=frame.micro_batch_size, recompute=policy)


def _is_near(frame: Frame, candidate: Candidate) -> bool:
    differing = [name for name in LAYOUT_FIELDS if getattr(frame.layout, name) != getattr(candidate.layout, name)]
    return len(differing) <= MAX_FIELDS


def _kind(recompute: Recompute) -> tuple[bool, tuple[str, ...], bool]:
    """Return the kind of a recompute policy, without numbers of layers, which follow from the layout."""
    patterns = tuple(part.pattern for part in recompute.selective)
    return bool(recompute.full), patterns, bool(recompute.communication)
