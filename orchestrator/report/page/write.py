"""The page of a sweep, made from its ledger; as a file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import ConfigError
from orchestrator.invocation import PLAIN, Invocation
from orchestrator.mlflow_urls import sweep_links
from orchestrator.report.page.page import Page, page_html
from orchestrator.report.sources import Sources
from orchestrator.report.summary import Summary
from orchestrator.sweep.documents import Recorded
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.state import SweepState
from trials.files import write_atomically

if TYPE_CHECKING:
    from orchestrator.diagnosis.values import SweepExplanation

logger = logging.getLogger(__name__)


def make_page(ledger: Ledger, state: SweepState, summary: Summary, invocation: Invocation = PLAIN) -> Page:
    """With all that the ledger and the files beside it tell; ``state`` is a fold of its events."""
    uri, recorded = summary.tracking_uri, Recorded.read(ledger)
    links = {}
    if recorded is not None and uri.startswith("http"):
        links = sweep_links(uri, recorded.experiment_id, recorded.run_id, summary.sweep)
    return Page(
        state=state,
        summary=summary,
        sources=Sources.of(ledger),
        folder=ledger.folder,
        explanation=_explained(ledger, state),
        links=links,
        invocation=invocation,
    )


def write_page(page: Page, file: Path | None) -> Path:
    """Write it to ``file``, or to ``NAME-report.html`` here; the path.

    Raises:
        ConfigError: it cannot be written.
    """
    path = (file or Path(f"{page.summary.sweep}-report.html")).absolute()
    try:
        write_atomically(path, [page_html(page).encode()])
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}", key="--html", remedy="Name a file in a folder that you may write."
        ) from None
    return path


def _explained(ledger: Ledger, state: SweepState) -> SweepExplanation | None:
    """None where that fails: the page is worth having without it."""
    from orchestrator.diagnosis.load import explain_ledger

    try:
        return explain_ledger(ledger, state=state)
    except ConfigError:
        return None  # nothing was measured
    except Exception:
        logger.warning("the page of %s goes without an explanation", state.sweep.sweep, exc_info=True)
        return None
