"""The user's own evaluation of a finalist, run beside the controller's loop."""

from __future__ import annotations

from pathlib import Path

from orchestrator.proof.evaluation import EvaluationProcess, facts
from orchestrator.proof.progress import gate_report
from orchestrator.sweep.checks import Evaluation
from orchestrator.sweep.state import SweepState


class Evaluator:
    """One evaluation at a time. One whose controller died is begun again by the next.

    Args:
        folder: where facts and output of evaluations are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: EvaluationProcess | None = None
        self._trial: int | None = None

    def look(self, state: SweepState, trial: int) -> Evaluation | None:
        """How the evaluation of this finalist ended; None while it goes on. The first look starts it."""
        settings = state.sweep.proof.gate
        assert settings is not None and settings.command, "nobody asked for an evaluation"
        if self._trial != trial:  # of a proof that was taken back
            self.close()
        if self._process is None:
            self._trial = trial
            report = gate_report(state, trial, settings)
            assert report is not None, "the gate comes before the user's evaluation"
            self._process = EvaluationProcess()
            self._process.start(
                settings.command,
                facts(state, trial, report, self._folder.parent),
                self._folder / f"t{trial:04d}",
                settings.command_timeout_s,
            )
        ended = self._process.poll()
        if ended is not None:
            self._process = None
        return ended

    def close(self) -> None:
        """End what runs."""
        if self._process is not None:
            self._process.kill()
            self._process = None
