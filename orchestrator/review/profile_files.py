"""Files of a profile as far as they lie on this host, and copies of them where the user wants some."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from orchestrator.errors import ConfigError
from orchestrator.logs import attempt_folder
from orchestrator.report_format import trial_id
from orchestrator.state import Trial
from trials.files import make_private_folder
from trials.profile_report import FOLDER


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
