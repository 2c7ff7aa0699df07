"""What ranks report in addition to step times: profiles, rates, programs, findings. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trials.accelerator.kinds import DeviceKind
from trials.health import DeviceHealth

# A rank's profile, as small values that travel with its report.
#
# Values are means per profiled step, in seconds unless the name has another unit.


FOLDER = "profile"
"""Name of the folder, inside an attempt's, for traces, graphs and memory snapshots."""

FOLDER_VARIABLE = "TUNE_CLUSTER_PROFILE_DIR"
"""Environment variable with a rank's folder; without it no files are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """A phase of the step, bounded by the host's marks: ``forward``, ``backward``, ``optimizer``, ``data``, ..."""

    name: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """An operator of torch; on CUDA including the kernels that it launched itself."""

    name: str
    num_calls: float
    cpu_s: float
    """Seconds on the host, excluding the operators that it calls."""
    device_s: float
    """Seconds on the accelerator; 0 on CPUs."""
    share: float
    """Fraction of the time of all operators, on the accelerator if there is one."""
    num_flops: float = 0.0
    """FLOPs of the calls of one step; 0 if they are unknown or none."""
    num_bytes: float = 0.0
    """Bytes of their operands; 0 if the work of any call is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """Collectives that one module starts in one step; equal layers count as one module, ``layers.*``."""

    module: str
    """Path in the model; ``gradients`` for gradient reduction outside of modules, ``step`` for the rest."""
    phase: str
    """``forward``, ``backward``, ``recompute`` (of activations in the backward pass) or ``step`` (outside both)."""
    kind: str
    """Type of collective: ``all_gather``, ``all_reduce``, ``send``, ..."""
    axis: str
    """Mesh axes of its group, joined by underscores, such as ``dp_shard``."""
    group_size: int
    num_calls: int
    num_bytes: int
    """Bytes sent by this rank in all calls together; for ``recv``, bytes received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """Avoidable communication, per step."""

    module: str
    phase: str
    problem: str
    """What is redundant, in one sentence."""
    num_calls: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleGap:
    """Time without computation or communication, by the operators or kernels before and after it."""

    after: str
    before: str
    num_gaps: float
    """Gaps per step."""
    time_s: float
    """Seconds per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileEvent:
    """Why torch.compile broke a graph or recompiled code, at one place of the source."""

    kind: Literal["graph break", "recompilation"]
    place: str
    """``FILE:LINE``."""
    reason: str
    num_times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTensor:
    """Tensors of one module that are alive at the memory peak; those of equal layers are combined."""

    module: str
    what: str
    """``weights``, ``gradients``, ``optimiser state``, or the operator that created them."""
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """The peak of allocated memory within the profiled steps, on the training device."""

    peak_bytes: int
    start_bytes: int
    """Bytes allocated when recording began: on CPUs, weights, gradients and optimiser state of a training program. For
    built-in models it is 0, and the peak counts from then on."""
    phase: str
    """Phase of the step in which the peak occurred."""
    tensors: tuple[PeakTensor, ...] = ()
    """The largest tensors at the peak, in descending order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFile:
    """A file in :data:`FOLDER` of the attempt's folder on the rank's node."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """What the profiler recorded on one rank."""

    rank: int
    stage: int
    """Pipeline stage; 0 without a pipeline."""
    first_step: int
    last_step: int
    times: StepTimes
    phases: tuple[PhaseTime, ...] = ()
    operators: tuple[OperatorTime, ...] = ()
    """Operators that take most time, in descending order."""
    collectives: tuple[CollectiveCount, ...] = ()
    redundancies: tuple[Redundancy, ...] = ()
    counted: bool = False
    """Whether collectives were counted; if so, an empty ``collectives`` means there were none."""
    memory: MemoryPeak | None = None
    gaps: tuple[IdleGap, ...] = ()
    """Time without computation or communication, the longest gaps first."""
    cast_share: float = 0.0
    """Fraction of the operators' time that converts number formats."""
    num_waits: float = 0.0
    """How often per step the host waits for the device or, on CPUs, reads a tensor's value."""
    compilations: tuple[CompileEvent, ...] = ()
    """Graph breaks and recompilations since the start of the program."""
    folder: str = ""
    """Absolute path on the rank's node; empty if no files were written."""
    files: tuple[ProfileFile, ...] = ()
    notes: tuple[str, ...] = ()
    """Remarks for people, e.g. that something could not be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step, or of another range of time, on one rank."""

    total_s: float
    computation_s: float
    """Time with an operator (CPU) or a kernel (CUDA) running."""
    communication_s: float
    """Time with a collective in flight."""
    uncovered_communication_s: float
    """Communication without concurrent computation."""
    free_s: float
    """Time without computation or communication."""

    @property
    def overlap(self) -> float:
        """Fraction of communication that computation hides; 0 without communication."""
        return 1.0 - self.uncovered_communication_s / self.communication_s if self.communication_s else 0.0


# Hardware probes: what to measure, and the rates that a rank measured.


Part = Literal["compute", "node", "network"]
PARTS: tuple[Part, ...] = ("compute", "node", "network")

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """What every rank of a probe measures.

    ``compute`` measures each device alone (all at the same time), ``node`` collectives among the ranks of a node,
    ``network`` collectives and transfers between nodes. Parts that need more ranks than the gang has are left out.
    """

    device: DeviceKind
    parts: tuple[Part, ...] = PARTS
    max_matmul_size: int = 8192
    """Side of the largest square matrices; smaller ones are used if their product already takes ``sample_s``."""
    copy_bytes: int = 512 * MIB
    message_bytes: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    num_samples: int = 7
    """Number of samples per median."""
    sample_s: float = 0.02
    """Seconds of work per sample, in as many calls as needed."""
    part_limit_s: float = 10.0
    """Time limit per part, in seconds; it may exclude larger messages."""


def probe_spec(device: DeviceKind, parts: Sequence[Part] = PARTS) -> ProbeSpec:
    """Return what to measure on this kind of device: enough to keep it busy, but only for seconds."""
    if device != "cpu":
        return ProbeSpec(device=device, parts=tuple(parts))
    return ProbeSpec(
        device=device,
        parts=tuple(parts),
        max_matmul_size=2048,
        copy_bytes=64 * MIB,
        message_bytes=(4 * KIB, 64 * KIB, MIB, 4 * MIB, 16 * MIB),
        sample_s=0.01,
        part_limit_s=5.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Units of work per second: the median of several samples, and their spread."""

    per_s: float
    log_spread: float = 0.0
    """Half the inter-quartile range of the samples' logarithms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulRate(Rate):
    """FLOP per second of square matmuls."""

    size: int
    """Side of the matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTime:
    """Median seconds for a message of this size."""

    num_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Times of one operation over ``world_size`` ranks, by message size."""

    world_size: int
    times: tuple[MessageTime, ...]

    @property
    def latency_s(self) -> float:
        """Seconds for an empty message."""
        return fit_line(self.times)[0]

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of messages large enough that latency does not matter."""
        return 1 / fit_line(self.times)[1]

    @property
    def bus_bytes_per_s(self) -> float:
        """Bandwidth of an all-reduce per link: a ring of ``k`` moves ``2 (k - 1) / k`` times the message over each."""
        return 2 * (self.world_size - 1) / self.world_size * self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRates:
    """One rank's measurements; absent if not measured."""

    rank: int
    matmul_flops_per_s: Mapping[str, MatmulRate] = field(default_factory=dict)
    """FLOP/s of matmuls by number format: float32, tf32, bfloat16, float16."""
    copy_bytes_per_s: Mapping[str, Rate] = field(default_factory=dict)
    """Bytes per second of copies: ``device`` (within it, read and write counted), ``to_device``, ``from_device``."""
    node_all_reduce: Link | None = None
    network_all_reduce: Link | None = None
    """Times of all-reduces among one rank per node, for all such groups at once."""
    network_transfer: Link | None = None
    """Times of sending to and receiving from another node simultaneously; the faster of two neighbours."""


def fit_line(times: Sequence[MessageTime]) -> tuple[float, float]:
    """Fit latency in seconds and seconds per byte, both positive, by least squares on relative errors.

    Relative errors let small messages determine the former and large messages the latter.
    """
    if not times:
        raise ValueError("no message was timed")
    # Minimise the sum of ((a + b n) / t - 1)^2, with u = 1 / t and v = n / t.
    rows = [(1 / point.time_s, point.num_bytes / point.time_s) for point in times]
    uu, vv, uv = (sum(f(u, v) for u, v in rows) for f in (lambda u, _: u * u, lambda _, v: v * v, lambda u, v: u * v))
    su, sv = sum(u for u, _ in rows), sum(v for _, v in rows)
    determinant = uu * vv - uv * uv
    if determinant > 1e-12 * uu * vv:
        latency_s, s_per_byte = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
        if latency_s > 0 and s_per_byte > 0:
            return latency_s, s_per_byte
    # The fitted line has a negative term: the smallest message bounds the latency, the largest the bandwidth.
    small, large = min(times, key=lambda p: p.num_bytes), max(times, key=lambda p: p.num_bytes)
    return small.time_s, large.time_s / large.num_bytes


# Reports of a training program, and their sources.


MAX_NOTES = 24
"""Maximum number of distinct notes kept per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSource:
    """Source of one kind of value."""

    name: str
    """The value: ``step_time_s``, ``loss``, ``grad_norm``, ``tokens``, ``allocated_bytes``, ..."""
    source: str
    """``report``, ``hook:NAME``, ``file:FORMAT`` or ``log:FORMAT``."""
    resolution: float = 0.0
    """Smallest difference that the printed digits can show, in the value's unit; 0: full precision."""
    is_share: bool = False
    """Whether it covers only the rank's share of the batch, so that the batch's value is the mean over ranks."""


def micro_batches(forwards: float | None, backwards: int | None, optimizers: int | None) -> int | None:
    """Compute the micro-batches per optimiser step on a rank from the passes in one step; None: unknown.

    One backward pass may follow several forward passes, and vice versa. With several optimisers, each micro-batch
    causes a step of every one.
    """
    if optimizers is not None and optimizers > 1:
        return 1
    return min((round(count) for count in (forwards, backwards) if count), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """Observations inside the program (docs/report-api.md) that show whether knobs take effect. None: not observed."""

    world_size: int | None = None
    micro_batch_size: int | None = None
    forwards_per_step: float | None = None
    dtype: str | None = None
    parameter_bytes_local: int | None = None
    parameter_bytes_global: int | None = None
    gradient_bytes: int | None = None
    optimizer_bytes: int | None = None
    activation_bytes: int | None = None
    layer_calls_per_forward: float | None = None
    flops_per_step: float | None = None
    parameters: int | None = None
    layers: int | None = None
    hidden_size: int | None = None
    vocab_size: int | None = None
    heads: int | None = None
    seq_length: int | None = None
    device_name: str | None = None
    image_size: int | None = None
    batch_norms: int | None = None
    experts: int | None = None
    experts_local: int | None = None
    experts_per_token: int | None = None
    tokens_per_expert: float | None = None
    busiest_expert: float | None = None
    operators: int | None = None
    launch_s: float | None = None
    cpu_s: float | None = None
    ahead_s: float | None = None
    host_syncs: int | None = None
    sync_site: str | None = None
    casts: int | None = None
    cast_bytes: int | None = None
    pageable_copies: int | None = None
    pageable_bytes: int | None = None
    mask_bytes: int | None = None
    unaligned_products: int | None = None
    nchw_convolutions: int | None = None
    collectives: float | None = None
    collective_bytes: float | None = None
    buckets: int | None = None
    bucket_bytes: int | None = None
    bucket_exposed_s: float | None = None
    graphs: int | None = None
    recompilations: int | None = None
    recompile_reason: str | None = None
    compiling_s: float | None = None
    graph_breaks: int | None = None
    break_reason: str | None = None
    backwards_per_step: int | None = None
    num_optimizers: int | None = None
    """Optimisers that stepped; with several, one optimiser's step is not a step of the program."""
    num_workers: int | None = None
    items_draw: bool | None = None
    """Whether loading a sample draws random numbers, so that samples depend on the number of workers."""
    loader_batch_size: int | None = None
    is_compiled: bool | None = None
    wrapper: str | None = None
    """Class that wraps the model, such as ``DistributedDataParallel``."""

    @property
    def micro_batches(self) -> int | None:
        """Micro-batches per optimiser step, see :func:`micro_batches`."""
        return micro_batches(self.forwards_per_step, self.backwards_per_step, self.num_optimizers)

    @property
    def samples_per_step(self) -> int | None:
        """Samples per optimiser step on this rank; None: unknown."""
        if self.micro_batch_size is None or self.micro_batches is None:
            return None
        return self.micro_batch_size * self.micro_batches


MAX_OPTIONS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenOption:
    """An option of the program, and whether the program reads it."""

    kind: str
    """``argparse``, ``omegaconf`` or ``environment``."""
    name: str
    """Name of the attribute, dotted key or variable."""
    value: int | float | bool | None = None
    """Its value if numeric."""
    flags: tuple[str, ...] = ()
    """Spellings on the command line."""
    is_read: bool = False
    at_once: bool = False
    """Whether the program takes all options of this kind at once, which hides reads of single options."""

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.name

    def is_called(self, name: str) -> bool:
        """Whether this is the custom option of this name."""
        return name == f"${self.name}" if self.kind == "environment" else name in (*self.flags, self.name)

    @property
    def is_unread(self) -> bool:
        """Whether the program is known not to read it."""
        return not self.is_read and not self.at_once

    def merged(self, later: SeenOption) -> SeenOption:
        """Combine the observations of several processes for the same option."""
        return replace(later, is_read=self.is_read or later.is_read, at_once=self.at_once or later.at_once)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptReport:
    """How a rank obtained its figures, for people and for later decisions; the figures themselves are elsewhere."""

    sources: tuple[ScriptSource, ...] = ()
    facts: ScriptFacts = ScriptFacts()
    options: tuple[SeenOption, ...] = ()
    """Options of the program, and whether they are read."""
    versions: tuple[tuple[str, ...], ...] = ()
    """Pairs of package and version as imported by the program."""
    tokens_per_step: float | None = None
    """Mean over the measured steps, if the program counts tokens; batches may vary in length."""
    samples_per_step: float | None = None
    """The same in samples."""
    num_steps_seen: int = 0
    """Optimiser steps that it reported, including steps beyond the required ones."""
    longest_sample: int = 0
    """Tokens of the longest samples from the program's loaders; 0: unknown."""
    exit_code: int | None = None
    """Exit code of the command, negative for a signal; None if it was still running and was stopped."""
    extras: tuple[tuple[str, ...], ...] = ()
    """Other reported values: pairs of name and last value."""
    knobs: tuple[tuple[str, ...], ...] = ()
    """Knobs that the hook set inside the program: pairs of name and observed effect."""
    fingerprint: str | None = None
    """Fingerprint, as JSON, of the program to which those knobs apply."""
    notes: tuple[str, ...] = ()
    """What was left out, ignored or unusual, as sentences."""

    @property
    def is_silent(self) -> bool:
        """Whether this rank reported no steps and another rank reports for it."""
        return not self.sources

    @property
    def sample_length(self) -> int | None:
        """Tokens per sample, from the shape of the model's inputs; None if unknown or variable."""
        seen, longest = self.facts.seq_length, self.longest_sample
        return None if longest and seen not in (longest, longest - 1) else seen  # longest includes one label

    def source_of(self, name: str) -> ScriptSource | None:
        """Return the source of values of this name; None if there are none."""
        return next((source for source in self.sources if source.name == name), None)


def merge_scripts(ranks: tuple[ScriptReport, ...]) -> ScriptReport | None:
    """Merge the reports of a gang's ranks, in rank order: figures from the first rank that has them, facts from the
    first rank that observed any, all notes."""
    if not ranks:
        return None
    speaking = next((rank for rank in ranks if not rank.is_silent), ranks[0])
    facts = next((rank.facts for rank in ranks if rank.facts != ScriptFacts()), speaking.facts)
    sources = {source.name: source for rank in reversed(ranks) for source in rank.sources}
    notes = dict.fromkeys(note for rank in ranks for note in rank.notes)
    return ScriptReport(
        sources=tuple(sources[name] for name in sorted(sources)),
        facts=facts,
        options=next((rank.options for rank in ranks if rank.options), ()),
        versions=next((rank.versions for rank in ranks if rank.versions), ()),
        tokens_per_step=next((r.tokens_per_step for r in ranks if r.tokens_per_step is not None), None),
        samples_per_step=next((r.samples_per_step for r in ranks if r.samples_per_step is not None), None),
        num_steps_seen=max(rank.num_steps_seen for rank in ranks),
        exit_code=speaking.exit_code,
        longest_sample=max(rank.longest_sample for rank in ranks),
        extras=speaking.extras,
        knobs=next((rank.knobs for rank in ranks if rank.knobs), ()),
        fingerprint=next((rank.fingerprint for rank in ranks if rank.fingerprint), None),
        notes=tuple(notes)[:MAX_NOTES],
    )


# Findings: what a rank found about a candidate in addition to times.


CompileCache = Literal["cold", "warm", "mixed"]
"""State of the compiler's cache for a trial's graphs: it had none, all, or some of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternEffect:
    """Effect of one selective-recompute pattern in one step on one rank."""

    pattern: str
    num_matches: int
    """Matching operator calls, over all layers and micro-batches of a step."""
    saved_bytes: int
    """Bytes that it freed at the peak of one micro-batch; 0 if something else keeps the tensors alive."""
    recompute_s: float
    """Seconds per step spent on recomputation."""
    is_compiled: bool = False
    """Whether the operators are part of compiled graphs, where their bytes and seconds are not measured apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCast:
    """How often an operator in the custom autocast lists was called in one step."""

    name: str
    list: str
    """``white`` or ``black``."""
    num_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOperator:
    """A fused operator that replaces the model's own."""

    name: str
    """``norm``, ``gate`` or ``rotary``."""
    library: str
    num_places: int
    """Modules of the whole model, or functions, that it replaces."""
    num_calls: int
    """Calls per step on a rank, without those of compiled graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleState:
    """The loss scale and its counters after the last step."""

    scale: float
    num_finite: int
    """Finite steps since the last change of scale or overflow."""
    num_overflowed: int
    """Number of consecutive overflows up to the last step."""
    num_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """Activity of torch.compile in one rank."""

    num_graphs: int
    num_recompilations: int
    """Recompilations because a guard failed."""
    compile_s: float
    reasons: tuple[str, ...] = ()
    """Reasons of the recompilations, shortened."""
    cache_hits: int = 0
    """Graphs found in the compiler's cache because an earlier trial of the sweep had the same ones; for a gang, the sum
    over ranks."""
    cache_misses: int = 0
    """Graphs not found in the cache, and compiled."""

    @property
    def cache(self) -> CompileCache | None:
        """What ``compile_s`` measures: compilation, reading compiled graphs, or a mixture that compares with neither;
        None if the compiler has no cache."""
        if not self.cache_hits:
            return "cold" if self.cache_misses else None
        return "mixed" if self.cache_misses else "warm"

    @property
    def cold_s(self) -> float | None:
        """Seconds to compile with a cold cache; None if an earlier trial had left something in it."""
        return self.compile_s if self.cache == "cold" else None

    @property
    def warm_s(self) -> float | None:
        """Seconds to load everything from the cache, as on a restart; None for other states of the cache."""
        return self.compile_s if self.cache == "warm" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPoint:
    """One point measured by the loader's hill climb."""

    num_workers: int
    prefetch_factor: int
    batch_time_s: float
    """Mean seconds per batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTuningReport:
    """The loader's hill climb: all points in the order measured, the choice, and whether it matters."""

    points: tuple[LoaderPoint, ...]
    chosen: LoaderPoint
    tuning_time_s: float
    verdict: str
    """One sentence: whether waiting for data is a noticeable share of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTuningReport:
    """Contents of cuDNN's algorithm cache: configurations met while tuning, and later lookups and hits."""

    num_configurations: int
    num_lookups: int
    num_hits: int
    note: str = ""

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_lookups if self.num_lookups else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthReport:
    """Batches of samples of varying length in the measured steps, over all data-parallel ranks."""

    batching: str
    padding: float
    """Share of the computed positions (of images: pixels) that is padding."""
    imbalance: float
    """Positions of the rank with the most over the mean of all ranks, less 1; mean of the steps."""
    num_shapes: int
    """Distinct shapes of micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFormatReport:
    """Memory format of convolutions: predicted by the rule, chosen, and seconds per pass in either format."""

    rule: str
    chosen: str
    nchw_s: float
    nhwc_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoad:
    """How unevenly the router of a layer loaded its experts over the measured steps."""

    layer: int
    """Number of the layer in the whole model."""
    busiest: float
    """Tokens of the busiest expert over the mean of all experts, counting the tokens of all ranks."""
    num_idle: int
    """Experts without a token on any rank."""
    rank: int
    busiest_on_rank: float
    """The same as ``busiest`` for the tokens of ``rank`` alone; of a gang, the rank where it is largest."""
    busiest_rank: float = 1.0
    """Tokens of the busiest expert-parallel rank over the mean of these ranks; 1 if all do the same work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything a rank found out; empty if all such knobs are off."""

    recompute: tuple[PatternEffect, ...] = ()
    autocast: tuple[OperatorCast, ...] = ()
    fused: tuple[FusedOperator, ...] = ()
    loss_scale: LossScaleState | None = None
    graph: GraphReport | None = None
    loader: LoaderTuningReport | None = None
    kernel_tuning: KernelTuningReport | None = None
    memory_format: MemoryFormatReport | None = None
    lengths: LengthReport | None = None
    """Padding and imbalance; None if all samples are of one size."""
    experts: tuple[ExpertLoad, ...] = ()
    """Load of the experts per layer; empty for dense models and for balanced routing."""
    rates: tuple[RankRates, ...] = ()
    """Rates of a probe, one entry per rank."""
    profile: tuple[RankProfile, ...] = ()
    """Profiles of a recorded run, one entry per recorded rank."""
    script: ScriptReport | None = None
    """Observations of a training program; None if the rank trained a built-in model."""
    devices: tuple[DeviceHealth, ...] = ()
    """Health of the devices during the measurement, unhealthy ones first; empty if unknown."""
