"""Rules on layouts and batch sizes: what the runner can train, each with a reason. Standard library only.

The divisibility rules are those of the Megatron and PyTorch tensor-parallel layouts; the schedules' rules are those of
``torch.distributed.pipelining.schedules``. The others are combinations that the runner cannot train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trials.spec import (
    Candidate,
    Counts,
    Layout,
    LlamaModel,
    Model,
    ScriptModel,
    UserModel,
    Workload,
    decoder_of,
)

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
    if candidate.loader.batching == "buckets" or (workload.lengths and layout.pp == 1):
        # Only pipelines pad to seq_length: otherwise micro-batches have different numbers of positions.
        return f"{size}: samples of varying length need an even micro_batch_size, or pp above 1 with batching padding"
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
