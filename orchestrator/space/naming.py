"""Names of candidates, short and in full, and how two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orchestrator.space.knobs import KNOBS
from orchestrator.space.knobs.text import (
    plain,
    plain_knob,
    precision_text,
    recompute_text,
    stage_layers_text,
    steps_text,
)
from trials.spec import Candidate, Kernels, Layout, Loader, Recompute

Scalar = str | int | float | bool
Features = Callable[[Candidate], Mapping[str, Scalar]]
"""Flat description of a candidate: knob values by name, like :func:`flat_params`."""


def describe(candidate: Candidate) -> dict[str, Any]:
    """Key, short name and knobs of a candidate: its part of every JSON document."""
    return {
        "config_key": candidate.config_key,
        "short_name": short_name(candidate),
        "params": flat_params(candidate),
    }


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


def diff(candidate: Candidate, baseline: Candidate) -> dict[str, tuple[Any, Any]]:
    """Knobs in which the two differ: name to (value in the baseline, value in the candidate), as scalars."""
    before, after = flat_params(baseline), flat_params(candidate)
    return {name: (before[name], after[name]) for name in after if before[name] != after[name]}


def flat_params(candidate: Candidate) -> dict[str, Scalar]:
    """Knob values as scalars, plus ``world_size``: parameters of a record, features of a search."""
    params = {knob.name: plain_knob(knob.name, knob.read(candidate), candidate) for knob in KNOBS}
    return {"world_size": candidate.layout.world_size, **params}


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
