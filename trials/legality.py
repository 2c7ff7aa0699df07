"""Which specifications the runner accepts. Standard library only, so that planning can ask without importing torch."""

from __future__ import annotations

from collections.abc import Iterator

from trials.failure import InfeasibleSpec
from trials.spec import Candidate, FullRecompute, Layout, LlamaModel, Precision, Protocol, TrialSpec, Workload


def check(spec: TrialSpec) -> None:
    """Refuse a specification that no launch can run.

    Raises:
        InfeasibleSpec: naming every rule broken.
    """
    problems = [*violations(spec.workload, spec.candidate), *_protocol(spec.protocol)]
    if problems:
        raise InfeasibleSpec("; ".join(problems))


def violations(workload: Workload, candidate: Candidate) -> Iterator[str]:
    """Yield one sentence per broken rule; nothing means the runner accepts the pair."""
    yield from _model(workload.model)
    yield from _layout(candidate.layout)
    yield from _tensor_parallel(workload, candidate.layout)
    yield from _batch(workload, candidate)
    yield from _precision(candidate.precision)
    yield from _knobs(workload.model, candidate)


def _protocol(protocol: Protocol) -> Iterator[str]:
    if not 0 <= protocol.min_warmup_steps <= protocol.max_warmup_steps:
        yield f"min_warmup_steps {protocol.min_warmup_steps} is outside 0..max_warmup_steps {protocol.max_warmup_steps}"
    if not 1 <= protocol.num_steps <= protocol.max_steps:
        yield f"num_steps {protocol.num_steps} is outside 1..max_steps {protocol.max_steps}"


def uses_ddp(layout: Layout) -> bool:
    """Whether gradients are reduced by DistributedDataParallel (plain replication, or under ZeRO-1)."""
    plain = layout.zero_stage == 0 and layout.dp_replicate > 1 and layout.replicate_with == "ddp"
    return plain or layout.zero_stage == 1


def _model(model: LlamaModel) -> Iterator[str]:
    if model.hidden_size % model.num_heads:
        yield f"hidden_size {model.hidden_size} is not divisible by num_heads {model.num_heads}"
    elif (model.hidden_size // model.num_heads) % 2:
        yield f"head size {model.hidden_size // model.num_heads} is odd; rotary embeddings rotate pairs"
    if model.num_heads % model.num_kv_heads:
        yield f"num_heads {model.num_heads} is not divisible by num_kv_heads {model.num_kv_heads}"
    if model.vocab_size < 256:
        yield f"vocab_size {model.vocab_size} is below the 256 values of byte-level tokens"


def _layout(layout: Layout) -> Iterator[str]:
    if min(layout.dp_replicate, layout.dp_shard, layout.tp) < 1:
        yield "degrees of dp_replicate, dp_shard and tp start at 1"
    if (layout.zero_stage == 0) != (layout.dp_shard == 1):
        yield f"zero_stage {layout.zero_stage} does not go with dp_shard {layout.dp_shard}; stage 0 means dp_shard 1"
    if layout.sequence_parallel and layout.tp == 1:
        yield "sequence_parallel needs tp > 1"


def _tensor_parallel(workload: Workload, layout: Layout) -> Iterator[str]:
    tp, model = layout.tp, workload.model
    if tp == 1:
        return
    if layout.zero_stage == 1:
        yield "ZeRO stage 1 does not compose with tp; use stage 2 or 3"
    elif uses_ddp(layout):
        yield 'DDP does not compose with tp; use replicate_with "fsdp2"'
    sizes = {
        "num_heads": model.num_heads,
        "num_kv_heads": model.num_kv_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "vocab_size": model.vocab_size,
    }
    if layout.sequence_parallel:
        sizes["seq_length"] = workload.seq_length
    yield from (f"{name} {size} is not divisible by tp {tp}" for name, size in sizes.items() if size % tp)


def _batch(workload: Workload, candidate: Candidate) -> Iterator[str]:
    per_micro_batch = candidate.micro_batch_size * candidate.layout.dp
    if per_micro_batch < 1 or workload.global_batch_size % per_micro_batch:
        yield (
            f"global_batch_size {workload.global_batch_size} is not a multiple of micro_batch_size "
            f"{candidate.micro_batch_size} * dp {candidate.layout.dp}"
        )


def _precision(precision: Precision) -> Iterator[str]:
    if (precision.level == "O0") != (precision.dtype == "float32"):
        yield f"AMP level {precision.level} does not go with {precision.dtype}; O0 is float32, O1 and O2 are 16-bit"
    if (precision.dtype == "float16") != (precision.loss_scale is not None):
        yield "loss_scale is set exactly when dtype is float16"


def _knobs(model: LlamaModel, candidate: Candidate) -> Iterator[str]:
    recompute, loader = candidate.recompute, candidate.loader
    if isinstance(recompute, FullRecompute) and not 0 < recompute.num_layers <= model.num_layers:
        yield f"recompute of {recompute.num_layers} layers is outside 1..{model.num_layers}"
    if (loader.num_workers == 0) != (loader.prefetch_factor == 0) or min(
        loader.num_workers, loader.prefetch_factor
    ) < 0:
        yield "prefetch_factor is 0 exactly when num_workers is 0"
