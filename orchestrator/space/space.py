"""The search space: every candidate the knobs of a sweep span, once each, in a fixed order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from orchestrator.config.sweep import SweepSpec
from orchestrator.errors import ConfigError
from orchestrator.space.knobs import KNOBS
from orchestrator.space.knobs.canonical import (
    build_kernels,
    build_layout,
    build_loader,
    canonical_precision,
    resolve_tp_engine,
    with_tp_engine,
)
from orchestrator.space.knobs.layer_choices import layers_of, resolve_recompute
from orchestrator.space.knobs.text import (
    plain,
    plain_knob,
    precision_text,
    recompute_text,
    stage_layers_text,
    steps_text,
)
from trials.spec import Candidate, Kernels, Layout, Loader, Recompute

MAX_SETTINGS = 200_000
"""Combinations of the knobs of one part of a candidate that are looked at; of more layouts, a random part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What candidates of one layout and micro-batch size share."""

    layout: Layout
    micro_batch_size: int
    recomputes: tuple[Recompute, ...]
    """Distinct policies, resolved against the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Every distinct candidate once: per frame, the product of its recompute policies and ``parts``.

    What recompute and layers per stage mean depends on the layout, and the engine of tensor parallelism may depend on
    recompute; all else is canonical part by part, so removing duplicates per frame and part by part removes all.
    """

    frames: tuple[Frame, ...]
    parts: Mapping[str, tuple[Any, ...]]
    """Choices of precision, loader and kernels, by field of Candidate."""
    product_size: int
    """Combinations of choices before duplicates are removed."""

    def __len__(self) -> int:
        return sum(map(self.num_completions, self.frames))

    @property
    def num_duplicates(self) -> int:
        return self.product_size - len(self)

    def num_completions(self, frame: Frame) -> int:
        return len(frame.recomputes) * math.prod(map(len, self.parts.values()))

    def completions(self, frame: Frame) -> Iterator[Candidate]:
        """Candidates that share layout and micro-batch size with ``frame``."""
        layout, micro_batch_size = frame.layout, frame.micro_batch_size
        for recompute, *values in product(frame.recomputes, *self.parts.values()):
            fields = dict(zip(self.parts, values, strict=True))
            yield Candidate(layout=layout, micro_batch_size=micro_batch_size, recompute=recompute, **fields)

    def __iter__(self) -> Iterator[Candidate]:
        for frame in self.frames:
            yield from self.completions(frame)


def make_space(spec: SweepSpec) -> Space:
    """The space of a sweep: all of it, but for layouts where more than ``MAX_SETTINGS`` are described.

    Raises:
        ConfigError: when the knobs of the loader or of the kernels span more combinations than that.
    """
    choices = spec.choices
    for part in ("loader", "kernels"):
        if (size := _num_settings(choices, part)) > MAX_SETTINGS:
            raise _too_large(spec, part, size)
    model = spec.to_workload().model
    parts = {
        "precision": _distinct(choices["precision"], canonical_precision),
        "loader": _distinct(_settings(choices, "loader"), build_loader),
        "kernels": _distinct(_settings(choices, "kernels"), lambda values: build_kernels(values, model)),
    }
    frames = tuple(
        Frame(layout=layout, micro_batch_size=micro_batch_size, recomputes=recomputes)
        for layout, recomputes in _layouts(choices, model.num_layers).items()
        for micro_batch_size in choices["micro_batch_size"]
    )
    return Space(frames=frames, parts=parts, product_size=math.prod(map(len, choices.values())))


def _layouts(choices: Mapping[str, tuple[Any, ...]], num_layers: int) -> dict[Layout, tuple[Recompute, ...]]:
    """Distinct layouts with the distinct recompute policies that go with each."""
    found: dict[Layout, dict[Recompute, None]] = {}
    without_engine = _distinct(_settings(choices, "layout"), lambda values: build_layout(values, num_layers))
    for layout, engine in product(without_engine, choices["tp_engine"]):
        present = layers_of(layout, num_layers)
        for choice in choices["recompute"]:
            policy = resolve_recompute(choice, present)
            resolved = resolve_tp_engine(engine, layout, recomputes_communication=policy.communication != ())
            found.setdefault(with_tp_engine(layout, resolved), {})[policy] = None
    return {layout: tuple(policies) for layout, policies in found.items()}


def _knobs_of(part: str) -> list[str]:
    return [knob.name for knob in KNOBS if knob.part == part]


def _num_settings(choices: Mapping[str, tuple[Any, ...]], part: str) -> int:
    return math.prod(len(choices[name]) for name in _knobs_of(part))


def _settings(choices: Mapping[str, tuple[Any, ...]], part: str) -> Iterator[dict[str, Any]]:
    """Combinations of the knobs that make up one part of a candidate: all, or ``MAX_SETTINGS`` drawn at random."""
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


def _too_large(spec: SweepSpec, part: str, size: int) -> ConfigError:
    largest = sorted(_knobs_of(part), key=lambda name: len(spec.choices[name]), reverse=True)[:3]
    shown = ", ".join(f"{name} ({len(spec.choices[name])})" for name in largest)
    return spec.error(
        ("space",),
        f"the knobs of the {part} span {size:,} combinations, more than {MAX_SETTINGS:,}",
        f"Shorten the longest lists: {shown}.",
    )


def short_name(candidate: Candidate) -> str:
    """Compact and different for different candidates, like ``dp2 z3x2 tp2sp mbs4 full4 O1-bf16 w2``.

    ``pp2 interleavedv2 L5,4/4,3`` is a pipeline with two chunks per rank and uneven layers; ``dp2f`` replicates with
    FSDP2, ``emb`` shards the embedding, ``cp2u`` is Ulysses, ``tp2splc2`` has sequence parallelism, the local engine
    and two copies. ``w2p4`` has a prefetch factor of 4.
    """
    words = [*_layout_words(candidate.layout), f"mbs{candidate.micro_batch_size}"]
    if candidate.recompute != Recompute():
        words.append(recompute_text(candidate.recompute, candidate.layout).replace("full:", "full").replace(" ", "+"))
    words.append(precision_text(candidate.precision))
    words += _loader_words(candidate.loader)
    words += _kernel_words(candidate.kernels)
    return " ".join(words)


def _layout_words(layout: Layout) -> Iterator[str]:
    if layout.pp > 1:
        yield f"pp{layout.pp}"
        has_chunks = layout.num_virtual_stages > 1 and layout.schedule != "zbv"
        yield layout.schedule + (f"v{layout.num_virtual_stages}" if has_chunks else "")
        if (split := stage_layers_text(layout)) != "even":
            yield f"L{split}"
    if layout.dp_replicate > 1 or layout.world_size == 1 or layout.replicate_with == "fsdp2":
        yield f"dp{layout.dp_replicate}" + ("f" if layout.replicate_with == "fsdp2" else "")
    if layout.dp_shard > 1:
        yield f"z{layout.zero_stage}x{layout.dp_shard}"
    if layout.shard_embedding:
        yield "emb"
    if layout.cp > 1:
        yield f"cp{layout.cp}" + ("u" if layout.cp_method == "ulysses" else "")
    if layout.tp > 1:
        engine = "l" if layout.tp_engine == "local" else ""
        copies = "c2" if layout.num_copies > 1 else ""
        yield f"tp{layout.tp}" + ("sp" if layout.sequence_parallel else "") + engine + copies


def _loader_words(loader: Loader) -> Iterator[str]:
    if loader.num_workers:
        yield f"w{loader.num_workers}" + (f"p{loader.prefetch_factor}" if loader.prefetch_factor != 2 else "")
    if loader.tuning is not None:
        yield f"w-{plain(loader.tuning)}"
    flags = {"pin": loader.pin_memory, "keep": loader.persistent_workers, "fullbatch": loader.full_batch}
    yield from (word for word, is_on in flags.items() if is_on)


def _kernel_words(kernels: Kernels) -> Iterator[str]:
    if kernels.compile != "off":
        default = Kernels()
        mode = f"-{kernels.compile_mode}" if kernels.compile_mode != default.compile_mode else ""
        backend = f"-{kernels.backend}" if kernels.backend != default.backend else ""
        yield ("compile" if kernels.compile == "block" else "compile-model") + mode + backend
    if kernels.attention != "auto":
        yield f"attn-{kernels.attention}"
    if kernels.matmul_precision != "highest":
        yield f"matmul-{kernels.matmul_precision}"
    if kernels.cudnn_tuning_range:
        yield f"cudnn{steps_text(kernels.cudnn_tuning_range)}"
    if kernels.memory_format != "nchw":
        yield kernels.memory_format if kernels.memory_format == "nhwc" else "format-auto"


def flat_params(candidate: Candidate) -> dict[str, str | int | float | bool]:
    """Knob values as scalars, plus ``world_size``: parameters of a record, features of a search."""
    params = {knob.name: plain_knob(knob.name, knob.read(candidate), candidate) for knob in KNOBS}
    return {"world_size": candidate.layout.world_size, **params}


def diff(candidate: Candidate, baseline: Candidate) -> dict[str, tuple[Any, Any]]:
    """Knobs in which the two differ: name to (value in the baseline, value in the candidate), as scalars."""
    before, after = flat_params(baseline), flat_params(candidate)
    return {name: (before[name], after[name]) for name in after if before[name] != after[name]}
