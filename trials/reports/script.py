"""What a training program of the user's own told of itself, and how it told it. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptFacts:
    """What was seen inside the program, by which a knob shows that it acts; None: not seen."""

    world_size: int | None = None
    micro_batch_size: int | None = None
    """Samples of a forward pass on this rank."""
    forwards_per_step: float | None = None
    """Forward passes of an optimiser step on this rank."""
    dtype: str | None = None
    """Number format of the first linear layer's output."""
    parameter_bytes_local: int | None = None
    """Bytes of parameters that this rank holds."""
    parameter_bytes_global: int | None = None
    """Bytes of all parameters of the model, each counted once."""
    layer_calls_per_forward: float | None = None
    """How often a layer runs per forward pass: more than once where it is recomputed."""
    flops_per_step: float | None = None
    """FLOPs of an optimiser step over all ranks, recomputation left out."""
    parameters: int | None = None
    """Number of the model's parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptReport:
    """How a rank's figures were come by, for people and for later decisions; figures themselves are elsewhere."""

    sources: tuple[ScriptSource, ...] = ()
    facts: ScriptFacts = ScriptFacts()
    versions: tuple[tuple[str, ...], ...] = ()
    """Pairs of package and version, as the program saw them."""
    tokens_per_step: float | None = None
    """Mean over the measured steps, where the program counts them; batches may vary in length."""
    samples_per_step: float | None = None
    """The same for samples."""
    num_steps_seen: int = 0
    """Optimiser steps that it told of, those beyond the required ones included."""
    exit_code: int | None = None
    """How the command ended, negative for a signal; None where it was still running and was ended."""
    extras: tuple[tuple[str, ...], ...] = ()
    """Pairs of name and last value of what else it reported."""
    notes: tuple[str, ...] = ()
    """What was left out, ignored or unusual, as sentences."""

    @property
    def is_silent(self) -> bool:
        """Whether this rank told of no step: another one speaks for it."""
        return not self.sources

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
        versions=next((rank.versions for rank in ranks if rank.versions), ()),
        tokens_per_step=next((r.tokens_per_step for r in ranks if r.tokens_per_step is not None), None),
        samples_per_step=next((r.samples_per_step for r in ranks if r.samples_per_step is not None), None),
        num_steps_seen=max(rank.num_steps_seen for rank in ranks),
        exit_code=speaking.exit_code,
        extras=speaking.extras,
        notes=tuple(notes)[:MAX_NOTES],
    )
