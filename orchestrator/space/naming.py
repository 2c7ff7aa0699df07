"""Names of candidates, short and in full, and how two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from cluster.candidate_table import FIELDS, CandidateTable, Codes
from orchestrator.space.knobs import KNOBS
from orchestrator.space.knobs.own import INHERITED
from orchestrator.space.knobs.text import plain_knob
from orchestrator.space.notation import word_text, words_of
from trials.spec import Candidate

Scalar = str | int | float | bool
Features = Callable[[Candidate], Mapping[str, Scalar]]
"""Flat description of a candidate: knob values by name, like :func:`flat_params`."""

FeatureColumns = Mapping[str, tuple[list[Scalar], Codes]]
"""By feature, its distinct values and every candidate's place among them."""

_READS = {knob.name: ("layout", knob.part) if knob.name == "recompute" else (knob.part,) for knob in KNOBS}
"""Fields of a candidate that each knob's value, as :func:`flat_params` writes it, depends on."""


def feature_columns(table: CandidateTable, features: Features) -> FeatureColumns:
    """The features of all candidates, asked for once per combination of what they depend on.

    One that a candidate does not have is :data:`INHERITED` there.
    """
    reads = {"world_size": ("layout",), "selective": ("recompute",), **_READS}
    reads |= {choice.name: ("own",) for own in table.values["own"] for choice in own}
    columns: dict[str, tuple[list[Scalar], Codes]] = {}
    first = features(table[0]) if len(table) else {}
    names = dict.fromkeys((*first, *(choice.name for own in table.values["own"] for choice in own)))
    for read in dict.fromkeys(reads.get(name, FIELDS) for name in names):
        rows, places = table.each(read, features)
        for name in (name for name in names if reads.get(name, FIELDS) == read):
            known: dict[Scalar, int] = {}
            code = [known.setdefault(row.get(name, INHERITED), len(known)) for row in rows]
            columns[name] = list(known), np.array(code, dtype=np.int32)[places]
    return columns


def describe(candidate: Candidate) -> dict[str, Any]:
    """Key, short name and knobs of a candidate: its part of every JSON document."""
    return {
        "config_key": candidate.config_key,
        "short_name": short_name(candidate),
        "params": flat_params(candidate),
    }


def diff(candidate: Candidate, baseline: Candidate) -> dict[str, tuple[Any, Any]]:
    """Knobs in which the two differ: name to (value in the baseline, value in the candidate), as scalars.

    An own knob that only one of them sets is :data:`INHERITED` in the other.
    """
    before, after = flat_params(baseline), flat_params(candidate)
    pairs = {name: (before.get(name, INHERITED), after.get(name, INHERITED)) for name in {**before, **after}}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def flat_params(candidate: Candidate) -> dict[str, Scalar]:
    """Knob values as scalars, plus ``world_size``: parameters of a record, features of a search.

    The user's own knobs follow by their names, those only that the candidate sets.
    """
    params = {knob.name: plain_knob(knob.name, knob.read(candidate), candidate) for knob in KNOBS}
    own = {choice.name: choice.value for choice in candidate.own}
    return {"world_size": candidate.layout.world_size, **params, **own}


def aligned_params(candidates: Iterable[Candidate]) -> list[dict[str, Scalar]]:
    """Knob values of each, all with the same names: own knobs that one of them leaves out are :data:`INHERITED`."""
    params = [flat_params(candidate) for candidate in candidates]
    names = list(dict.fromkeys(name for one in params for name in one))
    return [{name: one.get(name, INHERITED) for name in names} for one in params]


def short_name(candidate: Candidate) -> str:
    """Compact and different for different candidates, like ``dp2 z3x2 tp2sp mbs4 full4 O1-bf16 w2``.

    ``pp2 interleavedv2 L5,4/4,3`` is a pipeline with two chunks per rank and uneven layers; ``dp2f`` replicates with
    FSDP2, ``emb`` shards the embedding, ``cp2u`` is Ulysses, ``tp2splc2`` has sequence parallelism, the local engine
    and two copies. ``w2p4`` has a prefetch factor of 4.
    """
    return " ".join(map(word_text, words_of(candidate)))


def names_apart(candidates: Iterable[Candidate]) -> tuple[list[str], str]:
    """Short names without the words that all of them share, and those words; ``as above`` where nothing is left."""
    names = [list(map(word_text, words_of(candidate))) for candidate in candidates]
    if len(names) < 2:
        return [" ".join(words) for words in names], ""
    shared = set(names[0]).intersection(*names[1:])
    own = [" ".join(word for word in words if word not in shared) or "as above" for words in names]
    return own, " ".join(word for word in names[0] if word in shared)
