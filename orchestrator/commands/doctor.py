"""What ``tune-cluster doctor`` does: look at this host, and at what a sweep file or an address names besides."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.doctor.check import Finding, run_checks
from orchestrator.doctor.doctor import QUIET, checks, make_patient
from orchestrator.sweep.home import Home


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """All findings, in the order in which they are shown."""

    findings: tuple[Finding, ...]

    @property
    def num_failed(self) -> int:
        return sum(finding.level == "fail" for finding in self.findings)

    @property
    def num_warned(self) -> int:
        return sum(finding.level == "warn" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The last line: whether sweeps can run."""
        if self.num_failed:
            return f"{self.num_failed} to be mended before a sweep can run"
        return f"usable; {self.num_warned} to look at" if self.num_warned else "all is well"

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``doctor --json``."""
        return {"usable": not self.num_failed, "checks": [finding.to_json() for finding in self.findings]}


def examine(home: Home, *, file: Path | None = None, address: str | None = None) -> Diagnosed:
    """Run all checks; takes some seconds, and two minutes where nothing answers."""
    quiet = run_checks([QUIET])
    return Diagnosed(findings=(*run_checks(checks(make_patient(home, file, address))), *quiet))
