"""Files of a profile as far as they lie on this host, and copies of them where the user wants some."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path

from cluster.base import GangProgress
from orchestrator.errors import ConfigError
from orchestrator.status.logs import attempt_folder
from orchestrator.sweep.checks import ProfileRun
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.units import trial_id
from trials.files import make_private_folder
from trials.reports.profile import FOLDER

logger = logging.getLogger(__name__)


def profile_files(sweep_folder: Path, trial: Trial) -> list[Path]:
    """Traces, graphs and memory snapshots of the trial's last attempt."""
    if not trial.attempts or trial.measurement is None:
        return []
    last = len(trial.attempts) - 1
    folder = attempt_folder(sweep_folder, trial.number, last, trial.attempts[last].token) / FOLDER
    if not folder.is_dir():
        return []
    names = {file.name for profile in trial.measurement.findings.profile for file in profile.files}
    return [
        path for path in sorted(folder.iterdir()) if path.name in names and not path.is_symlink() and path.is_file()
    ]


class ProfileCopies:
    """Watches a running sweep, and copies the files of each profile to the user's folder as soon as they are there.

    What cannot be copied is left where it is, with a warning: a sweep does not fail for it.
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
    """Copy the files to a folder of their own below ``output``, named after sweep and trial; give that folder.

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
            f"cannot copy the profile to {folder}: {error}", remedy="Name another folder as profile.output."
        ) from None
    return folder
