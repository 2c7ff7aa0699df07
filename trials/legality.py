"""Rules on what the runner can train, each with a reason. Depends on ``spec``, ``failure``; standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from trials.failure import InfeasibleSpec
from trials.patterns import pattern_problem
from trials.spec import (
    Candidate,
    Counts,
    Data,
    HuggingFaceModel,
    ImageFolderData,
    LatentAttention,
    Layout,
    LinearModel,
    LlamaModel,
    LossScale,
    Model,
    Protocol,
    PythonData,
    PythonModel,
    RandomData,
    ResNetModel,
    ScriptModel,
    TextData,
    TokenFileData,
    TrialSpec,
    UserModel,
    Workload,
    decoder_of,
)

# Legality rules on layouts and batch sizes and on their fit to the model, and the type of a rule.
#
# Sources: the divisibility rules are those of the Megatron and PyTorch tensor-parallel layouts; the schedules' rules
# are those of ``torch.distributed.pipelining.schedules``. The others are combinations that the runner cannot train.


Check = Callable[[Workload, Candidate], str | None]
"""Returns why the runner refuses the pair, in one line, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalityRule:
    """One requirement of the runner."""

    id: str
    reads: tuple[str, ...]
    """Inputs of ``check`` in addition to the workload: fields of the candidate, or attributes of these such as
    ``layout.tp``. Candidates with equal inputs are checked only once."""
    check: Check


def make_rules(*checks: tuple[str, str, Check]) -> tuple[LegalityRule, ...]:
    """Build rules from ids, inputs (separated by spaces) and checks."""
    return tuple(LegalityRule(id=name, reads=tuple(reads.split()), check=check) for name, reads, check in checks)


def uses_ddp(layout: Layout) -> bool:
    """Whether DistributedDataParallel reduces the gradients: plain replication of whole parameters."""
    return layout.zero_stage == 0 and layout.dp_replicate * layout.cp > 1 and layout.replicate_with == "ddp"


def holds_plain(layout: Layout) -> bool:
    """Whether every data-parallel rank holds whole parameters as plain tensors: under DDP and ZeRO-1."""
    return layout.zero_stage == 1 or uses_ddp(layout)


def shape_problem(counts: Counts, layout: Layout) -> str | None:
    """Describe how ``counts`` differ from the layout's chunks and stages, to follow their name; None if they agree."""
    if len(counts) == layout.num_virtual_stages and all(len(row) == layout.pp for row in counts):
        return None
    num_stages = "/".join(dict.fromkeys(str(len(row)) for row in counts)) or 0
    given, wanted = (f"{count} chunk{'' if count == 1 else 's'}" for count in (len(counts), layout.num_virtual_stages))
    return f"has {given} of {num_stages} stages, but the layout has {wanted} of {layout.pp} stages"


# ---- degrees and data parallelism ----


def _degrees(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    axes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    degrees = (*axes, layout.ep, layout.ulysses_degree)
    return (
        None
        if min(*degrees, layout.num_virtual_stages, candidate.micro_batch_size) >= 1
        else "degrees and micro_batch_size must be at least 1"
    )


def _model_kind(workload: Workload, candidate: Candidate) -> str | None:
    layout, model = candidate.layout, workload.model
    if isinstance(model, LlamaModel) or max(layout.pp, layout.cp, layout.tp) == 1:
        return None
    if isinstance(model, UserModel):
        return (
            None
            if layout.cp == 1
            else f"model kind {model.kind} does not support context parallelism; cp requires llama"
        )
    return f"model kind {model.kind} supports only data parallelism; pp, cp and tp require llama"


def _own_pipeline(workload: Workload, candidate: Candidate) -> str | None:
    model = workload.model
    if not isinstance(model, UserModel) or candidate.layout.pp == 1 or model.facts.no_pipeline is None:
        return None
    return f"pp {candidate.layout.pp}: {model.facts.no_pipeline}"


def _own_tensor_parallel(workload: Workload, candidate: Candidate) -> str | None:
    """Custom modules are split by a plan, which the local engine does not support."""
    layout, model = candidate.layout, workload.model
    if not isinstance(model, UserModel) or layout.tp == 1:
        return None
    if model.facts.no_tensor_parallel is not None:
        return f"tp {layout.tp}: {model.facts.no_tensor_parallel}"
    if layout.tp_engine == "local" or layout.sequence_parallel:
        return f"tp of model kind {model.kind} requires tp_engine dtensor, no sequence_parallel and no DDP"
    return None


def _shard_needs_zero(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if layout.dp_shard > 1 and layout.zero_stage == 0:
        return f"dp_shard {layout.dp_shard} has no effect with zero_stage 0; use zero_stage 1, 2 or 3"
    if layout.dp_shard == 1 and layout.zero_stage > 0:
        return f"zero_stage {layout.zero_stage} requires dp_shard above 1"
    return None


def _shard_embedding(workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if not layout.shard_embedding:
        return None
    if not isinstance(workload.model, LlamaModel):
        return f"shard_embedding requires llama, not model kind {workload.model.kind}"
    if layout.dp * layout.cp == 1 or holds_plain(layout):
        return "shard_embedding requires FSDP2: data-parallel ranks, and neither DDP nor ZeRO stage 1"
    return None


def _global_batch(workload: Workload, candidate: Candidate) -> str | None:
    micro_batch_size, dp, total = candidate.micro_batch_size, candidate.layout.dp, workload.global_batch_size
    if total % (micro_batch_size * dp) == 0:
        return None
    return f"global_batch_size {total} is not divisible by micro_batch_size {micro_batch_size} x dp {dp}"


# ---- tensor parallelism ----


def _tp_divides(name: str) -> tuple[str, str, Check]:
    """Build the rule that ``tp`` divides this size of the model: id, inputs and check."""

    def check(workload: Workload, candidate: Candidate) -> str | None:
        size, tp = getattr(decoder_of(workload.model), name, 0), candidate.layout.tp
        if size % tp == 0:
            return None
        remedy = f"; pad it to {-(-size // tp) * tp}" if name == "vocab_size" else ""
        return f"{name} {size} is not divisible by tp {tp}{remedy}"

    return f"tp-{name.replace('_', '-')}", "layout.tp", check


def _sp_needs_tp(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    return "sequence_parallel requires tp above 1" if layout.sequence_parallel and layout.tp == 1 else None


def _sp_sequence(workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if not layout.sequence_parallel or workload.seq_length % (layout.cp * layout.tp) == 0:
        return None
    parts = f"cp {layout.cp} x tp {layout.tp}" if layout.cp > 1 else f"tp {layout.tp}"
    return f"sequence_parallel: seq_length {workload.seq_length} is not divisible by {parts}"


def _ddp_with_tp(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if layout.tp > 1 and layout.tp_engine == "dtensor" and uses_ddp(layout):
        return "DDP cannot wrap tensor-parallel DTensors; use replicate_with fsdp2, or tp_engine local or auto"
    return None


def _zero1_with_tp(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if layout.zero_stage == 1 and layout.tp > 1 and layout.tp_engine == "dtensor":
        return "ZeRO-1's buckets cannot hold tensor-parallel DTensors; use tp_engine local or auto, or zero_stage 2"
    return None


def _copies(workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if layout.num_copies == 1:
        return None
    if layout.tp == 1 or layout.tp_engine != "local":
        return "num_copies 2 hides tensor-parallel collectives: it requires tp above 1 and tp_engine local or auto"
    return _copies_of_positions(workload, candidate) if candidate.splits_positions else None


def _copies_of_positions(workload: Workload, candidate: Candidate) -> str | None:
    """The halves of the positions attend to each other, and every rank holds equal parts of both."""
    layout = candidate.layout
    size = f"num_copies 2 with the odd micro_batch_size {candidate.micro_batch_size} splits the positions"
    if layout.cp > 1:
        return f"{size}: use cp 1, or an even micro_batch_size"
    if candidate.loader.batching == "buckets":
        return f"{size}: use batching padding, or an even micro_batch_size"
    parts = 2 * (layout.tp if layout.sequence_parallel or has_experts(workload.model) else 1)
    if workload.seq_length % parts:
        return f"{size}: seq_length {workload.seq_length} is not divisible by {parts}"
    return None


# ---- mixtures of experts ----


def _experts_layout(workload: Workload, candidate: Candidate) -> str | None:
    """Tensor-parallel ranks hold different experts and route different positions; the rest of a layer is split."""
    layout, experts = candidate.layout, workload.model.experts if isinstance(workload.model, LlamaModel) else None
    if experts is None:
        return None
    if candidate.precision.is_fp8:
        return f"precision {candidate.precision.level} does not support mixtures of experts; use O1 or O2"
    if max(layout.cp, layout.tp) > 1 and experts.capacity is not None:
        split = f"cp {layout.cp} and tp {layout.tp}"
        return f"{split}: experts with a capacity need whole sequences; use cp 1 and tp 1, or capacity null"
    if layout.tp == 1:
        return None
    if layout.ep % layout.tp:
        return f"tp {layout.tp} keeps experts whole on different ranks: ep {layout.ep} must be a multiple of it"
    if layout.tp_engine == "dtensor":
        return f"tp {layout.tp} of a mixture of experts requires tp_engine local or auto"
    if candidate.splits_positions and experts.aux_loss:
        return "num_copies 2 with an odd micro_batch_size: aux_loss needs whole sequences; use an even micro_batch_size"
    if workload.seq_length % (layout.cp * layout.tp):
        parts = f"cp {layout.cp} x tp {layout.tp}"
        return f"ranks route different positions: seq_length {workload.seq_length} is not divisible by {parts}"
    return None


def _latent_attention(workload: Workload, candidate: Candidate) -> str | None:
    """Narrow projections stay whole on every tensor-parallel rank, and have their own order of parts."""
    if not isinstance(workload.model, LlamaModel) or workload.model.latent is None:
        return None
    if candidate.layout.tp > 1 and candidate.layout.tp_engine == "dtensor":
        return f"tp {candidate.layout.tp} of latent attention requires tp_engine local or auto"
    if candidate.precision.is_fp8:
        return (
            f"precision {candidate.precision.level} does not support latent attention; use {candidate.precision.base}"
        )
    return None


def _expert_parallel(workload: Workload, candidate: Candidate) -> str | None:
    """Experts are spread over the ranks that share the other weights."""
    layout, model = candidate.layout, workload.model
    if layout.ep == 1:
        return None
    shape = model.shape if isinstance(model, ScriptModel) else model
    experts = shape.experts if isinstance(shape, LlamaModel) else None
    if experts is None and shape is not None:
        return f"ep {layout.ep} requires a model with experts"
    if experts is not None and experts.num_experts % layout.ep:
        return f"num_experts {experts.num_experts} is not divisible by ep {layout.ep}"
    axis = "dp" if isinstance(model, ScriptModel) else "dp_shard" if layout.zero_stage else "dp_replicate"
    if getattr(layout, axis) * layout.cp * layout.tp % layout.ep:
        return f"{axis} {getattr(layout, axis)} x cp {layout.cp} x tp {layout.tp} is not divisible by ep {layout.ep}"
    return None


def has_experts(model: Model) -> bool:
    """Whether the runner trains a mixture of experts for this model."""
    return isinstance(model, LlamaModel) and model.experts is not None


def has_latent_attention(model: Model) -> bool:
    """Whether the runner trains a decoder with latent attention for this model."""
    return isinstance(model, LlamaModel) and model.latent is not None


# ---- context parallelism ----


def _cp_sequence(workload: Workload, candidate: Candidate) -> str | None:
    """Each rank holds an early and a late piece of every sequence, which balances the work."""
    cp, seq_length = candidate.layout.cp, workload.seq_length
    if cp == 1 or seq_length % (2 * cp) == 0:
        return None
    return f"context parallelism gives each rank two pieces: seq_length {seq_length} is not divisible by 2 x cp {cp}"


def _cp_heads(workload: Workload, candidate: Candidate) -> str | None:
    layout, model = candidate.layout, workload.model
    ranks = {"ulysses": ("cp", layout.cp), "hybrid": ("ulysses_degree", layout.ulysses_degree)}.get(layout.cp_method)
    if layout.cp == 1 or ranks is None or not isinstance(model, LlamaModel):
        return None
    degree, size = ranks
    for name, heads in (("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)):
        if heads % (layout.tp * size):
            method = f"cp_method {layout.cp_method}"
            return f"{method}: {name} {heads} is not divisible by tp {layout.tp} x {degree} {size}"
    return None


def _cp_hybrid(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    degree, cp = layout.ulysses_degree, layout.cp
    if layout.cp_method != "hybrid":
        return None if degree == 1 else f"ulysses_degree {degree} requires cp_method hybrid"
    if 1 < degree < cp and cp % degree == 0:
        return None
    return f"cp_method hybrid: ulysses_degree {degree} is not a divisor of cp {cp} between 1 and {cp}"


# ---- pipeline ----


def has_sane_chunks(num_layers: int, *, pp: int, num_virtual_stages: int) -> bool:
    """Whether there are about as many stages as layers; some may be empty, at most two more per rank than layers."""
    return pp * num_virtual_stages <= num_layers + 2 * pp


def _virtual_stages(workload: Workload, candidate: Candidate) -> str | None:
    """Interleaving needs several chunks, the V shape exactly two; 1F1B has one; GPipe allows any number."""
    layout = candidate.layout
    chunks, schedule = layout.num_virtual_stages, layout.schedule
    if layout.pp == 1:
        return None if chunks == 1 else f"num_virtual_stages {chunks} requires pp above 1"
    if schedule == "1f1b" and chunks != 1:
        return f"schedule 1f1b has one stage per rank, not {chunks}; use interleaved or gpipe"
    if schedule == "interleaved" and chunks < 2:
        return "schedule interleaved requires num_virtual_stages of at least 2"
    if schedule == "zbv" and chunks != 2:
        return f"schedule zbv has exactly 2 stages per rank, not {chunks}"
    if not has_sane_chunks(workload.num_layers, pp=layout.pp, num_virtual_stages=chunks):
        most = (workload.num_layers + 2 * layout.pp) // layout.pp
        return f"{workload.num_layers} layers on pp {layout.pp} allow num_virtual_stages up to {most}, not {chunks}"
    return None


def _stage_layers(workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    counts = layout.stage_layers
    if layout.pp == 1:
        return None if counts == () else "stage_layers requires pp above 1"
    if problem := shape_problem(counts, layout):
        return f"stage_layers {problem}"
    if min(map(min, counts)) < 0:
        return "stage_layers gives a stage fewer than 0 layers"
    total = sum(map(sum, counts))
    return None if total == workload.num_layers else f"stage_layers add up to {total} of {workload.num_layers} layers"


def _num_microbatches(workload: Workload, candidate: Candidate) -> str | None:
    """Limits of torch's ``Schedule1F1B`` and ``ScheduleInterleaved1F1B``; its other schedules allow any number."""
    layout = candidate.layout
    number = candidate.num_microbatches(workload.global_batch_size)
    if layout.pp == 1:
        return None
    if layout.schedule == "1f1b" and number < layout.pp:
        return f"schedule 1f1b requires at least one micro-batch per stage: {number} for pp {layout.pp}"
    rounds = max(1, number // layout.pp)
    if layout.schedule == "interleaved" and number % rounds:
        return f"schedule interleaved uses {rounds} rounds, which do not divide {number} micro-batches"
    return None


def _ddp_with_chunks(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if layout.num_virtual_stages > 1 and uses_ddp(layout):
        return "DDP supports one stage per rank; use replicate_with fsdp2 or auto, or shard with zero_stage 1, 2 or 3"
    return None


LAYOUT_RULES = make_rules(
    ("degrees", "layout micro_batch_size", _degrees),
    ("model-kind", "layout", _model_kind),
    ("own-pipeline", "layout", _own_pipeline),
    ("own-tensor-parallel", "layout", _own_tensor_parallel),
    ("shard-needs-zero", "layout", _shard_needs_zero),
    *(_tp_divides(name) for name in ("num_heads", "num_kv_heads", "hidden_size", "ffn_hidden_size", "vocab_size")),
    ("sp-needs-tp", "layout", _sp_needs_tp),
    ("sp-seq-length", "layout", _sp_sequence),
    ("ddp-with-tp", "layout", _ddp_with_tp),
    ("zero1-with-tp", "layout", _zero1_with_tp),
    ("global-batch", "layout micro_batch_size", _global_batch),
    ("copies", "layout micro_batch_size loader.batching", _copies),
    ("experts", "layout micro_batch_size precision.level", _experts_layout),
    ("expert-parallel", "layout", _expert_parallel),
    ("latent-attention", "layout.tp layout.tp_engine precision", _latent_attention),
    ("cp-seq-length", "layout", _cp_sequence),
    ("cp-heads", "layout", _cp_heads),
    ("cp-hybrid", "layout", _cp_hybrid),
    ("virtual-stages", "layout", _virtual_stages),
    ("stage-layers", "layout", _stage_layers),
    ("num-microbatches", "layout micro_batch_size", _num_microbatches),
    ("ddp-with-chunks", "layout", _ddp_with_chunks),
    ("shard-embedding", "layout", _shard_embedding),
)


# Legality rules on whole candidates: recompute, kernels, precision, data reading.


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
    if not any(any(row) for part in candidate.recompute.selective for row in part.num_layers):
        return None
    return "compile with ep and selective recompute is not supported: use full recompute, or compile off"


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
    ("keep-fp32", "layout.tp layout.cp layout.ep precision kernels.compile kernels.loss_chunks", _keep_fp32),
    ("fp8-gather", "layout precision", _fp8_gather),
    ("loader", "loader", _loader),
    ("batching", "layout loader.batching kernels.attention", _batching),
    ("varying-with-cp", "layout.cp", _varying_with_cp),
    ("dynamic", "layout.pp loader.batching kernels", _dynamic),
)


# Legality rules on 8-bit float matmuls (precision O1-fp8, O2-fp8).
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


# Legality rules on offloading to host memory.
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


# All legality rules together.


__all__ = [
    "DATA_OF_MODEL",
    "FP32_MAX",
    "FP32_TINY",
    "RULES",
    "LegalityRule",
    "check",
    "has_sane_chunks",
    "holds_plain",
    "uses_ddp",
    "violations",
]

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
