"""What ranks report of a trial next to step times: profiles, rates, programs, findings. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trials.accelerator.kinds import DeviceKind
from trials.health import DeviceHealth

# A rank's profile, as small values that travel with its report. Standard library only.
#
# Numbers are per profiled step: means over the steps, seconds unless the name says otherwise.


FOLDER = "profile"
"""Name of the folder, inside an attempt's, that takes traces, graphs and memory snapshots."""

FOLDER_VARIABLE = "TUNE_CLUSTER_PROFILE_DIR"
"""Environment variable that tells a rank the folder; without it no files are written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """A phase of the step as the host's marks bound it: ``forward``, ``backward``, ``optimizer``, ``data``, ..."""

    name: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """An operator of torch; on CUDA also with the kernels that it launched itself."""

    name: str
    num_calls: float
    cpu_s: float
    """Seconds on the host, without the operators that it calls."""
    device_s: float
    """Seconds on the accelerator; 0 on CPUs."""
    share: float
    """Share of the time of all operators, on the accelerator if there is one, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCount:
    """Collectives that one module starts in one step; equal layers are one module, ``layers.*``."""

    module: str
    """Path in the model; ``gradients`` for what reduces them outside of modules, ``step`` for the rest of it."""
    phase: str
    """``forward``, ``backward``, ``recompute`` (of activations in the backward pass) or ``step`` (outside of both)."""
    kind: str
    """Type of collective: ``all_gather``, ``all_reduce``, ``send``, ..."""
    axis: str
    """Mesh axes of its group, joined by underscores, like ``dp_shard``."""
    group_size: int
    num_calls: int
    num_bytes: int
    """Bytes sent by this rank, all calls together; for ``recv``, bytes that arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """Communication that need not be, per step."""

    module: str
    phase: str
    problem: str
    """One sentence for people that says what is redundant."""
    num_calls: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleGap:
    """Time in which nothing is computed or communicated, by the operator or kernel before it and the one after it."""

    after: str
    before: str
    num_gaps: float
    """Per step."""
    time_s: float
    """Seconds per step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileEvent:
    """Why torch.compile broke a graph, or compiled code again, at one place of the source."""

    kind: Literal["graph break", "recompilation"]
    place: str
    """``FILE:LINE``."""
    reason: str
    num_times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTensor:
    """Tensors of one module that are alive at the memory peak, those of equal layers together."""

    module: str
    what: str
    """``weights``, ``gradients``, ``optimiser state``, else the operator that made them."""
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """When most memory is allocated within the profiled steps, on the device trained on."""

    peak_bytes: int
    start_bytes: int
    """Allocated when recording began. On CPUs it is the weights, gradients and optimiser state of a training program;
    of our own models 0, and the peak counts from then on."""
    phase: str
    """Phase of the step in which the peak came."""
    tensors: tuple[PeakTensor, ...] = ()
    """The largest at the peak, the largest first."""


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
    """Stage of the pipeline; 0 without one."""
    first_step: int
    last_step: int
    times: StepTimes
    phases: tuple[PhaseTime, ...] = ()
    operators: tuple[OperatorTime, ...] = ()
    """Operators that take most time, the longest first."""
    collectives: tuple[CollectiveCount, ...] = ()
    redundancies: tuple[Redundancy, ...] = ()
    counted: bool = False
    """Whether collectives were counted: if so, an empty ``collectives`` means that there are none."""
    memory: MemoryPeak | None = None
    gaps: tuple[IdleGap, ...] = ()
    """Where nothing is computed or communicated, the longest first."""
    cast_share: float = 0.0
    """Share of the operators' time that changes number formats, 0 to 1."""
    num_waits: float = 0.0
    """Times per step that the host waits for the device, or on CPUs reads a tensor's value."""
    compilations: tuple[CompileEvent, ...] = ()
    """Graph breaks and recompilations since the program began."""
    folder: str = ""
    """Absolute path on the rank's node; empty where no files were written."""
    files: tuple[ProfileFile, ...] = ()
    notes: tuple[str, ...] = ()
    """What people should know, e.g. that something could not be recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of one step, or of another range of time, on one rank."""

    total_s: float
    computation_s: float
    """Time with an operator (CPU) or a kernel (CUDA) at work."""
    communication_s: float
    """Time with a collective in flight."""
    uncovered_communication_s: float
    """Communication while nothing is computed."""
    free_s: float
    """Time in which nothing is computed or communicated."""

    @property
    def overlap(self) -> float:
        """The share of communication that computation hides, in 0..1; 0 without communication."""
        return 1.0 - self.uncovered_communication_s / self.communication_s if self.communication_s else 0.0


# Values of a hardware probe: what to measure, and the rates that a rank measured. Standard library only.


Part = Literal["compute", "node", "network"]
PARTS: tuple[Part, ...] = ("compute", "node", "network")

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSpec:
    """What every rank of a probe measures.

    ``compute`` is each device alone (all at the same time), ``node`` collectives among the ranks of a node, ``network``
    collectives and transfers between nodes; parts that a gang has too few ranks for are left out.
    """

    device: DeviceKind
    parts: tuple[Part, ...] = PARTS
    max_matmul_size: int = 8192
    """Side of the largest square matrices; smaller ones are taken where a product of them takes ``sample_s``."""
    copy_bytes: int = 512 * MIB
    message_bytes: tuple[int, ...] = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    num_samples: int = 7
    """Number of samples that a median is taken over."""
    sample_s: float = 0.02
    """Seconds of work per sample, in as many calls as that takes."""
    part_limit_s: float = 10.0
    """Seconds that each part may take; larger messages are left out where it would take longer."""


def probe_spec(device: DeviceKind, parts: Sequence[Part] = PARTS) -> ProbeSpec:
    """What to measure on this kind of device: large enough to keep it busy, in a probe of seconds."""
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
    """Units of work per second: the median of some samples, and how far they scatter."""

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
    """Median seconds that a message of this size took."""

    num_bytes: int
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Times of one operation by message size over ``world_size`` ranks."""

    world_size: int
    times: tuple[MessageTime, ...]

    @property
    def latency_s(self) -> float:
        """Seconds of a message without content."""
        return fit_line(self.times)[0]

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of messages so large that latency does not count."""
        return 1 / fit_line(self.times)[1]

    @property
    def bus_bytes_per_s(self) -> float:
        """What an all-reduce moves over each rank's links: ``2 (k - 1) / k`` times the message, in a ring of ``k``."""
        return 2 * (self.world_size - 1) / self.world_size * self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRates:
    """One rank's measurements; what was not measured is missing."""

    rank: int
    matmul_flops_per_s: Mapping[str, MatmulRate] = field(default_factory=dict)
    """FLOP/s of matmuls by number format: float32, tf32, bfloat16, float16."""
    copy_bytes_per_s: Mapping[str, Rate] = field(default_factory=dict)
    """Bytes per second of copies: ``device`` (within it, read and write counted), ``to_device``, ``from_device``."""
    node_all_reduce: Link | None = None
    network_all_reduce: Link | None = None
    """Times of all-reduces over one rank of every node, those of all places on the nodes at the same time."""
    network_transfer: Link | None = None
    """Times of sending to another node and receiving from it at once; the faster of two neighbours."""


def fit_line(times: Sequence[MessageTime]) -> tuple[float, float]:
    """Latency in seconds and seconds per byte, by least squares on relative errors; both above zero.

    Small messages fix the one and large messages the other, whatever their absolute times.
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
    # The line leaves the quadrant: the smallest message bounds the latency, the largest the bandwidth.
    small, large = min(times, key=lambda p: p.num_bytes), max(times, key=lambda p: p.num_bytes)
    return small.time_s, large.time_s / large.num_bytes


# Reports of a user's training program, and their source. Standard library only.


MAX_NOTES = 24
"""Notes kept of a rank, each once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptSource:
    """Where one kind of value came from."""

    name: str
    """What is measured: ``step_time_s``, ``loss``, ``grad_norm``, ``tokens``, ``allocated_bytes``, ..."""
    source: str
    """``report``, ``hook:NAME``, ``file:FORMAT`` or ``log:FORMAT``."""
    resolution: float = 0.0
    """Smallest difference that it can show, in the value's unit, by the digits printed; 0: full precision."""
    is_share: bool = False
    """Whether it is of the rank's own share of the batch only, so that the mean over ranks is that of the batch."""


def micro_batches(forwards: float | None, backwards: int | None, optimizers: int | None) -> int | None:
    """Micro-batches of an optimiser step on a rank, by the passes in one; None: unknown.

    Several forward passes may belong to one backward pass, and the other way round. With several optimisers, one
    micro-batch makes steps of all of them.
    """
    if optimizers is not None and optimizers > 1:
        return 1
    return min((round(count) for count in (forwards, backwards) if count), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """What was seen inside the program, as docs/report-api.md has it; it shows whether knobs act. None: not seen."""

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
    """Optimisers that stepped: with several, a step of one is not a step of the program."""
    num_workers: int | None = None
    items_draw: bool | None = None
    """Whether samples draw random numbers as they are loaded, so that they depend on the number of workers."""
    loader_batch_size: int | None = None
    is_compiled: bool | None = None
    wrapper: str | None = None
    """Class that wraps the model, such as ``DistributedDataParallel``."""

    @property
    def micro_batches(self) -> int | None:
        """As :func:`micro_batches`."""
        return micro_batches(self.forwards_per_step, self.backwards_per_step, self.num_optimizers)

    @property
    def samples_per_step(self) -> int | None:
        """Samples of an optimiser step on this rank; None: unknown."""
        if self.micro_batch_size is None or self.micro_batches is None:
            return None
        return self.micro_batch_size * self.micro_batches


MAX_OPTIONS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenOption:
    """An option of the program: whether it is read."""

    kind: str
    """``argparse``, ``omegaconf`` or ``environment``."""
    name: str
    """Attribute, dotted key or variable."""
    value: int | float | bool | None = None
    """None: no number."""
    flags: tuple[str, ...] = ()
    """Spellings on the command line."""
    is_read: bool = False
    at_once: bool = False
    """Whether the program takes all options of this kind at once, so that reading one is not seen."""

    @property
    def key(self) -> tuple[str, str]:
        return self.kind, self.name

    def is_called(self, name: str) -> bool:
        """Whether a custom option by this name is this one."""
        return name == f"${self.name}" if self.kind == "environment" else name in (*self.flags, self.name)

    @property
    def is_unread(self) -> bool:
        """Whether the program is known not to read it."""
        return not self.is_read and not self.at_once

    def merged(self, later: SeenOption) -> SeenOption:
        """The same option as several processes see it."""
        return replace(later, is_read=self.is_read or later.is_read, at_once=self.at_once or later.at_once)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptReport:
    """How a rank's figures were come by, for people and for later decisions; figures themselves are elsewhere."""

    sources: tuple[ScriptSource, ...] = ()
    facts: ScriptFacts = ScriptFacts()
    options: tuple[SeenOption, ...] = ()
    """Options of the program, and whether it reads them."""
    versions: tuple[tuple[str, ...], ...] = ()
    """Pairs of package and version, as the program saw them."""
    tokens_per_step: float | None = None
    """Mean over the measured steps, where the program counts them; batches may vary in length."""
    samples_per_step: float | None = None
    """The same for samples."""
    num_steps_seen: int = 0
    """Optimiser steps that it reported, including those beyond the required ones."""
    longest_sample: int = 0
    """Tokens of the longest samples that the program's loaders gave; 0: not known."""
    exit_code: int | None = None
    """How the command ended, negative for a signal; None where it was still running and was ended."""
    extras: tuple[tuple[str, ...], ...] = ()
    """Pairs of name and last value of what else it reported."""
    knobs: tuple[tuple[str, ...], ...] = ()
    """Pairs of each knob that the hook set within the program, and what was seen of it."""
    fingerprint: str | None = None
    """What identifies the program to which those knobs apply, as JSON."""
    notes: tuple[str, ...] = ()
    """What was left out, ignored or unusual, as sentences."""

    @property
    def is_silent(self) -> bool:
        """Whether this rank reported no step, and another rank reports for it."""
        return not self.sources

    @property
    def sample_length(self) -> int | None:
        """Tokens of a sample, from the shape of the model's inputs; None where it is unknown or samples vary."""
        seen, longest = self.facts.seq_length, self.longest_sample
        return None if longest and seen not in (longest, longest - 1) else seen  # one more: the label of the last token

    def source_of(self, name: str) -> ScriptSource | None:
        """Where values of this name came from; None where there are none."""
        return next((source for source in self.sources if source.name == name), None)


def merge_scripts(ranks: tuple[ScriptReport, ...]) -> ScriptReport | None:
    """One report for a gang, from those of its ranks in rank order: figures of the first rank that has them, facts of
    the first that saw any, all notes."""
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


# Findings: what a rank found out about a candidate in addition to its times. Standard library only.


CompileCache = Literal["cold", "warm", "mixed"]
"""What a trial found of its graphs in the compiler's cache: nothing, everything, or a part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternEffect:
    """What one selective-recompute pattern did in one step on one rank."""

    pattern: str
    num_matches: int
    """Operator calls that matched, over all layers and micro-batches of a step."""
    saved_bytes: int
    """Bytes not kept because of it at the peak of one micro-batch; 0 when something else keeps the tensors alive."""
    recompute_s: float
    """Seconds per step spent computing the outputs again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCast:
    """How often an operator of the custom autocast lists was met in one step."""

    name: str
    list: str
    """``white`` or ``black``."""
    num_calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleState:
    """The loss scale and its counters after the last step."""

    scale: float
    num_finite: int
    """Finite steps since the scale last changed or an overflow."""
    num_overflowed: int
    """Overflowing steps in a row up to now."""
    num_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphReport:
    """What torch.compile did in one rank."""

    num_graphs: int
    num_recompilations: int
    """Compilations of code that had been compiled before, because a guard failed."""
    compile_s: float
    reasons: tuple[str, ...] = ()
    """Why it compiled again, shortened."""
    cache_hits: int = 0
    """Graphs that the compiler found in its cache, because an earlier trial of the sweep had the same; of a gang, all
    ranks together."""
    cache_misses: int = 0
    """Graphs that it looked for there and had to compile."""

    @property
    def cache(self) -> CompileCache | None:
        """Whether ``compile_s`` is the time to compile, to read what was compiled, or a mixture that compares with
        neither; None where the compiler keeps nothing."""
        if not self.cache_hits:
            return "cold" if self.cache_misses else None
        return "mixed" if self.cache_misses else "warm"

    @property
    def cold_s(self) -> float | None:
        """Seconds of compilation from nothing; None of a trial for which an earlier one had left something."""
        return self.compile_s if self.cache == "cold" else None

    @property
    def warm_s(self) -> float | None:
        """Seconds of compilation with everything in the cache, which is what a restart pays; None of other trials."""
        return self.compile_s if self.cache == "warm" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderPoint:
    """One point that the loader's hill climb measured."""

    num_workers: int
    prefetch_factor: int
    batch_time_s: float
    """Mean seconds per batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTuningReport:
    """The hill climb: every point in the order measured, what was chosen, and whether it matters."""

    points: tuple[LoaderPoint, ...]
    chosen: LoaderPoint
    tuning_time_s: float
    verdict: str
    """One sentence: whether waiting for data is a noticeable share of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTuningReport:
    """What cuDNN's algorithm cache held: configurations met while tuning, and lookups and hits afterwards."""

    num_configurations: int
    num_lookups: int
    num_hits: int
    note: str = ""

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_lookups if self.num_lookups else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFormatReport:
    """Memory format of convolutions: by the rule, the one chosen, and the seconds of a pass in either."""

    rule: str
    chosen: str
    nchw_s: float
    nhwc_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Everything a rank found out; the empty value for knobs that are off."""

    recompute: tuple[PatternEffect, ...] = ()
    autocast: tuple[OperatorCast, ...] = ()
    loss_scale: LossScaleState | None = None
    graph: GraphReport | None = None
    loader: LoaderTuningReport | None = None
    kernel_tuning: KernelTuningReport | None = None
    memory_format: MemoryFormatReport | None = None
    rates: tuple[RankRates, ...] = ()
    """Rates of a probe, one entry per rank."""
    profile: tuple[RankProfile, ...] = ()
    """Profiles of a recorded run, one entry per recorded rank."""
    script: ScriptReport | None = None
    """What was seen of a user's training program; None where a rank trained a model of ours."""
    devices: tuple[DeviceHealth, ...] = ()
    """Health of the devices during the measurement, unhealthy ones first; empty if unknown."""
