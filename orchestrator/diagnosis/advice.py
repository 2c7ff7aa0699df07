"""What costs nothing to change: sizes, layouts, masks, copies and waits that a step was seen to have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from orchestrator.units import count, milliseconds, num_bytes
from trials.outcome import Measurement
from trials.reports import ScriptFacts
from trials.spec import Candidate, Workload, decoder_of

ALIGNED = 64
"""Rows of a vocabulary of which tensor cores compute whole tiles, in any 16-bit format."""
SMALL_BUCKET = 1 << 20
"""Bytes of a gradient bucket below which a network spends its time on latency."""
MANY_BUCKETS = 4
MANY_CASTS = 0.1
"""Share of a step's operators that only change the number format, from which on that is said."""
MANY_SKIPPED = 0.1
"""Share of a trial's steps that loss scaling skipped, from which on that is said."""
NEARLY_FULL = 0.92
"""Share of device memory from which on the allocator gives blocks back and takes them again."""
HALF = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A trial as advice sees it."""

    workload: Workload
    candidate: Candidate
    measurement: Measurement
    on_cpu: bool
    limit_bytes: float | None
    baseline: Candidate | None
    """None where the trial is the baseline itself."""

    @property
    def facts(self) -> ScriptFacts:
        script = self.measurement.findings.script
        return script.facts if script is not None else ScriptFacts()

    @property
    def is_half(self) -> bool:
        return self.candidate.precision.dtype in HALF or self.facts.dtype in HALF


def advise(one: Observed) -> tuple[str, ...]:
    """Sentences, each with the figure that shows it."""
    return tuple(line for look in _LOOKS for line in look(one))


def _sizes(one: Observed) -> Iterator[str]:
    if one.on_cpu:
        return
    decoder = decoder_of(one.workload.model)
    rows = one.facts.vocab_size or (decoder.vocab_size if decoder is not None else 0)
    if rows > ALIGNED and rows % ALIGNED:
        more = -rows % ALIGNED
        yield f"a vocabulary of {rows:,} is no multiple of {ALIGNED}: {more} unused rows more make {rows + more:,}"
    width = one.facts.hidden_size or 0
    if width > ALIGNED and width % ALIGNED and one.is_half:
        yield f"a hidden size of {width:,} is no multiple of {ALIGNED}"
    if one.facts.unaligned_products:
        products = count(one.facts.unaligned_products, "matrix product")
        yield f"{products} a step in 16 bits with a size that is no multiple of 8: tensor cores fill such tiles in part"


def _layout(one: Observed) -> Iterator[str]:
    if one.facts.nchw_convolutions:
        number = count(one.facts.nchw_convolutions, "convolution")
        yield (
            f"{number} a step in 16 bits on inputs that lie channels first: "
            "`.to(memory_format=torch.channels_last)` of model and input saves transposing them"
        )


def _mask(one: Observed) -> Iterator[str]:
    if one.facts.mask_bytes:
        size = num_bytes(one.facts.mask_bytes)
        yield f"attention gets a mask of {size} that grows with the square of the sequence: `is_causal=True` needs none"


def _underflow(one: Observed) -> Iterator[str]:
    num_steps = len(one.measurement.losses) or len(one.measurement.step_times_s)
    skipped = one.measurement.num_skipped_steps
    if skipped and skipped >= MANY_SKIPPED * num_steps:
        yield f"loss scaling skipped {skipped} of {num_steps} steps: start from a lower scale, or use bfloat16"


def _batch_norm(one: Observed) -> Iterator[str]:
    if one.facts.batch_norms and one.baseline is not None:
        before, now = one.baseline.micro_batch_size, one.candidate.micro_batch_size
        if before != now:
            layers = count(one.facts.batch_norms, "batch-norm layer")
            yield f"{layers} see {now} samples at a time in place of {before}: another training, whatever its speed"


def _buckets(one: Observed) -> Iterator[str]:
    facts = one.facts
    if facts.buckets and facts.bucket_bytes and facts.buckets >= MANY_BUCKETS:
        mean = facts.bucket_bytes / facts.buckets
        if mean < SMALL_BUCKET:
            yield (
                f"DistributedDataParallel sends {facts.buckets} buckets of {num_bytes(mean)} in the mean: "
                "a larger `bucket_cap_mb` (25 by default) sends fewer"
            )


def _copies(one: Observed) -> Iterator[str]:
    if one.facts.pageable_copies:
        copies = count(one.facts.pageable_copies, "transfer")
        size = num_bytes(one.facts.pageable_bytes or 0)
        yield (
            f"{copies} a step, {size}, from memory that is not pinned, for which the host waits: "
            "`pin_memory=True` and `.to(device, non_blocking=True)`"
        )


def _syncs(one: Observed) -> Iterator[str]:
    facts = one.facts
    if facts.host_syncs and not one.on_cpu:
        values = count(facts.host_syncs, "value")
        where = f" ({facts.sync_site})" if facts.sync_site else ""
        ahead = f"; the host is {milliseconds(facts.ahead_s)} ahead of the device" if facts.ahead_s is not None else ""
        yield f"the host reads {values} of the device in each step{where}{ahead}: read losses every few steps only"


def _casts(one: Observed) -> Iterator[str]:
    facts = one.facts
    if facts.casts and facts.operators and facts.casts >= MANY_CASTS * facts.operators:
        yield (
            f"{facts.casts} of {facts.operators} operators of a step only change the number format, "
            f"{num_bytes(facts.cast_bytes or 0)}: weights in 16 bits, or graph mode, which fuses them"
        )


def _breaks(one: Observed) -> Iterator[str]:
    if one.facts.graph_breaks:
        why = f": {one.facts.break_reason}" if one.facts.break_reason else ""
        yield f"graph mode breaks off {count(one.facts.graph_breaks, 'time')}{why}"


def _memory(one: Observed) -> Iterator[str]:
    peak, limit = one.measurement.peak_bytes, one.limit_bytes
    memory = one.measurement.device_memory
    if one.on_cpu or not limit or peak < NEARLY_FULL * limit:
        return
    retries = memory.num_retries if memory is not None else 0
    again = f"; the allocator gave blocks back and took them again {count(retries, 'time')}" if retries else ""
    yield f"memory is nearly full, {num_bytes(peak)} of {num_bytes(limit)}{again}"


_LOOKS: tuple[Callable[[Observed], Iterable[str]], ...] = (
    *(_sizes, _layout, _mask, _underflow, _batch_norm, _buckets, _copies, _syncs, _casts, _breaks, _memory),
)
