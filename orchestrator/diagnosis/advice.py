"""Advice that costs nothing to follow, from the sizes, layouts, masks, copies and waits recorded in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from orchestrator.units import count, milliseconds, num_bytes
from trials.outcome import Measurement
from trials.reports import ScriptFacts
from trials.spec import Candidate, ScriptModel, Workload, decoder_of

ALIGNED = 64
"""Multiple of vocabulary rows for which tensor cores compute full tiles in any 16-bit format."""
SMALL_BUCKET = 1 << 20
"""Size of a gradient bucket, in bytes, below which latency dominates on a network."""
MANY_BUCKETS = 4
MANY_CASTS = 0.1
"""Minimum share of casts among a step's operators for a line of advice."""
MANY_SKIPPED = 0.1
"""Minimum share of steps skipped by loss scaling for a line of advice."""
NEARLY_FULL = 0.92
"""Share of device memory above which the allocator is likely to free and reallocate blocks."""
MANY_SHAPES = 4
"""Number of shapes of micro-batches from which on measuring kernels for each one costs more than it gains."""
UNEVEN = 1.5
"""Tokens of the busiest expert over the mean above which there is a line of advice."""
FEW_ROWS = 256
"""Rows per matrix below which a GPU reads weights for longer than it multiplies: an H100 multiplies some 300 16-bit
numbers in the time it reads one."""
HALF = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A trial, as input to advice."""

    workload: Workload
    candidate: Candidate
    measurement: Measurement
    on_cpu: bool
    limit_bytes: float | None
    baseline: Candidate | None
    """None if the trial is the baseline."""

    @property
    def facts(self) -> ScriptFacts:
        script = self.measurement.findings.script
        return script.facts if script is not None else ScriptFacts()

    @property
    def is_half(self) -> bool:
        return self.candidate.precision.dtype in HALF or self.facts.dtype in HALF


def advise(one: Observed) -> tuple[str, ...]:
    """Lines of advice, each with its figure."""
    return tuple(line for rule in _RULES for line in rule(one))


def _sizes(one: Observed) -> Iterator[str]:
    if one.on_cpu:
        return
    decoder = decoder_of(one.workload.model)
    rows = one.facts.vocab_size or (decoder.vocab_size if decoder is not None else 0)
    if rows > ALIGNED and rows % ALIGNED:
        more = -rows % ALIGNED
        yield f"the vocabulary size {rows:,} is not a multiple of {ALIGNED}: pad it by {more} rows to {rows + more:,}"
    width = one.facts.hidden_size or 0
    if width > ALIGNED and width % ALIGNED and one.is_half:
        yield f"the hidden size {width:,} is not a multiple of {ALIGNED}"
    if one.facts.unaligned_products:
        products = count(one.facts.unaligned_products, "matrix product")
        yield f"{products} per step in 16 bits with sizes not multiples of 8: tensor-core tiles are partly empty"


def _layout(one: Observed) -> Iterator[str]:
    if one.facts.nchw_convolutions:
        number = count(one.facts.nchw_convolutions, "convolution")
        yield (
            f"{number} per step in 16 bits on channels-first inputs: `.to(memory_format=torch.channels_last)` on "
            "model and input avoids transposes"
        )


def _mask(one: Observed) -> Iterator[str]:
    if one.facts.mask_bytes:
        size = num_bytes(one.facts.mask_bytes)
        yield (
            f"the attention mask takes {size} and grows quadratically with sequence length: `is_causal=True` "
            "needs no mask"
        )


def _underflow(one: Observed) -> Iterator[str]:
    num_steps = len(one.measurement.losses) or len(one.measurement.step_times_s)
    skipped = one.measurement.num_skipped_steps
    if skipped and skipped >= MANY_SKIPPED * num_steps:
        yield f"loss scaling skipped {skipped} of {num_steps} steps: start with a lower scale, or use bfloat16"


def _batch_norm(one: Observed) -> Iterator[str]:
    if one.facts.batch_norms and one.baseline is not None:
        before, now = one.baseline.micro_batch_size, one.candidate.micro_batch_size
        if before != now:
            layers = count(one.facts.batch_norms, "batch-norm layer")
            yield f"{layers} with {now} samples per micro-batch instead of {before}: this changes the training"


def _buckets(one: Observed) -> Iterator[str]:
    facts = one.facts
    if facts.buckets and facts.bucket_bytes and facts.buckets >= MANY_BUCKETS:
        mean = facts.bucket_bytes / facts.buckets
        if mean < SMALL_BUCKET:
            how = ", and so does space.inside.ddp_bucket_mb" if isinstance(one.workload.model, ScriptModel) else ""
            yield (
                f"DistributedDataParallel sends {facts.buckets} buckets of {num_bytes(mean)} on average: "
                f"a larger `bucket_cap_mb` (default 25) sends fewer{how}"
            )


def _copies(one: Observed) -> Iterator[str]:
    if one.facts.pageable_copies:
        copies = count(one.facts.pageable_copies, "transfer")
        size = num_bytes(one.facts.pageable_bytes or 0)
        yield (
            f"the host waits for {copies} per step, {size}, from unpinned memory: use `pin_memory=True` and "
            "`.to(device, non_blocking=True)`"
        )


def _syncs(one: Observed) -> Iterator[str]:
    facts = one.facts
    if facts.host_syncs and not one.on_cpu:
        values = count(facts.host_syncs, "value")
        where = f" ({facts.sync_site})" if facts.sync_site else ""
        ahead = f"; the host is {milliseconds(facts.ahead_s)} ahead of the device" if facts.ahead_s is not None else ""
        yield f"the host reads {values} from the device in each step{where}{ahead}: read losses only every few steps"


def _casts(one: Observed) -> Iterator[str]:
    facts = one.facts
    if facts.casts and facts.operators and facts.casts >= MANY_CASTS * facts.operators:
        yield (
            f"{facts.casts} of {facts.operators} operators per step are casts, {num_bytes(facts.cast_bytes or 0)}: "
            "keep weights in 16 bits, or use graph mode, which fuses casts"
        )


def _breaks(one: Observed) -> Iterator[str]:
    if one.facts.graph_breaks:
        why = f": {one.facts.break_reason}" if one.facts.break_reason else ""
        yield f"graph mode has {count(one.facts.graph_breaks, 'graph break')}{why}"


def _experts(one: Observed) -> Iterator[str]:
    """Tokens that are spread unevenly over experts, or thinly."""
    facts, decoder = one.facts, decoder_of(one.workload.model)
    shape = decoder.experts if decoder is not None else None
    tokens = one.candidate.micro_batch_size * one.workload.seq_length // one.candidate.layout.cp
    if facts.tokens_per_expert and facts.experts:
        rows = facts.tokens_per_expert * facts.experts / (facts.experts_local or facts.experts)
    elif shape is not None:
        rows = tokens * shape.top_k * one.candidate.layout.ep / shape.num_experts
    else:
        return
    if (facts.busiest_expert or 0) > UNEVEN:
        yield f"the busiest expert of a layer gets {facts.busiest_expert:.2f}x the mean number of tokens of a rank"
    worst = max(one.measurement.findings.experts, key=lambda load: load.busiest, default=None)
    if worst is not None and worst.busiest > UNEVEN:
        idle = f", {count(worst.num_idle, 'expert')} none" if worst.num_idle else ""
        yield (
            f"in layer {worst.layer} the busiest expert gets {worst.busiest:.2f}x the mean number of tokens{idle}: "
            "a larger `experts.balance_rate` or `aux_loss` evens it out, and `capacity` limits it"
        )
    if rows < FEW_ROWS and not one.on_cpu:
        yield (
            f"an expert multiplies {rows:.0f} rows at a time, so reading its weights takes longer than multiplying: "
            f"larger micro-batches, up from {one.candidate.micro_batch_size}, or a larger ep give it more"
        )


def _memory(one: Observed) -> Iterator[str]:
    peak, limit = one.measurement.peak_bytes, one.limit_bytes
    memory = one.measurement.device_memory
    if one.on_cpu or not limit or peak < NEARLY_FULL * limit:
        return
    retries = memory.num_retries if memory is not None else 0
    again = f"; the allocator freed its cache and retried {count(retries, 'time')}" if retries else ""
    yield f"memory is nearly full, {num_bytes(peak)} of {num_bytes(limit)}{again}"


def _shapes(one: Observed) -> Iterator[str]:
    report, kernels = one.measurement.findings.lengths, one.candidate.kernels
    if report is None or report.num_shapes < MANY_SHAPES:
        return
    shapes = f"micro-batches had {report.num_shapes} shapes"
    if kernels.cudnn_tuning_range:
        yield f"{shapes}, and cuDNN measures its algorithms again for each: set `cudnn_benchmark: off`"
    if kernels.compile != "off" and kernels.compile_mode == "max-autotune" and not kernels.dynamic:
        yield f"{shapes}, and max-autotune searches kernels for each: set `compile_mode: default`, or `dynamic: true`"
    elif kernels.compile != "off" and not kernels.dynamic:
        yield f"{shapes}, and each has a graph of its own: `dynamic: true` compiles one for all"


_RULES: tuple[Callable[[Observed], Iterable[str]], ...] = (
    *(_sizes, _layout, _mask, _underflow, _batch_norm, _buckets, _copies, _syncs, _casts, _breaks, _experts, _memory),
    _shapes,
)
