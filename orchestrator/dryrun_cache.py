"""Dry runs kept on disk, by what they depend on."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from trials.codec import CodecError, digest, from_json, to_json
from trials.dryrun.records import VERSION, Mode
from trials.estimate import Estimate
from trials.spec import Candidate, Workload

logger = logging.getLogger(__name__)


def cache_key(workload: Workload, candidate: Candidate, *, mode: Mode, exact: bool) -> str:
    """SHA-256 over all that the estimate follows from, the versions of torch and of the simulation included."""
    return digest(
        {
            "config_key": candidate.config_key,
            "workload": workload,
            "mode": mode,
            "exact": exact,
            "torch": importlib.metadata.version("torch"),
            "dryrun": VERSION,
        }
    )


@dataclass(frozen=True, slots=True)
class DryRunCache:
    """One JSON file per estimate in ``folder``; several processes may share it."""

    folder: Path

    def get(self, key: str) -> Estimate | None:
        """The estimate, or None; a file that cannot be read counts as missing."""
        path = self._path(key)
        try:
            return from_json(Estimate, json.loads(path.read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, CodecError, OSError) as error:
            logger.warning("%s is not used: %s", path, error)
            return None

    def put(self, key: str, estimate: Estimate) -> None:
        """Keep it; readers see the whole file or none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=self.folder, prefix=key[:8], suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(to_json(estimate), file)
            Path(temporary).replace(self._path(key))
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
