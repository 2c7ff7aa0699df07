"""The history of a name so far, and the records that can follow on it."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from orchestrator import units
from orchestrator.promotion.manifest import Manifest, ratio_of
from orchestrator.promotion.records import Record
from orchestrator.statistics import Interval
from orchestrator.sweep.requests import asker
from orchestrator.tracking.registry import Registered

PRODUCTION, PREVIOUS, CANDIDATE = "production", "previous", "candidate"
"""Aliases: what is in use, what was before, and what was registered to be looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The settled history of a name."""

    last: Record | None
    """The last record that came about."""
    last_number: int
    """Number of the last record, void ones counted; 0 where there is none."""
    carried: Record | None = None
    """A change that was found interrupted, and has just been carried to its end."""

    @property
    def current(self) -> str:
        """The version in production; empty for none."""
        return self.last.to_version if self.last else ""


def promotion_of(name: str, manifest: Manifest, reason: str, past: Past) -> Record:
    """The record of promoting ``manifest``; the number of its version is not known yet."""
    facts, ratio = manifest.content["evidence"], ratio_of(manifest.content["evidence"])
    return replace(
        _blank(name, past),
        reason=reason,
        forced=facts["forced"],
        missing=tuple(facts["missing"]),
        sweep=facts["sweep"],
        sweep_id=facts["sweep_id"],
        trial=str(facts["trial"]),
        short_name=manifest.content["short_name"],
        speedup=units.short_ratio(ratio.value, ratio.ci95) if ratio else "",
        recipe_sha256=manifest.sha256,
        files_sha256=manifest.files_sha256,
    )


def candidate_of(name: str, manifest: Manifest, reason: str, past: Past) -> Record:
    """The record of registering ``manifest`` without putting it into production."""
    return replace(promotion_of(name, manifest, reason, past), action="candidate", from_version="")


def rollback_to(target: Registered, reason: str, past: Past) -> Record:
    """The record of putting a version that is there already into production."""
    return replace(_to(target, past), action="rollback", reason=reason)


def found_moved(name: str, found: Registered | None, past: Past) -> Record:
    """The record of finding the alias at another version than expected, or at none."""
    record = _to(found, past) if found else _blank(name, past)
    reason = f"the alias {PRODUCTION} was moved past tune-cluster"
    return replace(record, action="external", by="unknown", reason=reason)


def _to(target: Registered, past: Past) -> Record:
    tags = target.tags
    trial = tags.get("trial", "")
    return replace(
        _blank(target.name, past),
        to_version=target.version,
        speedup=_speedup_words(tags),
        forced=tags.get("forced") == "true",
        sweep=tags.get("sweep", ""),
        sweep_id=tags.get("sweep_id", ""),
        trial=trial if trial.isdigit() else "",
        short_name=tags.get("short_name", ""),
        recipe_sha256=tags.get("recipe_sha256", ""),
        files_sha256=tags.get("files_sha256", ""),
    )


def _speedup_words(tags: Mapping[str, str]) -> str:
    """The speed-up that a version's tags tell, like ``1.42x``; empty where they tell none, or somebody altered them."""
    parts = (tags.get("speedup", ""), *re.findall(r"[\d.]+", tags.get("speedup_ci95", "")))
    try:
        value, *ends = map(float, parts)
    except ValueError:
        return ""
    return units.short_ratio(value, Interval(ends[0], ends[1]) if len(ends) == 2 else None)


def _blank(name: str, past: Past) -> Record:
    return Record(
        name=name,
        number=past.last_number + 1,
        action="promote",
        from_version=past.current,
        to_version="",
        by=asker(),
        at_s=time.time(),
        from_sweep=past.last.sweep if past.last else "",
        from_sweep_id=past.last.sweep_id if past.last else "",
    )
