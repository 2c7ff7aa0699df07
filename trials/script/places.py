"""Files of an attempt on a node: what the program gets, what its ranks tell each other, and how all of it goes away.

::

    ATTEMPT/script/out         {out}: whatever the program writes; shared by the node's ranks
    ATTEMPT/script/files       copies of configuration files
    ATTEMPT/script/report/N    $TUNE_CLUSTER_REPORT of rank N, with the file ``stop``
    ATTEMPT/script/ranks       what each rank of the node tells the others of itself
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trials.codec import canonical_json, from_json
from trials.files import make_private_folder, write_atomically
from trials.outcome import Phase
from trials.reports.profile import FOLDER_VARIABLE
from trials.script.command import OUT, ScriptCommand
from trials.script.environment import ScriptRank

ATTEMPT_VARIABLE = "TUNE_CLUSTER_ATTEMPT_DIR"
"""Environment variable by which the cluster tells ranks the attempt's folder."""
SCRATCH = "script"
"""Folder in an attempt's folder that is deleted with the attempt's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerWord:
    """What a rank lets the others of its node know."""

    state: Literal["training", "measured", "silent"] = "training"
    """``measured``: it has its steps; ``silent``: others speak for it."""
    is_gone: bool = False
    """Whether nothing of its program is left."""
    phase: Phase | None = None
    step: int = 0
    step_time_s: float | None = None
    number: int = 0
    """Words of a rank have rising numbers, so that one that repeats the last is a word of its own."""


class Places:
    """Paths of one rank's program."""

    def __init__(self, attempt: Path, rank: ScriptRank, *, is_own_folder: bool) -> None:
        self.has_own_log = not is_own_folder
        """Whether standard output is a file of this rank alone."""
        self.scratch = attempt / SCRATCH
        self.out = self.scratch / "out"
        self.files = self.scratch / "files"
        self.report = report_folder(attempt, rank.rank)
        self.error_file = self.scratch / f"error{rank.rank}.json"
        self._ranks = self.scratch / "ranks"
        self._rank = rank
        self._last_word = PeerWord()
        self._attempt = attempt if is_own_folder else None

    @classmethod
    def from_env(cls, environment: Mapping[str, str], rank: ScriptRank) -> Places:
        """Those in the attempt's folder, or in a temporary one that local ranks of one launch share."""
        if folder := environment.get(ATTEMPT_VARIABLE):
            return cls(Path(folder), rank, is_own_folder=False)
        if profile := environment.get(FOLDER_VARIABLE):
            return cls(Path(profile).parent, rank, is_own_folder=False)
        name = f"tune-cluster-{os.getuid()}-{os.getppid()}-{rank.master_port}"
        return cls(Path(tempfile.gettempdir()) / name, rank, is_own_folder=True)

    def make(self, command: ScriptCommand) -> None:
        """Create the folders, the copies of configuration files, and the number of the last step to train."""
        for folder in (self.out, self.files, self.report, self._ranks):
            make_private_folder(folder)
        for file in command.files:
            write_atomically(self.files / file.file_name, [self.fill(file.text, command).encode()])
        write_atomically(self.report / "stop", [f"{command.num_required_steps}\n".encode()])

    def fill(self, text: str, command: ScriptCommand) -> str:
        """``text`` with what only the node knows in the place of its placeholders."""
        rank = self._rank
        known = {
            OUT: str(self.out),
            **{f"{{{file.name}}}": str(self.files / file.file_name) for file in command.files},
            "{node_rank}": str(rank.node_rank),
            "{num_nodes}": str(rank.num_nodes),
            "{local_devices}": str(rank.num_devices if command.launcher == "own" else rank.local_slots),
            "{master_addr}": rank.master_addr,
            "{master_port}": rank.master_port,
        }
        for placeholder, value in known.items():
            text = text.replace(placeholder, value)
        return text

    def tell(self, word: PeerWord) -> None:
        """Leave word for the other ranks of this node."""
        self._last_word = word = replace(word, number=self._last_word.number + 1)
        if self._rank.local_slots > 1:
            with contextlib.suppress(OSError):
                write_atomically(self._ranks / str(self._rank.rank), [canonical_json(word).encode()])

    def told(self) -> list[PeerWord]:
        """The last words of the ranks of this node, as far as they have left any."""
        found: list[PeerWord] = []
        with contextlib.suppress(OSError):
            for path in self._ranks.iterdir():
                if not path.name.startswith("."):
                    with contextlib.suppress(OSError, ValueError):
                        found.append(from_json(PeerWord, json.loads(path.read_bytes())))
        return found

    def leave(self) -> None:
        """Delete the scratch folder, if this is the last rank of the node to leave it."""
        self.tell(replace(self._last_word, is_gone=True))
        if self._rank.local_slots == 1 or all_gone(self.told(), self._rank.local_slots):
            shutil.rmtree(self.scratch, ignore_errors=True)
            if self._attempt is not None:
                with contextlib.suppress(OSError):
                    self._attempt.rmdir()


def all_gone(words: Sequence[PeerWord], num_ranks: int) -> bool:
    """Whether all ranks of the node have said that they are gone."""
    return sum(word.is_gone for word in words) >= num_ranks


def report_folder(attempt: Path, rank: int) -> Path:
    """``$TUNE_CLUSTER_REPORT`` of a rank whose node has this folder for the attempt."""
    return attempt / SCRATCH / "report" / str(rank)


def remove_scratch(attempt: Path) -> None:
    """Delete what ranks that were killed left in an attempt's folder, once no process of theirs is left."""
    shutil.rmtree(attempt / SCRATCH, ignore_errors=True)


def remove_stale_locks(cache: Path) -> list[Path]:
    """Delete the lock files under compilers' caches that no process holds any more: whoever came next would wait for
    them for ever. A compiler holds its lock file open as long as it lives."""
    found = [path for path in cache.glob("torch_extensions/**/lock") if path.is_file()]
    if not found:
        return []
    held = _open_files()
    stale = [path for path in found if str(path.resolve()) not in held]
    for path in stale:
        path.unlink(missing_ok=True)
    return stale


def _open_files() -> set[str]:
    """Paths of all files that processes of this user hold open."""
    held: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for entry in folder.iterdir():
                with contextlib.suppress(OSError):
                    held.add(str(entry.readlink()))
    return held
