"""A space with too many candidates to list: its legal layouts, and candidates drawn or looked up one by one.

What can be tried depends on the layout, so layouts come first: those that are legal are listed (or, of very many, a
random part of them), and recompute policy, precision, loader and kernels are chosen given the layout.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cluster.candidate_table import CandidateTable
from orchestrator.space.naming import Features, Scalar
from orchestrator.space.space import Frame, Space
from trials.spec import Candidate

MAX_ENUMERATED = 1_000_000
"""Candidates of legal layouts that are listed and ranked one by one."""
SAMPLE_SIZE = 20_000
"""Candidates drawn from a larger space where there is no cost model to say which."""
MAX_MISSES = 64
"""Illegal draws in a row after which a space counts as empty."""

Encode = Callable[[Mapping[str, Scalar]], Mapping[str, int]]
"""Whole numbers for knob values, by name."""


@dataclass(frozen=True, kw_only=True)
class LargeSpace:
    """Legal candidates without a list of them."""

    space: Space
    """Only frames that no rule on layouts rejects, at least one."""
    is_legal: Callable[[Candidate], bool]
    is_modelled: bool = False
    """Whether the cost model drew the candidates that stand for the space."""

    @property
    def message(self) -> str:
        """Sentence for people on what is done about the size of the space."""
        what = "those listed were drawn where the cost model expects the best"
        if not self.is_modelled:
            what = "those listed were drawn at random, and conditional TPE goes beyond them"
        return (
            f"too large to enumerate: {self.space.product_size:,} combinations of choices, {len(self.space):,} "
            f"candidates of {len(self.space.frames):,} layouts; {what}"
        )

    def draw(self, rng: random.Random) -> Candidate | None:
        """A legal candidate: every layout is as likely as any other. None where none was found in many draws."""
        for _ in range(MAX_MISSES):
            candidate = self._completion(rng.choice(self.space.frames), rng)
            if self.is_legal(candidate):
                return candidate
        return None

    def sample(self, num: int, seed: int) -> CandidateTable:
        """Up to ``num`` different legal candidates, the same for the same seed."""
        rng = random.Random(seed)
        found: dict[Candidate, None] = {}
        for _ in range(2 * num):
            candidate = self.draw(rng)
            if candidate is None or len(found) == num:
                break
            found[candidate] = None
        return CandidateTable.of(found)

    def _completion(self, frame: Frame, rng: random.Random) -> Candidate:
        fields = {name: rng.choice(values) for name, values in self.space.parts.items()}
        return Candidate(
            layout=frame.layout,
            micro_batch_size=frame.micro_batch_size,
            recompute=rng.choice(frame.recomputes),
            **fields,
        )


class Lookup:
    """The candidate of a large space whose knobs are nearest to given ones, found part by part.

    Args:
        encode: knob values to whole numbers.
        spans: by knob, the largest difference of its numbers where they are ordered, 0 where they only differ or not.
    """

    def __init__(self, large: LargeSpace, features: Features, encode: Encode, spans: Mapping[str, float]) -> None:
        self._large = large
        self._features, self._encode = features, encode
        self._names = tuple(spans)
        self._spans = np.array(list(spans.values()))

    def nearest(self, point: Mapping[str, int], rng: random.Random) -> Candidate:
        """The layout nearest to ``point``, and the nearest of all that goes with it; ties at random.

        The distance is a sum over knobs, and parts of a candidate share no knob: nearest in each is nearest overall.
        """
        wanted = np.array([point[name] for name in self._names])
        frame = self._large.space.frames[self._closest(self._frames, wanted, rng)]
        base = _first(frame, self._large.space)
        policies = self._codes(replace(base, recompute=policy) for policy in frame.recomputes)
        recompute = frame.recomputes[self._closest(policies, wanted, rng)]
        fields = {
            name: values[self._closest(self._parts[name], wanted, rng)]
            for name, values in self._large.space.parts.items()
        }
        return replace(base, recompute=recompute, **fields)

    def _closest(self, codes: NDArray[np.int64], wanted: NDArray[np.int64], rng: random.Random) -> int:
        misses = np.abs(codes - wanted)
        distance = np.where(self._spans > 0, misses / np.maximum(self._spans, 1), misses > 0).sum(axis=1)
        return int(rng.choice(np.flatnonzero(distance <= distance.min() + 1e-9)))

    @functools.cached_property
    def _frames(self) -> NDArray[np.int64]:
        space = self._large.space
        return self._codes(_first(frame, space) for frame in space.frames)

    @functools.cached_property
    def _parts(self) -> Mapping[str, NDArray[np.int64]]:
        space = self._large.space
        base = _first(space.frames[0], space)
        return {
            name: self._codes(replace(base, **{name: value}) for value in values)
            for name, values in space.parts.items()
        }

    def _codes(self, candidates: Iterator[Candidate]) -> NDArray[np.int64]:
        rows = [self._encode(self._features(candidate)) for candidate in candidates]
        return np.array([[row[name] for name in self._names] for row in rows], dtype=np.int64)


def _first(frame: Frame, space: Space) -> Candidate:
    return next(space.completions(frame))


def without_effect(candidate: Candidate) -> frozenset[str]:
    """Knobs that have no effect in this candidate because of another one; conditional search leaves them open."""
    layout, loader = candidate.layout, candidate.loader
    has_workers = loader.num_workers > 0
    conditions: Sequence[tuple[bool, tuple[str, ...]]] = (
        (layout.pp > 1, ("schedule", "num_virtual_stages", "stage_layers")),
        (layout.dp_shard > 1, ("zero_stage",)),
        (layout.zero_stage >= 2, ("gradient_reduction",)),
        (layout.dp_replicate * layout.cp > 1 and layout.zero_stage == 0, ("replicate_with",)),
        (layout.dp * layout.cp > 1, ("shard_embedding",)),
        (layout.tp > 1, ("sequence_parallel", "tp_engine", "num_copies")),
        (layout.cp > 1, ("cp_method",)),
        (has_workers, ("prefetch_factor",)),
        (has_workers or loader.tuning is not None, ("persistent_workers",)),
        (candidate.kernels.compile != "off", ("compile_mode",)),
    )
    return frozenset(name for is_met, names in conditions if not is_met for name in names)
