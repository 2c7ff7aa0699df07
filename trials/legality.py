"""Rules on what the runner can train, each with a reason. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator

from trials.failure import InfeasibleSpec
from trials.layout_rules import LAYOUT_RULES, LegalityRule, has_experts, holds_plain, make_rules, shape_problem
from trials.patterns import pattern_problem
from trials.spec import (
    Candidate,
    Counts,
    Data,
    HuggingFaceModel,
    ImageFolderData,
    LatentAttention,
    LinearModel,
    LlamaModel,
    LossScale,
    Model,
    Protocol,
    PythonData,
    PythonModel,
    RandomData,
    ResNetModel,
    TextData,
    TokenFileData,
    TrialSpec,
    Workload,
)

# ---- recompute ----

FP32_MAX = (2.0 - 2.0**-23) * 2.0**127
"""Largest finite fp32 number."""
FP32_TINY = 2.0**-126
"""Smallest fp32 number whose inverse is also one; loss scaling multiplies and divides in fp32."""


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
            return f"recompute: {name} counts {_text(counts)} layers, but there are {_text(present)}"
    return None


def _recompute_patterns(_workload: Workload, candidate: Candidate) -> str | None:
    patterns = [part.pattern for part in candidate.recompute.selective]
    if len(set(patterns)) != len(patterns):
        return "recompute: a pattern is listed twice"
    return next((problem for problem in map(pattern_problem, patterns) if problem), None)


def _communication_with_compile(_workload: Workload, candidate: Candidate) -> str | None:
    if candidate.kernels.compile == "off" or not candidate.recompute.repeats_gathers:
        return None
    return "recompute of communication requires compile off; full and selective recompute support compile"


def _recompute_communication(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if not candidate.recompute.repeats_gathers:
        return None
    if layout.tp > 1 and layout.sequence_parallel and layout.tp_engine == "local":
        return None
    return "recompute of communication requires tp above 1, sequence_parallel and tp_engine local or auto"


# ---- kernels, precision, data ----


def _compile_with_zbv(_workload: Workload, candidate: Candidate) -> str | None:
    if candidate.kernels.compile == "off" or candidate.layout.schedule != "zbv":
        return None
    return "schedule zbv splits the backward pass of every operator, which compiled graphs do not allow"


def _compile_recompute_with_dtensor(_workload: Workload, candidate: Candidate) -> str | None:
    """AOTAutograd passes what recompute saves to autograd as tensors, but a DTensor's mesh is none (torch 2.13)."""
    layout = candidate.layout
    if candidate.kernels.compile == "off" or layout.tp == 1 or layout.tp_engine == "local":
        return None
    counts = (candidate.recompute.full, *(part.num_layers for part in candidate.recompute.selective))
    if not any(any(row) for one in counts for row in one):
        return None
    return "compile with tp and recompute requires tp_engine local: torch cannot compile recomputed DTensors"


def _compile_select_with_ep(_workload: Workload, candidate: Candidate) -> str | None:
    """The exchange between experts runs outside of the graph, and changes a tensor that the policy has kept."""
    if candidate.kernels.compile == "off" or candidate.layout.ep == 1:
        return None
    if not _recomputes_selected(candidate):
        return None
    return "compile with ep and selective recompute is not supported: use full recompute, or compile off"


def _recomputes_selected(candidate: Candidate) -> bool:
    return any(any(row) for part in candidate.recompute.selective for row in part.num_layers)


def _cuda_graphs(workload: Workload, candidate: Candidate) -> str | None:
    """A CUDA graph replays into the memory it was captured with.

    So the outputs of one micro-batch must be consumed before the next one runs, and parameters must not move.
    """
    kernels, layout = candidate.kernels, candidate.layout
    if kernels.compile == "off" or kernels.compile_mode != "reduce-overhead":
        return None
    if layout.pp > 1:
        return f"compile_mode reduce-overhead (CUDA graphs) requires pp 1, not {layout.pp}"
    number = candidate.num_microbatches(workload.global_batch_size)
    if number > 1:
        return f"compile_mode reduce-overhead (CUDA graphs) requires one micro-batch per step, not {number}"
    if layout.dp * layout.cp > 1 and not holds_plain(layout):
        return "compile_mode reduce-overhead (CUDA graphs) requires DDP or ZeRO-1: FSDP2 moves the parameters"
    return None


def _amp_lists_with_compile(_workload: Workload, candidate: Candidate) -> str | None:
    if candidate.kernels.compile == "off" or not (candidate.precision.white or candidate.precision.black):
        return None
    return "white and black lists require compile off: graphs are compiled without them"


def _loss_chunks(workload: Workload, candidate: Candidate) -> str | None:
    chunks, model = candidate.kernels.loss_chunks, workload.model
    if chunks == 1:
        return None
    if chunks < 1:
        return f"loss_chunks must be at least 1, not {chunks}"
    if isinstance(model, HuggingFaceModel) and model.facts.head is None:
        return "loss_chunks requires a linear head without bias whose outputs are the logits; this decoder has none"
    if not isinstance(model, LlamaModel | HuggingFaceModel):
        return f"loss_chunks requires a decoder; model kind {model.kind} computes all its outputs at once"
    positions = candidate.micro_batch_size * workload.seq_length // candidate.layout.cp
    if chunks > positions:
        return f"loss_chunks {chunks} is more than the {positions} positions of a micro-batch on one rank"
    return None


def _loss_chunks_with_lists(_workload: Workload, candidate: Candidate) -> str | None:
    precision = candidate.precision
    if candidate.kernels.loss_chunks == 1 or not (precision.white or precision.black):
        return None
    return "white and black lists require loss_chunks 1: chunked head and loss count as one operator"


def _cudnn_range(_workload: Workload, candidate: Candidate) -> str | None:
    steps = candidate.kernels.cudnn_tuning_range
    if steps == () or (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        return None
    return f"cudnn_benchmark: {steps} is not a first and a last step, counted from 1"


def _memory_format(_workload: Workload, candidate: Candidate) -> str | None:
    if candidate.kernels.memory_format != "auto" or candidate.layout.pp == 1:
        return None
    return "memory_format auto times the full model, which a pipeline splits: choose nchw or nhwc"


def _amp_level(_workload: Workload, candidate: Candidate) -> str | None:
    precision = candidate.precision
    if (precision.level == "O0") == (precision.dtype == "float32"):
        return None
    return f"AMP level {precision.level} does not allow {precision.dtype}; O0 is float32, the others are 16-bit"


def _loss_scale(_workload: Workload, candidate: Candidate) -> str | None:
    precision = candidate.precision
    if (precision.dtype == "float16") != (precision.loss_scale is not None):
        return "loss_scale must be set if and only if dtype is float16"
    return None if precision.loss_scale is None else _loss_scale_problem(precision.loss_scale)


def _loss_scale_problem(scale: LossScale) -> str | None:
    if not FP32_TINY <= scale.initial <= FP32_MAX:
        return f"loss_scale: initial {scale.initial:g} is not a positive fp32 number with an inverse"
    if not 1.0 < scale.growth_factor <= FP32_MAX:
        return f"loss_scale: growth_factor {scale.growth_factor:g} is not an fp32 number above 1"
    if not 0.0 < scale.backoff_factor < 1.0:
        return f"loss_scale: backoff_factor {scale.backoff_factor:g} is not between 0 and 1"
    if min(scale.growth_interval, scale.backoff_interval) < 1:
        return "loss_scale: growth_interval and backoff_interval must be at least 1"
    return None


def _amp_lists(_workload: Workload, candidate: Candidate) -> str | None:
    precision = candidate.precision
    names = (*precision.white, *precision.black)
    if names and precision.level != "O1":
        return f"white and black lists require AMP level O1, not {precision.level}"
    if bad := next((name for name in names if not name.isidentifier()), None):
        return f"{bad!r} is not the name of an operator"
    twice = set(precision.white) & set(precision.black)
    return f"{min(twice)} is on both the white and the black list" if twice else None


def _keep_fp32(_workload: Workload, candidate: Candidate) -> str | None:
    """Modules in fp32 cast between number formats when they are called, outside of sharded matmuls and of graphs."""
    precision, layout, kernels = candidate.precision, candidate.layout, candidate.kernels
    if not precision.keep_fp32:
        return None
    if precision.base != "O2":
        return f"keep_fp32 requires AMP level O2, not {precision.level}"
    if layout.tp * layout.cp * layout.ep > 1:
        return "keep_fp32 requires tp 1, cp 1 and ep 1"
    if kernels.compile != "off" or kernels.loss_chunks > 1:
        return "keep_fp32 requires compile off and loss_chunks 1"
    if layout.zero_stage == 3 and _recomputes_selected(candidate):
        # Recomputed operators would read the modules' weights before FSDP gathers them for the backward pass.
        return "keep_fp32 with zero_stage 3 requires full recompute, not selective; or use zero_stage 2"
    return next((problem for problem in map(pattern_problem, precision.keep_fp32) if problem), None)


def _fp8_gather(_workload: Workload, candidate: Candidate) -> str | None:
    precision, layout = candidate.precision, candidate.layout
    gathers = layout.zero_stage >= 2 and layout.dp_shard * layout.cp > 1
    if not precision.fp8_gather or (precision.is_fp8 and gathers and (layout.tp == 1 or layout.tp_engine == "dtensor")):
        return None
    return "fp8_gather requires O1-fp8 or O2-fp8, ZeRO stage 2 or 3 on more than one rank, and tp_engine dtensor"


def _loader(_workload: Workload, candidate: Candidate) -> str | None:
    loader = candidate.loader
    if min(loader.num_workers, loader.prefetch_factor) < 0:
        return "num_workers and prefetch_factor must not be negative"
    if (loader.num_workers == 0) != (loader.prefetch_factor == 0):
        return "prefetch_factor must be 0 if and only if num_workers is 0"
    if loader.tuning is not None and loader.num_workers:
        return "a tuned loader sets num_workers and prefetch_factor itself; set both to 0"
    if loader.tuning is not None and min(loader.tuning.tuning_steps, loader.tuning.max_workers) < 1:
        return "tuning_steps and max_workers must be at least 1"
    if loader.persistent_workers and loader.tuning is None and not loader.num_workers:
        return "persistent_workers requires num_workers above 0"
    return None


def _batching(workload: Workload, candidate: Candidate) -> str | None:
    batching, layout = candidate.loader.batching, candidate.layout
    if batching == "padding":
        return None
    if not _may_vary(workload):
        return f"batching {batching} requires samples of varying length: set workload.data.lengths"
    if batching == "buckets":
        return (
            None if layout.pp == 1 else "batching buckets: pipeline stages exchange tensors of one length; use padding"
        )
    if isinstance(workload.model, PythonModel):
        return "batching packing requires a decoder, which gets the positions of the documents; use buckets"
    if layout.pp > 1:
        return (
            "batching packing: the number of rows varies, but that of a pipeline's micro-batches does not; use padding"
        )
    if layout.num_copies > 1:
        return "batching packing requires num_copies 1: the halves of a micro-batch would need their own masks"
    if candidate.kernels.attention in ("flash", "cudnn"):
        return (
            f"batching packing masks attention, unlike attention {candidate.kernels.attention}; use auto or efficient"
        )
    return None


def _may_vary(workload: Workload) -> bool:
    """Whether samples vary in size; of custom data sets, only the rank knows."""
    return bool(workload.lengths) or isinstance(workload.model, PythonModel)


def _varying_with_cp(workload: Workload, candidate: Candidate) -> str | None:
    if not workload.lengths or candidate.layout.cp == 1:
        return None
    return f"cp {candidate.layout.cp}: samples of varying length are not split by context parallelism; use cp 1"


def _dynamic(workload: Workload, candidate: Candidate) -> str | None:
    kernels = candidate.kernels
    if not kernels.dynamic:
        return None
    if kernels.compile == "off":
        return "dynamic requires compile block or model"
    if not _may_vary(workload) or candidate.loader.batching == "packing" or candidate.layout.pp > 1:
        return "dynamic requires micro-batches of varying length: workload.data.lengths, no packing and no pipeline"
    if kernels.compile_mode == "reduce-overhead":
        return "dynamic requires compile_mode default or max-autotune: a CUDA graph has one length"
    return None


def _fused(workload: Workload, candidate: Candidate) -> str | None:
    model, fused = workload.model, candidate.kernels.fused
    if fused == "liger" and not isinstance(model, HuggingFaceModel):
        return f"fused liger requires a decoder of transformers, not model kind {model.kind}; use fused auto or torch"
    return None


def _at_most(counts: Counts, limits: Counts) -> bool:
    pairs = zip(counts, limits, strict=True)
    return all(0 <= n <= limit for row, most in pairs for n, limit in zip(row, most, strict=True))


def _text(counts: Counts) -> str:
    return "/".join(",".join(map(str, row)) for row in counts)


CANDIDATE_RULES = make_rules(
    ("recompute-shape", "layout recompute", _recompute_shape),
    ("recompute-pattern", "recompute", _recompute_patterns),
    ("communication-with-compile", "recompute kernels.compile", _communication_with_compile),
    ("recompute-communication", "layout recompute", _recompute_communication),
    ("compile-with-zbv", "layout.schedule kernels.compile", _compile_with_zbv),
    (
        "compile-recompute-with-dtensor",
        "layout.tp layout.tp_engine recompute kernels.compile",
        _compile_recompute_with_dtensor,
    ),
    ("compile-select-with-ep", "layout recompute kernels.compile", _compile_select_with_ep),
    ("cuda-graphs", "layout micro_batch_size kernels.compile kernels.compile_mode", _cuda_graphs),
    ("amp-lists-with-compile", "precision kernels.compile", _amp_lists_with_compile),
    ("loss-chunks", "layout.cp micro_batch_size kernels.loss_chunks", _loss_chunks),
    ("loss-chunks-with-lists", "precision kernels.loss_chunks", _loss_chunks_with_lists),
    ("cudnn-range", "kernels.cudnn_tuning_range", _cudnn_range),
    ("memory-format", "layout.pp kernels.memory_format", _memory_format),
    ("fused", "kernels.fused", _fused),
    ("amp-level", "precision", _amp_level),
    ("loss-scale", "precision", _loss_scale),
    ("amp-lists", "precision", _amp_lists),
    ("keep-fp32", "layout recompute precision kernels.compile kernels.loss_chunks", _keep_fp32),
    ("fp8-gather", "layout precision", _fp8_gather),
    ("loader", "loader", _loader),
    ("batching", "layout loader.batching kernels.attention", _batching),
    ("varying-with-cp", "layout.cp", _varying_with_cp),
    ("dynamic", "layout.pp loader.batching kernels", _dynamic),
)


# ---- 8-bit float matmuls (precision O1-fp8, O2-fp8) ----
#
# The kernels (cuBLASLt, through ``torch._scaled_mm``) need matrix sides that are multiples of 16. The number of rows of
# a micro-batch does not matter: rows are padded if necessary.


MULTIPLE = 16


def _dtype(_workload: Workload, candidate: Candidate) -> str | None:
    precision = candidate.precision
    if not precision.is_fp8 or precision.dtype == "bfloat16":
        return None
    return f"precision {precision.level} computes everything except its matmuls in bfloat16, not in {precision.dtype}"


def _model(workload: Workload, candidate: Candidate) -> str | None:
    level, base = candidate.precision.level, candidate.precision.base
    if not candidate.precision.is_fp8 or not isinstance(workload.model, ResNetModel):
        return None
    return f"precision {level} requires linear modules, which the layers of model kind resnet do not have; use {base}"


def _sizes(workload: Workload, candidate: Candidate) -> str | None:
    """For custom modules, the rank that builds the module checks their sizes."""
    precision, tp = candidate.precision, candidate.layout.tp
    if not precision.is_fp8:
        return None
    odd = next(((name, size) for name, size in _sides(workload, tp) if size % (MULTIPLE * tp)), None)
    if odd is None:
        return None
    (name, size), each = odd, f" on each of {tp} tensor-parallel ranks" if tp > 1 else ""
    return f"precision {precision.level}: {name} {size} is not divisible by {MULTIPLE}{each}; use {precision.base}"


def _sides(workload: Workload, tp: int) -> Iterator[tuple[str, int]]:
    """Yield name and size of the sides of the layers' matrices that tensor parallelism may split."""
    model = workload.model
    if isinstance(model, LlamaModel):
        yield "hidden_size", model.hidden_size
        heads = model.num_heads + 2 * model.num_kv_heads
        yield "size of all queries, keys and values", heads * model.head_size
        yield "ffn_hidden_size", model.ffn_hidden_size
    elif isinstance(model, LinearModel) and tp == 1:
        yield "size", model.size


FLOAT8_RULES = make_rules(
    ("fp8-dtype", "precision", _dtype),
    ("fp8-model", "precision.level", _model),
    ("fp8-sizes", "precision.level layout.tp", _sizes),
)


# ---- offloading to host memory ----
#
# Optimiser states can always be offloaded: the update is elementwise, and the host has all its inputs.
#
# Activations are moved layer by layer, by hooks around a layer's call on what autograd saves in it. This excludes other
# mechanisms that decide what is kept there, and those that make one graph of several layers.


def _selective(_workload: Workload, candidate: Candidate) -> str | None:
    """Selective recompute decides itself what is kept of a tensor, so there is nothing whole to copy."""
    recompute = candidate.recompute
    if not candidate.offload.activations or not (recompute.selective or recompute.communication):
        return None
    return "offload_activations requires full recompute, not recompute of selected operators or of communication"


def _compile_model(_workload: Workload, candidate: Candidate) -> str | None:
    if not candidate.offload.activations or candidate.kernels.compile != "model":
        return None
    return "offload_activations moves activations layer by layer, but compile model makes a single graph; use block"


def _cuda_graphs_offload(_workload: Workload, candidate: Candidate) -> str | None:
    kernels = candidate.kernels
    if kernels.compile == "off" or kernels.compile_mode != "reduce-overhead" or not candidate.offload.activations:
        return None
    return "compile_mode reduce-overhead (CUDA graphs) keeps activations in its own memory pool: no offload_activations"


OFFLOAD_RULES = make_rules(
    ("offload-with-selective", "offload recompute", _selective),
    ("offload-with-compile-model", "offload kernels.compile", _compile_model),
    ("offload-with-cuda-graphs", "offload kernels.compile kernels.compile_mode", _cuda_graphs_offload),
)


RULES: tuple[LegalityRule, ...] = (*LAYOUT_RULES, *CANDIDATE_RULES, *FLOAT8_RULES, *OFFLOAD_RULES)
"""All rules on a workload and a candidate, in the order of reports."""
DATA_OF_MODEL: dict[type[Model], tuple[type[Data], ...]] = {
    LlamaModel: (TextData, TokenFileData),
    ResNetModel: (ImageFolderData,),
    LinearModel: (RandomData,),
    PythonModel: (PythonData,),
    HuggingFaceModel: (TextData, TokenFileData),
}
"""Kinds of data that a kind of model can train on; the default comes first."""


def check(spec: TrialSpec) -> None:
    """Reject a specification that can never run.

    Raises:
        InfeasibleSpec: names every violated rule.
    """
    problems = [*violations(spec.workload, spec.candidate), *_protocol_problems(spec.protocol)]
    if problems:
        raise InfeasibleSpec("; ".join(problems))


def violations(workload: Workload, candidate: Candidate) -> Iterator[str]:
    """Yield one sentence per violated rule; none if the runner accepts the pair."""
    yield from _workload_problems(workload)
    for rule in RULES:
        reason = rule.check(workload, candidate)
        if reason is not None:
            yield reason
            if rule.id == "degrees":  # the other rules divide by them
                return


def _protocol_problems(protocol: Protocol) -> Iterator[str]:
    if not 0 <= protocol.min_warmup_steps <= protocol.max_warmup_steps:
        yield f"min_warmup_steps {protocol.min_warmup_steps} is outside 0..max_warmup_steps {protocol.max_warmup_steps}"
    if not 1 <= protocol.num_steps <= protocol.max_steps:
        yield f"num_steps {protocol.num_steps} is outside 1..max_steps {protocol.max_steps}"


def _workload_problems(workload: Workload) -> Iterator[str]:
    model, data = workload.model, workload.data
    if isinstance(model, LlamaModel):
        yield from _llama_problems(model)
    if isinstance(model, LlamaModel | HuggingFaceModel):
        if isinstance(data, TextData) and model.vocab_size < 256:
            yield f"vocab_size {model.vocab_size} is less than the 256 values of byte-level tokens"
    elif not isinstance(model, PythonModel) and workload.seq_length != 1:
        yield f"seq_length must be 1 for model kind {model.kind}, not {workload.seq_length}"
    if workload.lengths and has_experts(model):
        yield "samples of varying length require a dense model: experts would be balanced over padding, too"
    if not isinstance(data, DATA_OF_MODEL[type(model)]):
        yield f"model kind {model.kind} cannot train on data kind {data.kind}"


def _latent_problems(model: LlamaModel, latent: LatentAttention) -> Iterator[str]:
    if model.num_kv_heads != model.num_heads:
        yield f"latent attention has as many key-value heads as heads: num_kv_heads {model.num_kv_heads}"
    if latent.qk_rope_head_dim % 2:
        yield f"qk_rope_head_dim {latent.qk_rope_head_dim} is odd; rotary embeddings rotate pairs"
    if latent.v_head_dim > model.head_size:
        yield f"v_head_dim {latent.v_head_dim} exceeds the {model.head_size} of queries and keys"


def _llama_problems(model: LlamaModel) -> Iterator[str]:
    if model.latent is not None:
        yield from _latent_problems(model, model.latent)
    elif model.hidden_size % model.num_heads:
        yield f"hidden_size {model.hidden_size} is not divisible by num_heads {model.num_heads}"
    elif model.head_size % 2:
        yield f"head size {model.head_size} is odd; rotary embeddings rotate pairs"
    if model.num_heads % model.num_kv_heads:
        yield f"num_heads {model.num_heads} is not divisible by num_kv_heads {model.num_kv_heads}"
    if (experts := model.experts) is not None:
        if not 1 <= experts.top_k <= experts.num_experts:
            yield f"top_k {experts.top_k} is outside 1..num_experts {experts.num_experts}"
        if not 0 <= experts.num_dense_layers < model.num_layers:
            yield f"num_dense_layers {experts.num_dense_layers} is outside 0..{model.num_layers - 1}"
        if min(experts.aux_loss, experts.z_loss) < 0 or (experts.capacity is not None and experts.capacity <= 0):
            yield "aux_loss and z_loss must be at least 0, and capacity above 0"
