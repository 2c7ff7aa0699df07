"""The source of a training program: which files it is made of, and whether it is still the same."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.scripts.script import Script
from trials.codec import digest

SUFFIXES = frozenset({".py", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"})
"""Endings of files that count as source. Of others, which programs and exports write themselves (YAML, JSON, shell
scripts), those count that the command names."""
SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages", "dist-packages", "build", "dist", "mlruns"})
"""Folders that hold no source; hidden ones and virtual environments are left out, too."""
PROGRAM = "program"
"""Name of the source's digest in the fingerprint of a sweep's environment."""
MAX_FILES = 5_000
"""More files are no training program: the rest is left out, and the tree says so."""
MAX_BYTES = 4 << 20
"""Larger files are data."""
_GIT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTree:
    """The source files below a folder."""

    files: dict[str, str]
    """SHA-256 of each file by its path relative to the folder, sorted."""
    is_whole: bool = True
    """False where there are more than :data:`MAX_FILES`."""
    commit: str = ""
    """The commit that git has checked out there, with ``+`` where files were changed since; empty without git."""

    @property
    def sha256(self) -> str:
        """Equal exactly for equal files under equal names."""
        return digest(self.files)

    def changed(self, other: dict[str, str]) -> tuple[str, ...]:
        """Paths whose content differs, or that only one of both has."""
        names = sorted({*self.files, *other})
        return tuple(name for name in names if self.files.get(name) != other.get(name))


def program_source(script: Script) -> SourceTree | None:
    """The source of a script and the files that its command names; None where it is not on this host."""
    folder = Path(script.run.cwd)
    words = tuple(path for word in script.run.argv[1:] if (path := folder / word).suffix and path.is_file())
    return source_tree(folder, (*words, *(Path(path) for path in script.run.paths.values())))


def source_tree(folder: Path, others: tuple[Path, ...] = ()) -> SourceTree | None:
    """The source below ``folder``, and ``others``, the configuration files; None where it is not on this host."""
    if not folder.is_dir():
        return None
    files: dict[str, str] = {}
    is_whole = True
    for path in _sources(folder):
        if len(files) == MAX_FILES:
            is_whole = False
            break
        if (found := _sha256(path)) is not None:
            files[str(path.relative_to(folder))] = found
    for path in others:
        if (found := _sha256(path)) is not None:
            files[str(path.relative_to(folder) if path.is_relative_to(folder) else path)] = found
    return SourceTree(files=dict(sorted(files.items())), is_whole=is_whole, commit=_commit(folder))


def _sources(folder: Path) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        at = Path(where)
        folders[:] = sorted(name for name in folders if not _is_skipped(at / name))
        yield from (at / name for name in sorted(names) if Path(name).suffix in SUFFIXES)


def _is_skipped(folder: Path) -> bool:
    name = folder.name
    is_foreign = any((folder / mark).exists() for mark in ("pyvenv.cfg", "mlflow.db", "sweeps"))  # a home of ours
    return is_foreign or name in SKIPPED or name.startswith(".") or name.endswith(".egg-info")


def _sha256(path: Path) -> str | None:
    """The file's digest; None for what is no file, cannot be read, or is data by its size."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return None
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None


def _commit(folder: Path) -> str:
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return ""
    return f"{commit}+" if _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".") else commit


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_GIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
