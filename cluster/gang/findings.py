"""From what the ranks of a gang found out to what the gang did: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from trials.reports.findings import Findings, OperatorCast, PatternEffect

T = TypeVar("T")


def merge_findings(ranks: Sequence[Findings]) -> Findings:
    """One for the gang, from all ranks in rank order.

    What recompute and the cast lists did is told of the rank where it is largest, pattern by pattern: a rank may hold
    none of the layers concerned. Compilation is that of the rank that compiled most. The rest is alike on all ranks,
    or decided by the first: it comes from the first rank that has it.
    """
    return Findings(
        recompute=_largest_effects(findings.recompute for findings in ranks),
        autocast=_largest_casts(findings.autocast for findings in ranks),
        loss_scale=_first(findings.loss_scale for findings in ranks),
        graph=max(
            (findings.graph for findings in ranks if findings.graph is not None),
            key=lambda graph: (graph.num_recompilations, graph.compile_s),
            default=None,
        ),
        loader=_first(findings.loader for findings in ranks),
        kernel_tuning=_first(findings.kernel_tuning for findings in ranks),
        memory_format=_first(findings.memory_format for findings in ranks),
        rates=tuple(rates for findings in ranks for rates in findings.rates),
        profile=tuple(profile for findings in ranks for profile in findings.profile),
    )


def _largest_effects(ranks: Iterable[Iterable[PatternEffect]]) -> tuple[PatternEffect, ...]:
    """Chunks of one rank add up; of ranks the one with most counts."""
    largest: dict[str, PatternEffect] = {}
    for effects in ranks:
        own: dict[str, PatternEffect] = {}
        for effect in effects:
            own[effect.pattern] = _sum(own[effect.pattern], effect) if effect.pattern in own else effect
        for pattern, effect in own.items():
            largest[pattern] = max(largest.get(pattern, effect), effect, key=_size)
    return tuple(largest.values())


def _size(effect: PatternEffect) -> tuple[int, int, float]:
    return effect.saved_bytes, effect.num_matches, effect.recompute_s


def _sum(one: PatternEffect, other: PatternEffect) -> PatternEffect:
    return PatternEffect(
        pattern=one.pattern,
        num_matches=one.num_matches + other.num_matches,
        saved_bytes=one.saved_bytes + other.saved_bytes,
        recompute_s=one.recompute_s + other.recompute_s,
    )


def _largest_casts(ranks: Iterable[Iterable[OperatorCast]]) -> tuple[OperatorCast, ...]:
    largest: dict[tuple[str, str], int] = {}
    for casts in ranks:
        own: dict[tuple[str, str], int] = {}
        for cast in casts:
            own[cast.name, cast.list] = own.get((cast.name, cast.list), 0) + cast.num_calls
        for key, num_calls in own.items():
            largest[key] = max(largest.get(key, 0), num_calls)
    return tuple(OperatorCast(name=name, list=list_, num_calls=n) for (name, list_), n in largest.items())


def _first(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)
