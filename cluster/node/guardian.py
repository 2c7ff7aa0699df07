"""Ends every process of a lease once its controller is gone, however abruptly.

All processes a backend starts inherit ``TUNE_CLUSTER_LEASE=<id>`` in their environment. The guardian holds the read
end of a pipe whose only write end belongs to the controller; when that closes, it kills every process carrying the
id and exits once none is left. It runs as a script of the standard library alone, so that it starts in an instant.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

LEASE_VARIABLE = "TUNE_CLUSTER_LEASE"
SELF_CLEANING_VARIABLE = "TUNE_CLUSTER_SELF_CLEANING"
"""Set in processes that end by themselves when their agent is gone."""
GRACE_S = 5.0
"""How long fork servers and their children may take to end by themselves."""
GIVE_UP_S = 150.0
"""Longer than any process takes that can be killed at all; a broken driver holds some for ever."""
SETTLE_S = 0.02
"""Pause before looking again whether processes that were sent SIGKILL are gone."""


def environment_of(pid: int) -> list[bytes]:
    """The ``NAME=value`` entries a process was started with; none if it is gone, a zombie or not ours to read."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def marked_processes(lease: str) -> dict[int, bool]:
    """Pids of the lease's processes but the calling one, each with whether it cleans up by itself."""
    mark, self_cleaning = f"{LEASE_VARIABLE}={lease}".encode(), f"{SELF_CLEANING_VARIABLE}=1".encode()
    found = {}
    for pid in [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]:
        entries = environment_of(pid)
        if mark in entries and pid != os.getpid():
            found[pid] = self_cleaning in entries
    return found


def kill_marked(lease: str) -> None:
    """End all processes of the lease and wait until none is left that can be ended.

    Fork servers and what they forked get :data:`GRACE_S` to end by themselves, as they do when their agent is gone:
    they know their descendants, even those that have dropped the mark.
    """
    patience_s, give_up_s = time.monotonic() + GRACE_S, time.monotonic() + GIVE_UP_S
    while (found := marked_processes(lease)) and time.monotonic() < give_up_s:
        for pid, is_self_cleaning in found.items():
            if not is_self_cleaning or time.monotonic() > patience_s:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(SETTLE_S)


class Guardian:
    """The controller's handle on its guardian process, which also removes the folder ``remove`` at the end."""

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
        """Let the guardian end what is left of the lease and wait for it. Idempotent."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
            self._process.wait()


def main() -> None:
    lease, pipe, folders = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    while os.read(pipe, 1):
        pass
    kill_marked(lease)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
