"""Names of candidates: knob values as short text, the short notation, flat descriptions and differences.

Short names like ``pp2 z2x8 mbs1 full4 O1-bf16`` are generated from the table of signs, so the legend explains every
sign.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.candidate_table import FIELDS, CandidateTable, Codes
from orchestrator.space.file_types import plain_knob
from orchestrator.space.knobs import INHERITED, KNOBS, PLACEHOLDER, Sign, custom_value_text
from trials.files import digest
from trials.spec import (
    Candidate,
    CustomChoice,
)

# The short notation of candidates, like ``pp2 z2x8 mbs1 full4 O1-bf16``: every sign, its meaning and its knobs

OWN = Sign("{KNOB}={VALUE}", "custom knob {KNOB}: {VALUE}", lambda _: None, knobs=("own",))
MAX_CUSTOM_CHARS = 24
"""Most characters of a custom knob's value in a name; longer ones are truncated and tagged."""


def _in_order() -> Iterator[Sign]:
    """Yield the signs of all knobs, row by row, each row followed by signs of other rows that belong after it."""
    for knob in KNOBS:
        yield from (sign for sign in knob.signs if not sign.after)
        yield from (sign for other in KNOBS for sign in other.signs if sign.after == knob.name)


NOTATION: tuple[Sign, ...] = (*_in_order(), OWN)
"""All signs, in the order of names."""


@dataclass(frozen=True, slots=True)
class NamePart:
    """A sign with its values."""

    sign: Sign
    values: Mapping[str, object]

    @property
    def text(self) -> str:
        """Text in the name: ``pp2``."""
        return _filled(self.sign.text, self.values)

    @property
    def meaning(self) -> str:
        """Meaning, such as ``pipeline with 2 stages``."""
        return _filled(self.sign.meaning, self.values)


def _filled(text: str, values: Mapping[str, object]) -> str:
    return re.sub(PLACEHOLDER, lambda found: str(values[found[1]]), text)


NameParts = tuple[NamePart, ...]
"""A word of a name: ``tp2sp`` is ``tp2`` and ``sp``."""


def name_part_text(word: NameParts) -> str:
    """Format a word of a name; a plus sign joins parts of recompute."""
    return "".join(f"+{part.text}" if i and not part.sign.is_suffix else part.text for i, part in enumerate(word))


def name_parts_of(candidate: Candidate) -> Iterator[NameParts]:
    """Yield the words of a candidate's name, in order. Suffixes and other signs of one knob belong to one word."""
    word: list[NamePart] = []
    for part in _parts(candidate):
        if word and not part.sign.is_suffix and part.sign.knobs != word[-1].sign.knobs:
            yield tuple(word)
            word = []
        word.append(part)
    yield tuple(word)
    yield from _custom_names(candidate.own)


def _parts(candidate: Candidate) -> Iterator[NamePart]:
    for sign in NOTATION:
        shown = sign.shows(candidate)
        if shown is None or shown is False:
            continue
        for values in shown if isinstance(shown, list) else [dict.fromkeys(sign.placeholders, shown)]:
            yield NamePart(sign, values)


def spelled(candidate: Candidate) -> list[tuple[str, str]]:
    """Return every sign of the candidate's name with its meaning."""
    return [(part.text, part.meaning) for word in name_parts_of(candidate) for part in word]


def legend(candidates: Iterable[Candidate]) -> list[tuple[str, str]]:
    """Return the signs in the candidates' names in general form: ``ppN``, ``pipeline with N stages``."""
    found = {part.sign for candidate in candidates for word in name_parts_of(candidate) for part in word}
    return [(sign.general, sign.general_meaning) for sign in NOTATION if sign in found]


def notation_table() -> str:
    """Format all signs as a Markdown table, for ``docs/knobs.md``."""
    lines = ["| sign | meaning | knob |", "|---|---|---|"]
    for sign in NOTATION:
        knobs = ", ".join(f"[{knob}](#{knob})" for knob in sign.knobs)
        lines.append(f"| `{sign.general}` | {sign.general_meaning} | {knobs} |")
    return "\n".join(lines) + "\n"


def _custom_names(own: tuple[CustomChoice, ...]) -> Iterator[NameParts]:
    shorts = [_short_custom_value(choice.name) for choice in own]
    for choice, short in zip(own, shorts, strict=True):
        name = short if shorts.count(short) == 1 else choice.name
        text = re.sub(r"\s+", "_", custom_value_text(choice.value))
        if len(text) > MAX_CUSTOM_CHARS:
            text = f"{text[: MAX_CUSTOM_CHARS - 7]}~{digest(choice.value)[:6]}"
        yield (NamePart(OWN, {"KNOB": name, "VALUE": text}),)


def _short_custom_value(name: str) -> str:
    """Remove dashes, dollar, file and parent keys: ``zero_optimization.overlap_comm`` -> ``overlap_comm``."""
    return name.lstrip("-$").rpartition(":")[2].rpartition(".")[2] or name


# Names of candidates, short and in full, and differences between candidates

Scalar = str | int | float | bool
Features = Callable[[Candidate], Mapping[str, Scalar]]
"""Flat description of a candidate: knob values by name, like :func:`flat_params`."""

FeatureColumns = Mapping[str, tuple[list[Scalar], Codes]]
"""For each feature, its distinct values and every candidate's index among them."""

_READS = {knob.name: ("layout", knob.part) if knob.name == "recompute" else (knob.part,) for knob in KNOBS}
"""Fields of a candidate that each knob's value in :func:`flat_params` depends on."""


def feature_columns(table: CandidateTable, features: Features) -> FeatureColumns:
    """Return the features of all candidates, computed once per combination of the fields they depend on.

    A missing feature is :data:`INHERITED`.
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
    """Return key, short name and knobs of a candidate, its part of every JSON document."""
    return {
        "config_key": candidate.config_key,
        "short_name": short_name(candidate),
        "params": flat_params(candidate),
    }


def diff(candidate: Candidate, baseline: Candidate) -> dict[str, tuple[Any, Any]]:
    """Return the knobs in which the two differ: by name, (baseline's value, candidate's value), as scalars.

    A custom knob that only one of them sets is :data:`INHERITED` in the other.
    """
    before, after = flat_params(baseline), flat_params(candidate)
    pairs = {name: (before.get(name, INHERITED), after.get(name, INHERITED)) for name in {**before, **after}}
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def change(candidate: Candidate, baseline: Candidate) -> dict[str, Scalar]:
    """Return the candidate's values that differ from the baseline, without the number of devices."""
    return {name: new for name, (_, new) in diff(candidate, baseline).items() if name != "world_size"}


def shared_change(candidates: Iterable[Candidate], baseline: Candidate) -> dict[str, Scalar]:
    """Return values that all candidates share and the baseline lacks; empty without candidates."""
    changes = [change(candidate, baseline).items() for candidate in candidates]
    return dict(one for one in changes[0] if all(one in other for other in changes)) if changes else {}


def flat_params(candidate: Candidate) -> dict[str, Scalar]:
    """Return knob values as scalars, plus ``world_size``: parameters of a record, features of a search.

    Custom knobs that the candidate sets follow by name.
    """
    params = {knob.name: plain_knob(knob.name, knob.read(candidate), candidate) for knob in KNOBS}
    own = {choice.name: choice.value for choice in candidate.own}
    return {"world_size": candidate.layout.world_size, **params, **own}


def aligned_params(candidates: Iterable[Candidate]) -> list[dict[str, Scalar]]:
    """Return knob values of each, all with the same names; omitted custom knobs are :data:`INHERITED`."""
    params = [flat_params(candidate) for candidate in candidates]
    names = list(dict.fromkeys(name for one in params for name in one))
    return [{name: one.get(name, INHERITED) for name in names} for one in params]


def short_name(candidate: Candidate) -> str:
    """Return a compact name, unique per candidate, such as ``dp2 z3x2 tp2sp mbs4 full4 O1-bf16 w2``.

    ``pp2 interleavedv2 L5,4/4,3`` is a pipeline with two chunks per rank and uneven layers; ``dp2f`` replicates with
    FSDP2, ``emb`` shards the embedding, ``cp2u`` is Ulysses, ``tp2splc2`` has sequence parallelism, the local engine
    and two copies. ``w2p4`` has a prefetch factor of 4.
    """
    return " ".join(map(name_part_text, name_parts_of(candidate)))


def names_apart(candidates: Iterable[Candidate]) -> tuple[list[str], str]:
    """Return short names without shared words, and the shared words; ``as above`` if nothing is left."""
    names = [list(map(name_part_text, name_parts_of(candidate))) for candidate in candidates]
    if len(names) < 2:
        return [" ".join(words) for words in names], ""
    shared = set(names[0]).intersection(*names[1:])
    own = [" ".join(word for word in words if word not in shared) or "as above" for words in names]
    return own, " ".join(word for word in names[0] if word in shared)
