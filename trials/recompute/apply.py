"""Applies a candidate's recompute policy to a model, and counts what it did."""

from __future__ import annotations

import logging
import re
from typing import Any

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from trials.models.base import TrainModel
from trials.recompute.selective import recompute_selected
from trials.recompute.tally import PatternTally
from trials.reports.findings import PatternEffect
from trials.spec import Counts, Recompute
from trials.stages import Chunk, count_at

logger = logging.getLogger(__name__)

COMMUNICATION = "communication"
"""Label of recompute of communication among the patterns."""
_GATHERING = r"(.*\.)?gather_sequence"


class RecomputeMeter:
    """Counts what selective recompute, and that of communication, drops and computes again."""

    def __init__(self, tallies: tuple[PatternTally, ...] = ()) -> None:
        self._tallies = tallies
        self._num_microbatches = 0
        self._has_warned = False

    def reset(self) -> None:
        """Forget what was counted."""
        self._num_microbatches = 0
        for tally in self._tallies:
            tally.reset()

    def count_microbatch(self, _module: nn.Module, _args: Any) -> None:
        """Count one more pass of the model; a forward pre-hook."""
        self._num_microbatches += 1

    def effects(self, num_steps: int) -> tuple[PatternEffect, ...]:
        """Effect of every pattern per step since the last reset; waits for the device."""
        effects = tuple(self._effect(tally, max(1, num_steps)) for tally in self._tallies)
        if not self._has_warned:
            self._has_warned = True
            _warn([effect for effect, tally in zip(effects, self._tallies, strict=True) if tally.num_layers])
        return effects

    def _effect(self, tally: PatternTally, num_steps: int) -> PatternEffect:
        return PatternEffect(
            pattern=tally.label,
            num_matches=round(tally.num_matches / num_steps),
            saved_bytes=max(0, round(tally.saved_bytes / max(1, self._num_microbatches))),
            recompute_s=tally.recompute_s / num_steps,
        )


def _warn(effects: list[PatternEffect]) -> None:
    """Warn of patterns without effect on the layers that they apply to."""
    for effect in effects:
        if effect.num_matches == 0:
            logger.warning("recompute pattern %r matches nothing in this part of the model", effect.pattern)
        elif effect.saved_bytes == 0:
            logger.warning("recompute pattern %r saves nothing: something else keeps the tensors", effect.pattern)


def apply_recompute(model: TrainModel, recompute: Recompute, chunk: Chunk) -> RecomputeMeter:
    """Make the layers of this virtual stage recompute, in place.

    Layers recomputed in full come first, so the other counts take effect where they are larger.
    """
    names = list(model.layers)
    num_full = count_at(recompute.full, chunk.chunk, chunk.stage)
    patterns = _patterns(recompute)
    tallies = tuple(PatternTally(label=label, expression=re.compile(text)) for label, text, _ in patterns)
    limits = [count_at(counts, chunk.chunk, chunk.stage) for _, _, counts in patterns]
    for i, name in enumerate(names):
        if i < num_full:
            # Models of ours draw no random numbers, so there is no state to restore.
            model.layers[name] = checkpoint_wrapper(model.layers[name], preserve_rng_state=model.is_own)
        elif chosen := [tally for tally, limit in zip(tallies, limits, strict=True) if i < limit]:
            recompute_selected(model.layers[name], chosen)
    meter = RecomputeMeter(tallies)
    if tallies:
        model.register_forward_pre_hook(meter.count_microbatch)
    return meter


def _patterns(recompute: Recompute) -> list[tuple[str, str, Counts]]:
    """Label, regular expression and layer counts of every pattern."""
    patterns: list[tuple[str, str, Counts]] = [
        (one.pattern, one.pattern, one.num_layers) for one in recompute.selective
    ]
    if recompute.communication:
        patterns.append((COMMUNICATION, _GATHERING, recompute.communication))
    return patterns
