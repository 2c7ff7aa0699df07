"""Findings: what a rank found out about a candidate besides its times. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trials.reports.devices import DeviceHealth
from trials.reports.profile import RankProfile
from trials.reports.rates import RankRates
from trials.reports.script import ScriptReport

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
    again_s: float | None = None
    """Seconds that compiling took once more, in fresh processes that found in the cache what these had left there; of
    a gang, on the slowest rank. None where nobody tried, or the try came to nothing."""

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
        """Seconds of compilation with all in the cache that a trial leaves there: what a restart pays."""
        return self.compile_s if self.cache == "warm" else self.again_s


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
    """What was seen of a training program of the user's own; None where a rank trained a model of ours."""
    devices: tuple[DeviceHealth, ...] = ()
    """Health of devices while they were measured on, those in trouble first; empty where nobody tells."""
