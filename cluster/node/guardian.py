"""Ends every process of a lease once its controller is gone, however abruptly.

All processes that a backend starts inherit ``TUNE_CLUSTER_LEASE=<id>`` in their environment. The guardian holds the
read end of a pipe; only the controller has the write end. When that closes, the guardian kills every process that
carries the id, and their descendants, and exits once none is left. Programs that set their own title, such as Ray's
agents, overwrite the environment that others can see. They are recognized by their parents, or by open files in the
lease's folder. The guardian is a script that needs only the standard library, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

LEASE_VARIABLE = "TUNE_CLUSTER_LEASE"
SELF_CLEANING_VARIABLE = "TUNE_CLUSTER_SELF_CLEANING"
"""Set in processes that end by themselves once their agent is gone."""
GRACE_S = 5.0
"""Time for fork servers and their children to end by themselves, in seconds."""
GIVE_UP_S = 150.0
"""Time limit, in seconds. Killing takes less unless a broken driver holds the process forever."""
QUIET_S = 1.0
"""Time without any process of a killed controller, in seconds, before its guardian exits."""
SETTLE_S = 0.02
"""Pause between two checks whether killed processes are gone."""


def environment_of(pid: int) -> list[bytes]:
    """Return a process's initial ``NAME=value`` entries; none if it is gone, a zombie or unreadable."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def marked_processes(lease: str, folder: str | None = None) -> dict[int, bool]:
    """Find the lease's processes except the caller and its parent; by pid, whether each cleans up by itself.

    They carry the mark, descend from one that does, or show no environment and have open files below ``folder``.
    """
    mark, self_cleaning = f"{LEASE_VARIABLE}={lease}".encode(), f"{SELF_CLEANING_VARIABLE}=1".encode()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    found, unmarked = {}, []
    for pid in set(pids) - {os.getpid(), os.getppid()}:
        entries = environment_of(pid)
        if mark in entries or (folder and _is_wiped(entries) and _holds_files_of(pid, folder)):
            found[pid] = self_cleaning in entries
        else:
            unmarked.append(pid)
    return found | _descendants(unmarked, found)


def _descendants(pids: Sequence[int], marked: Mapping[int, bool]) -> dict[int, bool]:
    """Return those of ``pids`` that descend from marked processes, with the mark of the nearest ancestor."""
    parents = {pid: parent for pid in (pids if marked else ()) if (parent := _parent_of(pid)) is not None}
    found: dict[int, bool] = {}
    for pid in parents:
        above, seen = pid, set()
        while above in parents and above not in seen:  # parents are read one by one, and a pid may be reused meanwhile
            seen.add(above)
            above = parents[above]
        if above in marked:
            found[pid] = marked[above]
    return found


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _is_wiped(entries: Sequence[bytes]) -> bool:
    """Whether a process has overwritten (the beginning of) its environment with its title."""
    return len(entries) > 1 and b"=" not in entries[0]


def _holds_files_of(pid: int, folder: str) -> bool:
    with contextlib.suppress(OSError):
        files = (str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir())
        return any(file.startswith(f"{folder}/") for file in files)
    return False


def kill_marked(lease: str, folder: str | None = None, *, is_orderly: bool = True) -> None:
    """End all processes of the lease and wait until none is left that can be ended.

    Fork servers and their children get :data:`GRACE_S` to end by themselves, as they do once their agent is gone: they
    know their descendants, even those without the mark. After a killed controller, no process may be seen for
    :data:`QUIET_S`: a process that was just being started carries the mark only from its first instruction on.
    """
    patience_s, give_up_s = time.monotonic() + GRACE_S, time.monotonic() + GIVE_UP_S
    quiet_until_s = time.monotonic() + (0.0 if is_orderly else QUIET_S)
    while ((found := marked_processes(lease, folder)) or time.monotonic() < quiet_until_s) and (
        time.monotonic() < give_up_s
    ):
        for pid, is_self_cleaning in found.items():
            if not is_self_cleaning or time.monotonic() > patience_s:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            quiet_until_s = max(quiet_until_s, time.monotonic() + (0.0 if is_orderly else QUIET_S))
        time.sleep(SETTLE_S)


class Guardian:
    """The controller's handle on its guardian process. At the end it also removes the folder ``remove``."""

    def __init__(self, lease: str, *, remove: Path | None = None) -> None:
        watched, self._pipe = os.pipe()
        environment = {key: value for key, value in os.environ.items() if key != LEASE_VARIABLE}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, lease, str(watched), *([str(remove)] if remove else [])],
                pass_fds=[watched],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )
        finally:
            os.close(watched)

    def close(self) -> None:
        """Have the guardian end the rest of the lease, and wait for it. Idempotent."""
        if self._pipe >= 0:
            with contextlib.suppress(BrokenPipeError):  # the guardian was killed
                os.write(self._pipe, b".")
            os.close(self._pipe)
            self._pipe = -1
            self._process.wait()


def main() -> None:
    lease, pipe, folders = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    is_orderly = False
    while os.read(pipe, 1):
        is_orderly = True
    kill_marked(lease, folders[0] if folders else None, is_orderly=is_orderly)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
