"""Legality rules on layouts and batch sizes, on how they fit the model, and what a rule is. Standard library only.

Sources: the divisibility rules are those of the Megatron and PyTorch tensor-parallel layouts, the schedules' rules
those of ``torch.distributed.pipelining.schedules``; the others are combinations the runner cannot train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trials.spec import Candidate, Counts, Layout, LlamaModel, OwnModel, Workload, decoder_of

Check = Callable[[Workload, Candidate], str | None]
"""Gives a one-line reason why the runner refuses the pair, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LegalityRule:
    """One thing the runner insists on."""

    id: str
    reads: tuple[str, ...]
    """All that ``check`` looks at besides the workload: fields of the candidate, or attributes of theirs like
    ``layout.tp``. Candidates that agree in those are judged alike, and once."""
    check: Check


def make_rules(*checks: tuple[str, str, Check]) -> tuple[LegalityRule, ...]:
    """Rules from ids, what is read (separated by spaces) and checks."""
    return tuple(LegalityRule(id=name, reads=tuple(reads.split()), check=check) for name, reads, check in checks)


def uses_ddp(layout: Layout) -> bool:
    """Whether gradients are reduced by DistributedDataParallel: plain replication of whole parameters."""
    return layout.zero_stage == 0 and layout.dp_replicate * layout.cp > 1 and layout.replicate_with == "ddp"


def holds_plain(layout: Layout) -> bool:
    """Whether every data-parallel rank holds its parameters whole, as plain tensors: under DDP and under ZeRO-1."""
    return layout.zero_stage == 1 or uses_ddp(layout)


def shape_problem(counts: Counts, layout: Layout) -> str | None:
    """How ``counts`` differ from the layout's chunks and stages, to go behind their name; None where they agree."""
    if len(counts) == layout.num_virtual_stages and all(len(row) == layout.pp for row in counts):
        return None
    num_stages = "/".join(str(len(row)) for row in counts) or 0
    wanted = f"{layout.num_virtual_stages} chunks of {layout.pp} stages"
    return f"has {len(counts)} chunks of {num_stages} stages, the layout {wanted}"


# ---- degrees and data parallelism ----


def _degrees(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    degrees = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.num_virtual_stages)
    return None if min(*degrees, candidate.micro_batch_size) >= 1 else "degrees and micro_batch_size start at 1"


def _model_kind(workload: Workload, candidate: Candidate) -> str | None:
    layout, model = candidate.layout, workload.model
    if isinstance(model, LlamaModel) or max(layout.pp, layout.cp, layout.tp) == 1:
        return None
    if isinstance(model, OwnModel):
        return None if layout.cp == 1 else f"model kind {model.kind} has no context parallelism: cp is for llama"
    return f"model kind {model.kind} runs data-parallel only: pp, cp and tp are for llama"


def _own_pipeline(workload: Workload, candidate: Candidate) -> str | None:
    model = workload.model
    if not isinstance(model, OwnModel) or candidate.layout.pp == 1 or model.facts.no_pipeline is None:
        return None
    return f"pp {candidate.layout.pp}: {model.facts.no_pipeline}"


def _own_tensor_parallel(workload: Workload, candidate: Candidate) -> str | None:
    """Modules of the user's are split by a plan, which the local engine cannot read."""
    layout, model = candidate.layout, workload.model
    if not isinstance(model, OwnModel) or layout.tp == 1:
        return None
    if model.facts.no_tensor_parallel is not None:
        return f"tp {layout.tp}: {model.facts.no_tensor_parallel}"
    if layout.tp_engine == "local" or layout.sequence_parallel:
        return f"tp of model kind {model.kind} goes by a plan: tp_engine dtensor without sequence_parallel, and no DDP"
    return None


def _shard_needs_zero(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if layout.dp_shard > 1 and layout.zero_stage == 0:
        return f"dp_shard {layout.dp_shard} shards nothing with zero_stage 0; choose 1, 2 or 3"
    if layout.dp_shard == 1 and layout.zero_stage > 0:
        return f"zero_stage {layout.zero_stage} needs dp_shard above 1"
    return None


def _shard_embedding(workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if not layout.shard_embedding:
        return None
    if not isinstance(workload.model, LlamaModel):
        return f"shard_embedding is for llama, not model kind {workload.model.kind}"
    if layout.dp * layout.cp == 1 or holds_plain(layout):
        return "shard_embedding needs FSDP2: data-parallel ranks, and neither DDP nor ZeRO stage 1"
    return None


def _global_batch(workload: Workload, candidate: Candidate) -> str | None:
    micro_batch_size, dp, total = candidate.micro_batch_size, candidate.layout.dp, workload.global_batch_size
    if total % (micro_batch_size * dp) == 0:
        return None
    return f"global_batch_size {total} is not divisible by micro_batch_size {micro_batch_size} x dp {dp}"


# ---- tensor parallelism ----


def _tp_divides(name: str) -> tuple[str, str, Check]:
    """Id, what is read and check of the rule that ``tp`` divides this size of the model."""

    def check(workload: Workload, candidate: Candidate) -> str | None:
        size, tp = getattr(decoder_of(workload.model), name, 0), candidate.layout.tp
        if size % tp == 0:
            return None
        remedy = f"; pad it to {-(-size // tp) * tp}" if name == "vocab_size" else ""
        return f"{name} {size} is not divisible by tp {tp}{remedy}"

    return f"tp-{name.replace('_', '-')}", "layout.tp", check


def _sp_needs_tp(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    return "sequence_parallel needs tp above 1" if layout.sequence_parallel and layout.tp == 1 else None


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


def _copies(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if layout.num_copies == 1:
        return None
    if layout.tp == 1 or layout.tp_engine != "local":
        return "num_copies 2 hides tensor-parallel collectives: it needs tp above 1 and tp_engine local or auto"
    if candidate.micro_batch_size % 2:
        return f"num_copies 2 halves the micro-batch: micro_batch_size {candidate.micro_batch_size} is odd"
    return None


# ---- context parallelism ----


def _cp_sequence(workload: Workload, candidate: Candidate) -> str | None:
    """Each rank holds an early and a late piece of every sequence, so that all have the same work."""
    cp, seq_length = candidate.layout.cp, workload.seq_length
    if cp == 1 or seq_length % (2 * cp) == 0:
        return None
    return f"context parallelism gives each rank two pieces: seq_length {seq_length} is not divisible by 2 x cp {cp}"


def _cp_heads(workload: Workload, candidate: Candidate) -> str | None:
    layout, model = candidate.layout, workload.model
    if layout.cp == 1 or layout.cp_method != "ulysses" or not isinstance(model, LlamaModel):
        return None
    for name, heads in (("num_heads", model.num_heads), ("num_kv_heads", model.num_kv_heads)):
        if heads % (layout.tp * layout.cp):
            return f"cp_method ulysses: {name} {heads} is not divisible by tp {layout.tp} x cp {layout.cp}"
    return None


# ---- pipeline ----


def has_sane_chunks(num_layers: int, *, pp: int, num_virtual_stages: int) -> bool:
    """Whether stages are about as many as layers; some may be empty, two more per rank than there are layers for."""
    return pp * num_virtual_stages <= num_layers + 2 * pp


def _virtual_stages(workload: Workload, candidate: Candidate) -> str | None:
    """Interleaving needs several chunks and the V shape exactly two; 1F1B has one; GPipe takes any number."""
    layout = candidate.layout
    chunks, schedule = layout.num_virtual_stages, layout.schedule
    if layout.pp == 1:
        return None if chunks == 1 else f"num_virtual_stages {chunks} needs pp above 1"
    if schedule == "1f1b" and chunks != 1:
        return f"schedule 1f1b has one stage per rank, not {chunks}; use interleaved or gpipe"
    if schedule == "interleaved" and chunks < 2:
        return "schedule interleaved needs num_virtual_stages of at least 2"
    if schedule == "zbv" and chunks != 2:
        return f"schedule zbv has exactly 2 stages per rank, not {chunks}"
    if not has_sane_chunks(workload.num_layers, pp=layout.pp, num_virtual_stages=chunks):
        most = (workload.num_layers + 2 * layout.pp) // layout.pp
        return f"{workload.num_layers} layers on pp {layout.pp} take num_virtual_stages up to {most}, not {chunks}"
    return None


def _stage_layers(workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    counts = layout.stage_layers
    if layout.pp == 1:
        return None if counts == () else "stage_layers needs pp above 1"
    if problem := shape_problem(counts, layout):
        return f"stage_layers {problem}"
    if min(map(min, counts)) < 0:
        return "stage_layers leaves a stage fewer than 0 layers"
    total = sum(map(sum, counts))
    return None if total == workload.num_layers else f"stage_layers hold {total} of {workload.num_layers} layers"


def _num_microbatches(workload: Workload, candidate: Candidate) -> str | None:
    """``Schedule1F1B`` and ``ScheduleInterleaved1F1B`` of torch; its other schedules take any number."""
    layout = candidate.layout
    number = candidate.num_microbatches(workload.global_batch_size)
    if layout.pp == 1:
        return None
    if layout.schedule == "1f1b" and number < layout.pp:
        return f"schedule 1f1b needs a micro-batch per stage: {number} for pp {layout.pp}"
    rounds = max(1, number // layout.pp)
    if layout.schedule == "interleaved" and number % rounds:
        return f"schedule interleaved works in {rounds} rounds, which do not divide {number} micro-batches"
    return None


def _ddp_with_chunks(_workload: Workload, candidate: Candidate) -> str | None:
    layout = candidate.layout
    if layout.num_virtual_stages > 1 and uses_ddp(layout):
        return "DDP takes one stage per rank; use replicate_with fsdp2 or auto, or shard with zero_stage 1, 2 or 3"
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
    ("copies", "layout micro_batch_size", _copies),
    ("cp-seq-length", "layout", _cp_sequence),
    ("cp-heads", "layout", _cp_heads),
    ("virtual-stages", "layout", _virtual_stages),
    ("stage-layers", "layout", _stage_layers),
    ("num-microbatches", "layout micro_batch_size", _num_microbatches),
    ("ddp-with-chunks", "layout", _ddp_with_chunks),
    ("shard-embedding", "layout", _shard_embedding),
)
