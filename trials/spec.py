"""What a trial is told to do: the workload, one candidate, and how to measure it. Standard library only."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar, Literal

from trials.codec import digest

AXES = ("dp_replicate", "dp_shard", "tp")
"""Mesh axes from outer to inner; a rank's coordinates follow this order (``tp`` varies fastest)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaModel:
    """Shape of a Llama-style decoder (RMSNorm, RoPE, SwiGLU, grouped-query attention, untied head)."""

    kind: ClassVar[str] = "llama"
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_hidden_size: int
    vocab_size: int = 256
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class TextData:
    """Byte-level tokens of text files.

    ``path`` names a file or a folder; ``None`` means the Python standard library's own source files.
    """

    kind: ClassVar[str] = "text"
    path: str | None = None
    pattern: str = "*.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101)."""

    kind: ClassVar[str] = "adamw"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is trained, the same for every trial of a sweep."""

    model: LlamaModel
    data: TextData
    seq_length: int
    global_batch_size: int
    """Sequences per optimiser step over all data-parallel ranks."""
    optimizer: AdamW = AdamW()
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the ranks split the work; every degree resolved.

    ``zero_stage`` says what ``dp_shard`` shards: 1 optimiser states, 2 also gradients, 3 also parameters; it is 0
    exactly when ``dp_shard`` is 1. ``replicate_with`` picks the engine of ``dp_replicate`` where there is a choice.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    sequence_parallel: bool = False
    replicate_with: Literal["ddp", "fsdp2"] = "ddp"

    @property
    def dp(self) -> int:
        """Data-parallel degree: into how many parts the global batch is split."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        return self.dp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRecompute:
    """Keep every activation."""

    kind: ClassVar[str] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class FullRecompute:
    """Keep only the input of the first ``num_layers`` layers and recompute the rest in the backward pass."""

    kind: ClassVar[str] = "full"
    num_layers: int


Recompute = NoRecompute | FullRecompute


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """Loss scaling for float16: multiply by ``growth_factor`` after ``growth_interval`` finite steps in a row, by
    ``backoff_factor`` after ``backoff_interval`` steps in a row with inf or nan. ``dynamic=False`` keeps ``initial``.
    """

    initial: float = 2.0**15
    growth_factor: float = 2.0
    growth_interval: int = 1000
    backoff_factor: float = 0.5
    backoff_interval: int = 2
    dynamic: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Mixed precision: O0 is fp32, O1 autocast, O2 16-bit parameters with fp32 master weights.

    ``loss_scale`` is set exactly when ``dtype`` is float16.
    """

    level: Literal["O0", "O1", "O2"] = "O0"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    loss_scale: LossScale | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """How batches reach the step. ``prefetch_factor`` (batches ahead per worker) is 0 exactly when there are none."""

    num_workers: int = 0
    prefetch_factor: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """``compile="block"`` compiles each transformer block; ``backend`` is the torch.compile backend used."""

    compile: Literal["off", "block"] = "off"
    backend: str = "inductor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration: a point of the search space, canonical, hashable."""

    layout: Layout = Layout()
    micro_batch_size: int = 1
    """Sequences per data-parallel rank per micro-batch."""
    recompute: Recompute = NoRecompute()
    precision: Precision = Precision()
    loader: Loader = Loader()
    kernels: Kernels = Kernels()

    @property
    def config_key(self) -> str:
        """SHA-256 of the canonical JSON: equal exactly for equal candidates."""
        return _config_key(self)

    def num_microbatches(self, global_batch_size: int) -> int:
        """Micro-batches per optimiser step on each data-parallel rank (gradient accumulation steps)."""
        return global_batch_size // (self.micro_batch_size * self.layout.dp)


@functools.lru_cache(maxsize=2**17)
def _config_key(candidate: Candidate) -> str:
    """Asked for every trial of a sweep at every proposal, so worth keeping."""
    return digest(candidate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How to measure: warm up until step times are stable, then measure until the spread is small.

    A step counts as stable when the last two warm-up times differ by at most ``warmup_tolerance`` (relative).
    Measuring takes ``num_steps``, then more up to ``max_steps`` while the relative inter-quartile range of the step
    times is above ``max_relative_spread``.
    """

    min_warmup_steps: int = 2
    max_warmup_steps: int = 6
    warmup_tolerance: float = 0.2
    num_steps: int = 8
    max_steps: int = 16
    max_relative_spread: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSpec:
    """All a gang needs to run one trial, as JSON."""

    workload: Workload
    candidate: Candidate
    protocol: Protocol = Protocol()
    device: Literal["cpu", "cuda"] = "cpu"
    memory_limit_bytes: int | None = None
    """Device memory a rank may use beyond what the idle process holds; ``None`` leaves it to the device."""
