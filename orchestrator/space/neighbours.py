"""Neighbours: the legal candidates that differ little from one, in a space that is too large to list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from orchestrator.space.large import LargeSpace
from orchestrator.space.space import Frame
from trials.spec import Candidate, Layout, Recompute

LAYOUT_FIELDS = tuple(field.name for field in fields(Layout))
MAX_FIELDS = 4
"""Fields in which the layouts of neighbours may differ: pp, its schedule, chunks and layers, or two degrees."""


def neighbours(large: LargeSpace, candidate: Candidate) -> list[Candidate]:
    """The neighbours of ``candidate``: another layout or micro-batch size, or another choice of one further part."""
    found = dict.fromkeys(_near(large, candidate))
    found.pop(candidate, None)
    return [near for near in found if large.is_legal(near)]


def _near(large: LargeSpace, candidate: Candidate) -> Iterator[Candidate]:
    for name, values in large.space.parts.items():
        for value in values:
            yield replace(candidate, **{name: value})
    for frame in large.space.frames:
        is_own = (frame.layout, frame.micro_batch_size) == (candidate.layout, candidate.micro_batch_size)
        if not is_own and not _is_near(frame, candidate):
            continue
        for policy in frame.recomputes:
            if is_own or _kind(policy) == _kind(candidate.recompute):
                yield replace(candidate, layout=frame.layout, micro_batch_size=frame.micro_batch_size, recompute=policy)


def _is_near(frame: Frame, candidate: Candidate) -> bool:
    differing = [name for name in LAYOUT_FIELDS if getattr(frame.layout, name) != getattr(candidate.layout, name)]
    return len(differing) <= MAX_FIELDS


def _kind(recompute: Recompute) -> tuple[bool, tuple[str, ...], bool]:
    """Kind of a recompute policy, without the numbers of layers, which follow from the layout."""
    patterns = tuple(part.pattern for part in recompute.selective)
    return bool(recompute.full), patterns, bool(recompute.communication)
