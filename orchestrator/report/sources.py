"""Inputs of a report apart from events: documents of the ledger, files of trials, output of ranks."""

from __future__ import annotations

import csv
import io
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from cluster.base import GangProgress
from orchestrator.config.sweep import SweepSpec
from orchestrator.errors import ConfigError
from orchestrator.frameworks.shell import variables_of
from orchestrator.report.timeline import write_timeline
from orchestrator.sweep.events import ProfileRun, SweepCreated
from orchestrator.sweep.ledger import PLAN, SPEC, Ledger, Recorded, SweepFile
from orchestrator.sweep.snapshot import attempt_folder
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.text import tail
from orchestrator.units import trial_id
from trials.files import make_private_folder, to_json
from trials.outcome import Evidence, Measured, Measurement, StoppedEarly
from trials.reports import FOLDER

# Inputs from the ledger: the plan as submitted, limits, locations of files and of MLflow's runs.


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedRule:
    """A rule of legality and the candidates it excluded."""

    rule: str
    num_candidates: int
    example: str
    """Short name of one of them; may be empty."""
    reason: str
    """Why the example is not legal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """The number of candidates of a sweep, and the excluded ones."""

    num_legal: int
    product_size: int
    """Combinations of all values of all knobs."""
    num_duplicates: int
    """Combinations that equal another one once knobs without effect are removed."""
    too_large: str
    """Note for people on a space too large to list; empty otherwise."""
    rejected: tuple[RejectedRule, ...]

    @classmethod
    def from_document(cls, plan: Mapping[str, Any]) -> Self:
        """From the ledger's plan document, see :func:`orchestrator.planning.planner.plan_document`."""
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
    """Data of one sweep apart from events; everything may be missing."""

    plan: Mapping[str, Any] | None = None
    """The plan document, see :func:`orchestrator.planning.planner.plan_document`."""
    memory_limit_bytes: int | None = None
    """Device memory per rank, if known."""
    sweep_yaml: str = ""
    """The sweep file as submitted."""
    folder: Path | None = None
    """Folder of the sweep, with its trials' files on this host."""
    recorded: Recorded | None = None
    """Location of the sweep in MLflow; None before anything is recorded."""

    @classmethod
    def of(cls, ledger: Ledger) -> Self:
        """All data in the ledger."""
        counted = ledger.document("dry_runs")
        return cls(
            plan=ledger.document(PLAN),
            memory_limit_bytes=_device_memory_bytes(ledger) if counted is None else counted.get("limit_bytes"),
            sweep_yaml=(SweepFile.read(ledger) or SweepFile()).text,
            folder=ledger.folder,
            recorded=Recorded.read(ledger),
        )


def _device_memory_bytes(ledger: Ledger) -> int | None:
    """The device memory in the sweep file, for ledgers without estimates; None if it has none, or was written by
    another version of this program."""
    try:
        return SweepSpec.from_json(ledger.document(SPEC) or {}).cluster.device_memory_bytes
    except (ValidationError, ConfigError):
        return None


def rejected_csv(plan: PlanFacts) -> str:
    """A row per rule: how many candidates it excluded, one of them, and why."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("rule", "num_candidates", "example", "reason"))
    writer.writerows((one.rule, one.num_candidates, one.example, one.reason) for one in plan.rejected)
    return out.getvalue()


# Inputs from files of trials and output of ranks: profiles, logs, flat parameters.


MAX_PARAM_CHARS = 6000
"""Maximum number of characters of a parameter's value; MLflow accepts no more."""

logger = logging.getLogger(__name__)


def profile_files(sweep_folder: Path, trial: Trial) -> list[Path]:
    """Traces, graphs and memory snapshots of the trial's last attempt on this host."""
    if not trial.attempts or trial.measurement is None:
        return []
    last = len(trial.attempts) - 1
    folder = attempt_folder(sweep_folder, trial.number, last, trial.attempts[last].token) / FOLDER
    if not folder.is_dir():
        return []
    names = {file.name for profile in trial.measurement.findings.profile for file in profile.files}
    found = [
        path for path in sorted(folder.iterdir()) if path.name in names and not path.is_symlink() and path.is_file()
    ]
    return [*found, *_merged(folder, trial.measurement, {path.name: path for path in found})]


def _merged(folder: Path, measurement: Measurement, found: Mapping[str, Path]) -> list[Path]:
    """The merged traces of all ranks, created on first use."""
    traces = {
        profile.rank: found[name]
        for profile in measurement.findings.profile
        if (name := f"rank{profile.rank}.trace.json.gz") in found
    }
    try:
        return write_timeline(folder, traces, [place.rpartition("/")[0] for place in measurement.places])
    except (OSError, ValueError, KeyError) as error:
        logger.warning("the traces in %s cannot be merged: %s", folder, error)
        return []


class ProfileCopies:
    """Watches a running sweep, and copies the files of each profile to the user's folder as soon as they exist.

    Failed copies only cause a warning.
    """

    def __init__(self, output: Path, sweep_folder: Path) -> None:
        self._output = output
        self._sweep_folder = sweep_folder
        self._done: set[int] = set()

    def on_state(self, state: SweepState) -> None:
        if not state.num_checks:
            return
        for trial in state.trials:
            is_profile = isinstance(trial.check, ProfileRun) and trial.measurement is not None
            if is_profile and trial.number not in self._done:
                self._done.add(trial.number)
                try:
                    copy_profile(self._output, state.sweep.sweep, trial, profile_files(self._sweep_folder, trial))
                except ConfigError as error:
                    logger.warning("%s", error)

    def on_progress(self, trial: int, progress: GangProgress) -> None:
        pass

    def on_lease(self, nodes: Sequence[str], waiting: str) -> None:
        pass


def copy_profile(output: Path, sweep: str, trial: Trial, paths: Sequence[Path]) -> Path:
    """Copy the files to a folder below ``output`` named after sweep and trial; return that folder.

    Raises:
        ConfigError: it cannot be written.
    """
    folder = output / f"{sweep}-{trial_id(trial.number)}"
    try:
        make_private_folder(folder)
        for path in paths:
            shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise ConfigError(
            f"cannot copy the profile to {folder}: {error}", remedy="Set profile.output to another directory."
        ) from None
    return folder


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(item, f"{prefix}.{key}" if prefix else key)
    elif value is not None:
        yield prefix, str(value)[:MAX_PARAM_CHARS]


def log_tail(trial: Trial) -> str | None:
    """Last lines of the failed rank's log with the collateral errors; None if there are none."""
    evidence: Evidence | None = getattr(trial.outcome, "evidence", None)
    if evidence is None or not (evidence.log_tail or evidence.collateral):
        return None
    collateral = ["", "--- errors of other ranks ---", *evidence.collateral] if evidence.collateral else []
    return "\n".join([*evidence.log_tail, *collateral]) + "\n"


def sweep_params(created: SweepCreated) -> dict[str, str]:
    """The workload, budget and environment of the ranks, flat: ``model.hidden_size``, ``budget.max_trials``,
    ``env.NCCL_ALGO``."""
    values = {
        "workload": created.workload,
        "budget": created.budget,
        "num_legal": created.num_legal,
        "env": variables_of(created.fingerprint),
    }
    flat = dict(_flatten(to_json(values)))
    return {key.removeprefix("workload."): text for key, text in flat.items()}


MAX_LOG_LINES = 5000
"""Number of last lines kept of a rank's log, also limited by :data:`orchestrator.text.MAX_TAIL_BYTES`."""


MAX_RANKS = 8
"""Number of logs kept of an attempt if the failed rank is unknown."""


def failed_logs(sweep_folder: Path, trial: Trial) -> dict[str, str]:
    """Name to text of the failed rank's log of the last attempt, if it is on this host; empty for a measured trial."""
    if not trial.attempts:
        return {}
    index, attempt = len(trial.attempts) - 1, trial.attempts[-1]
    if attempt.outcome is None or isinstance(attempt.outcome, Measured | StoppedEarly):
        return {}
    folder = attempt_folder(sweep_folder, trial.number, index, attempt.token)
    rank = attempt.outcome.evidence.rank
    ranks = range(min(MAX_RANKS, len(attempt.ranks))) if rank is None else (rank,)
    found = {}
    for path in (folder / f"rank{rank}.log" for rank in ranks):
        if path.is_file():
            read = tail(path, MAX_LOG_LINES)
            cut = "" if read.is_whole else f"... the last {len(read.lines)} lines\n"
            found[f"attempt{index}-{path.name}"] = cut + "\n".join(read.lines) + "\n"
    return found


def profile_paths(sweep_folder: Path, trial: Trial) -> list[Path]:
    """Traces and tables of a profiled trial."""
    if not isinstance(trial.check, ProfileRun) or trial.measurement is None:
        return []
    return profile_files(sweep_folder, trial)
