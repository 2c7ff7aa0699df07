"""A slot whose ranks make no progress: which of its processes are which ranks, and which of them tell their stacks.

A program that starts its ranks itself has one slot per node, and its ranks are numbered in the gang: by those numbers
records name them, and so do we.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from pathlib import Path

from cluster.node.guardian import environment_of
from cluster.node.hang.recorder import RecordedRank, listening
from cluster.processes import descendants
from trials.accelerator.kinds import DeviceKind

REPORT_BYTES = 1 << 20
"""How far into a report file is looked for what our hook says when it is loaded."""
_RANK = re.compile(rb"RANK=(\d{1,7})")
_REPORT = re.compile(r"rank(\d{1,7})\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class HangingSlot:
    """A slot to look at."""

    rank: int
    """Its number."""
    pid: int
    log: Path
    device: DeviceKind
    progress: tuple[int, int] | None
    """Phase and step that it has reported, as numbers; None where others report for it."""
    folder: Path
    """The attempt's, where records are written to."""
    asking: int = -1
    """Descriptor of the pipe on which its thread is asked for the record; below 0 where there is none."""
    reports: Path | None = None
    """Folder in which a program of the user's own, and our hook in it, report; None where it runs a model of ours."""
    starts: tuple[int, ...] = ()
    """The gang's ranks that belong on its devices, where it starts them itself."""

    def ranks(self) -> dict[int, list[int]]:
        """The gang's ranks here, each with the pids of its processes, as far as these are known.

        Those that the slot starts itself are told by the ``RANK`` in their environment. A program that sets it later
        shows the pipes that NCCL listens on. Where it shows nothing the slot stands for the first rank of its devices.
        """
        if self.reports is None:
            return {self.rank: [self.pid]}
        below = descendants(self.pid)
        if not self.starts:
            return {self.rank: below}
        found: dict[int, list[int]] = {}
        for pid in below:
            told = next((match for entry in environment_of(pid) if (match := _RANK.fullmatch(entry))), None)
            if told is not None:
                found.setdefault(int(told[1]), []).append(pid)
        return found or {rank: [] for rank in listening(self.folder)} or {self.starts[0]: below}

    def recorded(self, rank: int) -> RecordedRank:
        """Where the record of one of its ranks can be had."""
        return RecordedRank(rank=rank, folder=self.folder, asking=self.asking)

    def telling(self, ranks: dict[int, list[int]]) -> dict[int, int]:
        """For each of ``ranks`` that has one, the process that writes its main thread's stack when it is asked: the
        one in which the training loop began, else the first that said it would."""
        if self.reports is None:
            return {self.rank: self.pid}
        found: dict[int, int] = {}
        living = set(descendants(self.pid))
        for path in sorted(self.reports.glob("rank*.jsonl")):
            number = _REPORT.fullmatch(path.name)
            rank = int(number[1]) if number and self.starts else self.rank
            for pid, trains in _registered(path):
                if rank in ranks and pid in living and (trains or rank not in found):
                    found[rank] = pid
        return found


def _registered(path: Path) -> list[tuple[int, bool]]:
    """Pids of the processes in which our hook has the stacks written when it is asked, by what they reported, each with
    whether its training loop has begun."""
    found = []
    with contextlib.suppress(OSError), path.open("rb") as file:
        for text in file.read(REPORT_BYTES).splitlines():
            if b'"stack_signal"' in text:
                with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                    told = json.loads(text)
                    if told["stack_signal"] is True:
                        found.append((int(told["pid"]), told.get("event") == "begin"))
    return found
