"""Sweeps whose winner was confirmed, gated, refused or not looked at, as recorded in their ledgers."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.promotion.manifest import Manifest, build_manifest, choose
from orchestrator.sweep.events import (
    Check,
    ConfirmationRun,
    FinalistsChosen,
    FinishCause,
    GateReport,
    GateRun,
    LedgerEvent,
    RatioInterval,
    SweepFinished,
    TrialProposed,
    Verdict,
    VerdictReached,
)
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from orchestrator.tracking.mlflow_tracker import Tracker
from tests.support.long_story import candidate, events, fill, speeds
from tests.support.mlflow_store import copy_store, new_store
from tests.support.story import ended, failures, launched, measured
from trials.outcome import Outcome

FASTER = (0.1, 0.08, 0.125)
"""Step times: of the baseline, of a trial 1.25x as fast, of a slower one."""
LOSSES = (5.5, 5.4, 5.3)


def gate(trial: int, *reasons: str) -> GateReport:
    return GateReport(
        trial=trial,
        passed=not reasons,
        reasons=reasons,
        precision_class="float32 against float32",
        compared_with="baseline",
        num_steps=3,
        loss_tolerance=1e-5,
        grad_norm_tolerance=1e-4,
        loss_deviation=0.0,
        grad_norm_deviation=0.0,
    )


def confirmed(winner: int = 1, **changes: Any) -> Verdict:
    found = Verdict(
        conclusion="confirmed",
        winner=winner,
        reason=f"t{winner:03d} is faster than the baseline in 3 rounds",
        speedup=RatioInterval(value=1.25, low=1.2, high=1.3),
        num_rounds=3,
        gates=(gate(winner),),
    )
    return replace(found, **changes)


def proof(first: int, winner: int, verdict: Verdict, step_times_s: Sequence[float]) -> list[LedgerEvent]:
    """Two rounds of the baseline and ``winner``, their gate runs, the verdict; trials from number ``first`` on."""
    runs: list[Check] = [ConfirmationRun(of=of, round=number) for number in range(2) for of in (0, winner)]
    runs += [GateRun(of=0, role="baseline"), GateRun(of=winner, role="finalist")]
    at_s = 1_700_001_000.0
    story: list[LedgerEvent] = [
        FinalistsChosen(
            at_s=at_s,
            finalists=(winner,),
            reason="the search ended",
            first_check=first,
            cause=FinishCause.BUDGET_TRIALS,
        )
    ]
    for number, check in enumerate(runs, start=first):
        at_s += 10.0
        again = TrialProposed(
            at_s=at_s, trial=number, candidate=candidate(check.of), origin="check", reason="test", check=check
        )
        outcome = measured(step_times_s[check.of] * (1 + 0.01 * (number % 3)), world_size=2, losses=LOSSES)
        story += [again, launched(number, at_s=at_s + 1.0), ended(number, outcome, at_s=at_s + 9.0)]
    return [*story, VerdictReached(at_s=at_s + 10.0, verdict=verdict)]


def sweep(
    home: Home,
    name: str = "story",
    *,
    verdict: Verdict | None = None,
    step_times_s: Sequence[float] = FASTER,
    more: Sequence[Outcome] = (),
    finished: bool = True,
) -> None:
    """A sweep in ``home``; with a verdict on trial 1 it was proven."""
    outcomes = [*speeds(*step_times_s), *more]
    story = events(outcomes, finished=False, name=name)
    if verdict is not None:
        story += proof(len(outcomes), 1, verdict, step_times_s)
    if finished:
        story.append(
            SweepFinished(
                at_s=1_700_002_000.0, status="finished", reason="the budget is spent", cause=FinishCause.EXHAUSTED
            )
        )
    with Ledger(home.sweep_folder(name)) as ledger:
        fill(ledger, story)
        ledger.put_document("tracking", {"uri": None})


def new_home(folder: Path) -> Home:
    """A home with a separate empty store."""
    new_store(folder)
    return Home(folder)


@cache
def _template() -> Path:
    """A home with a sweep whose winner was confirmed, recorded in MLflow."""
    folder = Path(tempfile.mkdtemp(prefix="proven-home-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    home = new_home(folder)
    sweep(home, verdict=confirmed(), more=[failures()["oom"]])
    with home.open("story", read_only=False) as ledger:
        Tracker(home.default_tracking_uri).sync(ledger, fold(ledger.events()))
    return folder


def proven_home(folder: Path) -> Home:
    """A separate home for each test, with the sweep ``story``: trial 1 was confirmed."""
    shutil.copytree(_template() / "sweeps", folder / "sweeps")
    copy_store(_template() / "mlflow.db", folder / "mlflow.db")
    return Home(folder)


def manifest(home: Home, trial: int) -> Manifest:
    """The manifest of a trial of ``story``."""
    with home.open("story") as ledger:
        state = fold(ledger.events())
        return build_manifest(ledger, state, choose(state, str(trial), force=True))


def simulate(home: Home, name: str = "simulated") -> None:
    """The same sweep on a simulated cluster, written while such sweeps were still recorded as proven."""
    outcomes = speeds(*FASTER)
    story = events(outcomes, finished=False, name=name)
    story[0] = replace(story[0], cluster_kind="simulated")  # type: ignore[type-var]
    story += proof(len(outcomes), 1, confirmed(), FASTER)
    story.append(
        SweepFinished(
            at_s=1_700_002_000.0, status="finished", reason="the budget is spent", cause=FinishCause.EXHAUSTED
        )
    )
    with Ledger(home.sweep_folder(name)) as ledger:
        fill(ledger, story)
        ledger.put_document("tracking", {"uri": None})
