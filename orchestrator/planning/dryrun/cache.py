"""Dry runs kept on disk, by what they depend on."""

from __future__ import annotations

import importlib.metadata
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trials.codec import CodecError, digest, from_json, to_json
from trials.dryrun.estimate import DryRunEstimate
from trials.dryrun.records import VERSION, Mode
from trials.files import make_private_folder, write_atomically
from trials.spec import Candidate, Workload

logger = logging.getLogger(__name__)


def cache_key(workload: Workload, candidate: Candidate, *, mode: Mode, exact: bool) -> str:
    """Key of an estimate, made of all it follows from: what a sweep's trials have in common, then the candidate."""
    return f"{_shared_key(workload, mode=mode, exact=exact)}.{candidate.config_key}"


def _shared_key(workload: Workload, *, mode: Mode, exact: bool) -> str:
    """Digest of what a sweep's trials have in common, the versions of torch and of the simulation included."""
    shared = {"workload": workload, "mode": mode, "exact": exact, "torch": _torch_version(), "dryrun": VERSION}
    return digest(shared)[:32]


def _torch_version() -> str:
    """Installed version of torch; empty where it is not installed."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class DryRunCache:
    """One JSON file per estimate in ``folder``, with its candidate; several processes may share it."""

    folder: Path

    def get(self, key: str) -> DryRunEstimate | None:
        """The estimate, or None; a file that cannot be read counts as missing."""
        found = self._read(self._path(key))
        return found[1] if found is not None else None

    def of_workload(self, workload: Workload, *, mode: Mode, exact: bool) -> Iterator[tuple[Candidate, DryRunEstimate]]:
        """All estimates of a workload: one listing of the folder, and one read per estimate."""
        for path in sorted(self.folder.glob(f"{_shared_key(workload, mode=mode, exact=exact)}.*.json")):
            if (found := self._read(path)) is not None:
                yield found

    def put(self, key: str, candidate: Candidate, estimate: DryRunEstimate) -> None:
        """Keep it; readers see the whole file or none."""
        make_private_folder(self.folder)
        body = {"candidate": to_json(candidate), "estimate": to_json(estimate)}
        write_atomically(self._path(key), [json.dumps(body).encode()])

    @staticmethod
    def _read(path: Path) -> tuple[Candidate, DryRunEstimate] | None:
        try:
            body = json.loads(path.read_text())
            return from_json(Candidate, body["candidate"]), from_json(DryRunEstimate, body["estimate"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, CodecError, OSError) as error:
            logger.warning("%s is not used: %s", path, error)
            return None

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"
