"""What differs between two configurations: knobs, workload, environment, evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator import units
from orchestrator.promotion.references import VersionDescription
from orchestrator.space.naming import flat_params, short_name
from trials.codec import to_json

ABSENT = "–"  # noqa: RUF001
Pair = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What differs, by part: name to the texts of both. Evidence is shown whether it differs or not."""

    a: str
    b: str
    parts: Mapping[str, Mapping[str, Pair]]

    @property
    def is_same(self) -> bool:
        """Whether both train the same thing in the same way."""
        return not self.parts["knobs"] and not self.parts["workload"]

    def to_json(self) -> dict[str, Any]:
        parts = {part: {name: list(pair) for name, pair in found.items()} for part, found in self.parts.items()}
        return {"a": self.a, "b": self.b, "same": self.is_same, **parts}


def compare(a: VersionDescription, b: VersionDescription) -> Difference:
    """What differs between two configurations."""
    parts = {
        "knobs": differing(flat_params(a.candidate), flat_params(b.candidate)),
        "workload": differing(dict(_flat(to_json(a.workload))), dict(_flat(to_json(b.workload)))),
        "environment": differing({"hardware": a.hardware, **a.fingerprint}, {"hardware": b.hardware, **b.fingerprint}),
        "evidence": {name: (_evidence(a)[name], text) for name, text in _evidence(b).items()},
    }
    return Difference(a=a.label, b=b.label, parts=parts)


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    """Keys whose values differ, or that only one of both has."""
    pairs = {name: (str(a.get(name, ABSENT)), str(b.get(name, ABSENT))) for name in {**a, **b}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _evidence(of: VersionDescription) -> dict[str, str]:
    speed = f"{units.rate(of.speed)} {of.unit}" if of.speed is not None else "not measured"
    return {"configuration": short_name(of.candidate), "speed": speed, "verdict": of.verdict}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else key)
    else:
        yield prefix, value
