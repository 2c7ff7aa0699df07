"""What a rank is told of a training program of the user's own: the command, and how it is watched. Standard library
only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trials.spec import Protocol

OUT = "{out}"
"""Placeholder for the attempt's own folder, which the rank fills in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFile:
    """A configuration file of the trial's own. ``{name}`` in arguments and environment becomes its path."""

    name: str
    """Name of the placeholder."""
    file_name: str
    """What it is called in the attempt's folder; its suffix tells frameworks the format."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """Where and how the program says what it measured, besides reports and hooks."""

    name: str = "none"
    """A parser of :mod:`trials.script.logs`: ``megatron``, ``torchtitan``, ..., ``pattern``, ``none``."""
    pattern: str | None = None
    """For ``pattern``: a regular expression with groups ``step`` and any of ``loss``, ``step_s``, ``step_ms``,
    ``tokens_per_s``, ``samples_per_s``, ``grad_norm``, ``allocated_gib``, ``reserved_gib``."""
    files: tuple[str, ...] = ()
    """Glob patterns of files it logs to, read besides its output; ``{out}`` is filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the candidate implies, as far as it can be seen from inside the program; None: nothing can be said."""

    world_size: int | None = None
    micro_batch_size: int | None = None
    """Samples of a forward pass on a rank."""
    num_microbatches: int | None = None
    """Forward passes of an optimiser step on a rank; not told of pipelines."""
    dtype: str | None = None
    """Number format of the first linear layer's output: ``float32``, ``bfloat16``, ``float16``."""
    recomputes: bool | None = None
    """Whether layers run again in the backward pass."""
    parameter_shards: int | None = None
    """Over how many ranks every parameter is spread: ZeRO-3, tensor and pipeline parallelism."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand:
    """All that a rank needs to run a program of the user's own for one trial, as JSON."""

    argv: tuple[str, ...]
    """Everything is filled in but ``{out}`` and the names of ``files``."""
    cwd: str
    env: tuple[tuple[str, ...], ...] = ()
    """Pairs of name and value."""
    env_pass: tuple[str, ...] = ()
    """Further variables of the node that the program may see, by name."""
    files: tuple[CommandFile, ...] = ()
    launcher: Literal["env", "own"] = "env"
    log: LogFormat = LogFormat()
    hook: bool = True
    """Whether our reporting hook is loaded into its Python."""
    protocol: Protocol
    num_devices: int
    """Devices of the whole trial."""
    tokens_per_step: int
    samples_per_step: int
    expected: Expected = Expected()
    device: str = "cpu"
    memory_limit_bytes: int | None = None
    model_flops_per_token: float = 0.0
    """0: not known."""
    cache_dir: str | None = None
    """Folder for compilers' caches, shared by the trials of a sweep on a node; None: the node's temporary folder."""

    @property
    def num_warmup_steps(self) -> int:
        """Steps before measuring, a fixed number: ranks of a foreign program cannot agree on one."""
        return self.protocol.min_warmup_steps

    @property
    def num_required_steps(self) -> int:
        """Steps after which it may end, in whatever way."""
        return self.protocol.min_warmup_steps + self.protocol.num_steps
