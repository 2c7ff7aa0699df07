"""What a report takes from beside the events of a sweep: the plan as kept at submit, limits, where files and MLflow's
runs are. Read from the ledger."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from orchestrator.config.sweep import SweepSpec
from orchestrator.errors import ConfigError
from orchestrator.sweep.documents import PLAN, Recorded
from orchestrator.sweep.ledger import Ledger


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedRule:
    """A rule of legality with the candidates that it left out."""

    rule: str
    num_candidates: int
    example: str
    """Short name of one of them; empty where none was kept."""
    reason: str
    """Why the example is not legal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """How many candidates a sweep had to choose from, and what was left out."""

    num_legal: int
    product_size: int
    """Combinations of all values of all knobs."""
    num_duplicates: int
    """Combinations that equal another one without its knobs that have no effect."""
    too_large: str
    """Note for people on a space too large to list; empty otherwise."""
    rejected: tuple[RejectedRule, ...]

    @classmethod
    def from_document(cls, plan: Mapping[str, Any]) -> Self:
        """From the ledger's plan document, see :func:`orchestrator.planning.plan.plan_document`."""
        return cls(
            num_legal=plan["num_legal"],
            product_size=plan["product_size"],
            num_duplicates=plan["num_duplicates"],
            too_large=plan["too_large"],
            rejected=tuple(_rejected(rule) for rule in plan["rejected"]),
        )


def _rejected(rule: Mapping[str, Any]) -> RejectedRule:
    example = rule["examples"][0] if rule["examples"] else {"short_name": "", "reason": ""}
    return RejectedRule(
        rule=rule["rule"], num_candidates=rule["count"], example=example["short_name"], reason=example["reason"]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What lies beside the events of one sweep; everything may be missing."""

    plan: Mapping[str, Any] | None = None
    """The plan document, see :func:`orchestrator.planning.plan.plan_document`."""
    memory_limit_bytes: int | None = None
    """Device memory per rank, where it is known."""
    sweep_yaml: str = ""
    """The sweep file as submitted."""
    folder: Path | None = None
    """Folder of the sweep, with the files of its trials as far as they lie on this host."""
    recorded: Recorded | None = None
    """Where MLflow holds the sweep; None where nothing was recorded yet."""

    @classmethod
    def of(cls, ledger: Ledger) -> Self:
        """Everything that the ledger keeps."""
        counted = ledger.document("dry_runs")
        return cls(
            plan=ledger.document(PLAN),
            memory_limit_bytes=_device_memory_bytes(ledger) if counted is None else counted.get("limit_bytes"),
            sweep_yaml=(ledger.document("sweep_yaml") or {}).get("text", ""),
            folder=ledger.folder,
            recorded=Recorded.of(ledger),
        )


def _device_memory_bytes(ledger: Ledger) -> int | None:
    """What the sweep file says, for ledgers that keep no estimates; None where it says nothing, or was written by
    another version of this program."""
    try:
        return SweepSpec.from_json(ledger.document("spec") or {}).cluster.device_memory_bytes
    except (ValidationError, ConfigError):
        return None


def rejected_csv(plan: PlanFacts) -> str:
    """A row per rule: how many candidates it left out, one of them, and why."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("rule", "num_candidates", "example", "reason"))
    writer.writerows((one.rule, one.num_candidates, one.example, one.reason) for one in plan.rejected)
    return out.getvalue()
