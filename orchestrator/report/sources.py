"""What a review shows besides the state: the plan as kept at submit, limits, files of trials. Read from the ledger."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import ValidationError

from orchestrator.config.sweep import SweepSpec
from orchestrator.errors import ConfigError
from orchestrator.sweep.documents import PLAN, SPEC, SweepFile
from orchestrator.sweep.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Of one sweep; everything may be missing."""

    plan: Mapping[str, Any] | None = None
    """See :func:`plan_document`."""
    memory_limit_bytes: int | None = None
    """Of device memory per rank, where it is known."""
    sweep_yaml: str = ""
    """The file as submitted."""

    @classmethod
    def of(cls, ledger: Ledger) -> Self:
        counted = ledger.document("dry_runs") or {}
        return cls(
            plan=ledger.document(PLAN),
            memory_limit_bytes=_device_memory_bytes(ledger) or counted.get("limit_bytes"),
            sweep_yaml=(SweepFile.read(ledger) or SweepFile()).text,
        )


def _device_memory_bytes(ledger: Ledger) -> int | None:
    """As the sweep file says; None where it says nothing, or is of another version of this program."""
    try:
        return SweepSpec.from_json(ledger.document(SPEC) or {}).cluster.device_memory_bytes
    except (ValidationError, ConfigError):
        return None


def rejected_csv(plan: Mapping[str, Any]) -> str:
    """A row per rule: how many candidates it left out, one of them, and why."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("rule", "num_candidates", "example", "reason"))
    for rule in plan["rejected"]:
        example = rule["examples"][0] if rule["examples"] else {"short_name": "", "reason": ""}
        writer.writerow((rule["rule"], rule["count"], example["short_name"], example["reason"]))
    return out.getvalue()
