"""Legality rules on whole candidates: recompute, kernels, precision, data reading. Standard library only."""

from __future__ import annotations

from trials.legality.layout import holds_plain, make_rules, shape_problem
from trials.legality.pattern import pattern_problem
from trials.spec import Candidate, Counts, HuggingFaceModel, LlamaModel, LossScale, Workload

FP32_MAX = (2.0 - 2.0**-23) * 2.0**127
"""Largest finite fp32 number."""
FP32_TINY = 2.0**-126
"""Smallest fp32 number whose inverse is one too; a loss scale multiplies and divides in fp32."""


def _recompute_shape(workload: Workload, candidate: Candidate) -> str | None:
    layout, recompute = candidate.layout, candidate.recompute
    present = layout.stage_layers if layout.pp > 1 else ((workload.num_layers,),)
    parts = [("full", recompute.full), ("communication", recompute.communication)]
    parts += [(f"select of {part.pattern}", part.num_layers) for part in recompute.selective]
    for name, counts in parts:
        if counts == ():
            continue
        if problem := shape_problem(counts, layout):
            return f"recompute: {name} {problem}"
        if shape_problem(present, layout) is None and not _at_most(counts, present):
            return f"recompute: {name} counts {_text(counts)} layers where there are {_text(present)}"
    return None


def _recompute_patterns(_workload: Workload, candidate: Candidate) -> str | None:
    patterns = [part.pattern for part in candidate.recompute.selective]
    if len(set(patterns)) != len(patterns):
        return "recompute: a pattern stands twice"
    return next((problem for problem in map(pattern_problem, patterns) if problem), None)


def _recompute_with_compile(_workload: Workload, candidate: Candidate) -> str | None:
    recompute = candidate.recompute
    if candidate.kernels.compile == "off" or not (recompute.selective or recompute.communication):
        return None
    return "recompute of selected operators or of communication needs compile off; full recompute compiles"


def _recompute_communication(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if not candidate.recompute.communication:
        return None
    if layout.tp > 1 and layout.sequence_parallel and layout.tp_engine == "local":
        return None
    return "recompute of communication needs tp above 1, sequence_parallel and tp_engine local or auto"


# ---- kernels, precision, data ----


def _compile_with_zbv(_workload: Workload, candidate: Candidate) -> str | None:
    if candidate.kernels.compile == "off" or candidate.layout.schedule != "zbv":
        return None
    return "schedule zbv splits the backward of every operator, which a compiled graph does not allow"


def _compile_recompute_with_dtensor(_workload: Workload, candidate: Candidate) -> str | None:
    """AOTAutograd hands what recompute saves to autograd as tensors, and the mesh of a DTensor is none (torch 2.13)."""
    layout = candidate.layout
    if candidate.kernels.compile == "off" or layout.tp == 1 or layout.tp_engine == "local":
        return None
    if not any(map(any, candidate.recompute.full)):
        return None
    return "compile with tp and full recompute needs tp_engine local: torch cannot compile recomputed DTensors"


def _cuda_graphs(workload: Workload, candidate: Candidate) -> str | None:
    """A CUDA graph replays into the memory that it was captured with.

    So the outputs of one micro-batch must be done with before the next one runs, and parameters must stay in place.
    """
    kernels, layout = candidate.kernels, candidate.layout
    if kernels.compile == "off" or kernels.compile_mode != "reduce-overhead":
        return None
    if layout.pp > 1:
        return f"compile_mode reduce-overhead (CUDA graphs) needs pp 1, not {layout.pp}"
    number = candidate.num_microbatches(workload.global_batch_size)
    if number > 1:
        return f"compile_mode reduce-overhead (CUDA graphs) needs one micro-batch per step, not {number}"
    if layout.dp * layout.cp > 1 and not holds_plain(layout):
        return "compile_mode reduce-overhead (CUDA graphs) needs DDP or ZeRO-1: FSDP2 moves the parameters"
    return None


def _amp_lists_with_compile(_workload: Workload, candidate: Candidate) -> str | None:
    if candidate.kernels.compile == "off" or not (candidate.precision.white or candidate.precision.black):
        return None
    return "white and black lists need compile off: a compiled graph is traced without them"


def _loss_chunks(workload: Workload, candidate: Candidate) -> str | None:
    chunks, model = candidate.kernels.loss_chunks, workload.model
    if chunks == 1:
        return None
    if chunks < 1:
        return f"loss_chunks starts at 1, not {chunks}"
    if isinstance(model, HuggingFaceModel) and model.facts.head is None:
        return "loss_chunks needs a linear head without a bias whose outputs are the logits; this decoder has none"
    if not isinstance(model, LlamaModel | HuggingFaceModel):
        return f"loss_chunks is for decoders; model kind {model.kind} computes all its outputs at once"
    positions = candidate.micro_batch_size * workload.seq_length // candidate.layout.cp
    if chunks > positions:
        return f"loss_chunks {chunks} is more than the {positions} positions of a micro-batch on one rank"
    return None


def _loss_chunks_with_lists(_workload: Workload, candidate: Candidate) -> str | None:
    precision = candidate.precision
    if candidate.kernels.loss_chunks == 1 or not (precision.white or precision.black):
        return None
    return "white and black lists need loss_chunks 1: head and loss in chunks are one operator to them"


def _cudnn_range(_workload: Workload, candidate: Candidate) -> str | None:
    steps = candidate.kernels.cudnn_tuning_range
    if steps == () or (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        return None
    return f"cudnn_benchmark: {steps} is not a first and a last step, from 1 on"


def _amp_level(_workload: Workload, candidate: Candidate) -> str | None:
    precision = candidate.precision
    if (precision.level == "O0") == (precision.dtype == "float32"):
        return None
    return f"AMP level {precision.level} does not go with {precision.dtype}; O0 is float32, the others are 16-bit"


def _loss_scale(_workload: Workload, candidate: Candidate) -> str | None:
    precision = candidate.precision
    if (precision.dtype == "float16") != (precision.loss_scale is not None):
        return "loss_scale is set exactly when dtype is float16"
    return None if precision.loss_scale is None else _loss_scale_problem(precision.loss_scale)


def _loss_scale_problem(scale: LossScale) -> str | None:
    if not FP32_TINY <= scale.initial <= FP32_MAX:
        return f"loss_scale: initial {scale.initial:g} is no positive fp32 number with an inverse"
    if not 1.0 < scale.growth_factor <= FP32_MAX:
        return f"loss_scale: growth_factor {scale.growth_factor:g} is no fp32 number above 1"
    if not 0.0 < scale.backoff_factor < 1.0:
        return f"loss_scale: backoff_factor {scale.backoff_factor:g} is not between 0 and 1"
    if min(scale.growth_interval, scale.backoff_interval) < 1:
        return "loss_scale: growth_interval and backoff_interval start at 1"
    return None


def _amp_lists(_workload: Workload, candidate: Candidate) -> str | None:
    precision = candidate.precision
    names = (*precision.white, *precision.black)
    if names and precision.level != "O1":
        return f"white and black lists are for AMP level O1, not {precision.level}"
    if bad := next((name for name in names if not name.isidentifier()), None):
        return f"{bad!r} is not the name of an operator"
    twice = set(precision.white) & set(precision.black)
    return f"{min(twice)} is on the white and on the black list" if twice else None


def _loader(_workload: Workload, candidate: Candidate) -> str | None:
    loader = candidate.loader
    if min(loader.num_workers, loader.prefetch_factor) < 0:
        return "num_workers and prefetch_factor are not negative"
    if (loader.num_workers == 0) != (loader.prefetch_factor == 0):
        return "prefetch_factor is 0 exactly when num_workers is 0"
    if loader.tuning is not None and loader.num_workers:
        return "a tuned loader finds num_workers and prefetch_factor itself; leave both 0"
    if loader.tuning is not None and min(loader.tuning.tuning_steps, loader.tuning.max_workers) < 1:
        return "tuning_steps and max_workers start at 1"
    if loader.persistent_workers and loader.tuning is None and not loader.num_workers:
        return "persistent_workers needs num_workers above 0"
    return None


def _at_most(counts: Counts, limits: Counts) -> bool:
    pairs = zip(counts, limits, strict=True)
    return all(0 <= n <= limit for row, most in pairs for n, limit in zip(row, most, strict=True))


def _text(counts: Counts) -> str:
    return "/".join(",".join(map(str, row)) for row in counts)


CANDIDATE_RULES = make_rules(
    ("recompute-shape", "layout recompute", _recompute_shape),
    ("recompute-pattern", "recompute", _recompute_patterns),
    ("recompute-with-compile", "recompute kernels.compile", _recompute_with_compile),
    ("recompute-communication", "layout recompute", _recompute_communication),
    ("compile-with-zbv", "layout.schedule kernels.compile", _compile_with_zbv),
    (
        "compile-recompute-with-dtensor",
        "layout.tp layout.tp_engine recompute kernels.compile",
        _compile_recompute_with_dtensor,
    ),
    ("cuda-graphs", "layout micro_batch_size kernels.compile kernels.compile_mode", _cuda_graphs),
    ("amp-lists-with-compile", "precision kernels.compile", _amp_lists_with_compile),
    ("loss-chunks", "layout.cp micro_batch_size kernels.loss_chunks", _loss_chunks),
    ("loss-chunks-with-lists", "precision kernels.loss_chunks", _loss_chunks_with_lists),
    ("cudnn-range", "kernels.cudnn_tuning_range", _cudnn_range),
    ("amp-level", "precision", _amp_level),
    ("loss-scale", "precision", _loss_scale),
    ("amp-lists", "precision", _amp_lists),
    ("loader", "loader", _loader),
)
