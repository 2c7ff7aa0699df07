"""What the projection into MLflow needs of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from orchestrator.sweep.state import SweepState


class Runs(Protocol):
    """The runs of a sweep. Writing the same twice changes nothing."""

    @property
    def uri(self) -> str:
        """Of the store."""
        ...

    def sweep_runs(self, state: SweepState) -> dict[str, str]:
        """Run ids: ``sweep`` for the parent, the trial's number for a trial. What is created is added to it."""
        ...

    def create_run(self, state: SweepState, name: str, tags: Mapping[str, str], at_s: float) -> str:
        """Its id."""
        ...

    def log(
        self,
        run_id: str,
        at_s: float,
        *,
        metrics: Mapping[str, float] | None = None,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        step: int = 0,
    ) -> None: ...

    def log_series(self, run_id: str, at_s: float, series: Mapping[str, Sequence[float]]) -> None:
        """Metrics with a value per step, steps counted from 1; values that are not finite are left out."""
        ...

    def put_text(self, run_id: str, text: str, artifact: str) -> None: ...

    def put_bytes(self, run_id: str, content: bytes, artifact: str) -> None: ...

    def put_file(self, run_id: str, path: Path, folder: str) -> None: ...

    def tag_experiment(self, state: SweepState, tags: Mapping[str, str]) -> None:
        """The experiment that the sweep is in."""
        ...

    def with_role(self, state: SweepState, role: str) -> list[str]:
        """Runs of the sweep whose tag ``tc.role`` says so."""
        ...

    def page(self, state: SweepState, run_id: str, tab: str) -> str:
        """The address of a tab of the run's page, from that of another page."""
        ...

    def go_on(self, run_id: str) -> None:
        """It is running again."""
        ...

    def end(self, run_id: str, status: str, at_s: float) -> None: ...
