"""Ends every process of a lease once its controller is gone, however abruptly.

All processes a backend starts inherit ``TUNE_CLUSTER_LEASE=<id>`` in their environment. The guardian holds the read
end of a pipe whose only write end belongs to the controller; when that closes, it kills every process carrying the
id and exits once none is left. It runs as a script of the standard library alone, so that it starts in an instant.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

LEASE_VARIABLE = "TUNE_CLUSTER_LEASE"
SETTLE_S = 0.02
"""Pause between two looks at processes that were sent SIGKILL."""


def marked_processes(variable: str, value: str) -> list[int]:
    """Pids of all living processes that were started with ``variable=value``, without the calling one."""
    mark = f"{variable}={value}".encode()
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if _carries(pid, mark)]


def _carries(pid: int, mark: bytes) -> bool:
    if pid == os.getpid():
        return False
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or not ours to read
        return False


def kill_marked(variable: str, value: str) -> int:
    """Kill all marked processes and wait until none is left; return how many were found."""
    killed: set[int] = set()
    while found := marked_processes(variable, value):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed.update(found)
        time.sleep(SETTLE_S)
    return len(killed)


class Guardian:
    """The controller's handle on its guardian process."""

    def __init__(self, lease: str) -> None:
        watched, self._pipe = os.pipe()
        environment = {key: value for key, value in os.environ.items() if key != LEASE_VARIABLE}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, lease, str(watched)],
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
    lease, pipe = sys.argv[1], int(sys.argv[2])
    while os.read(pipe, 1):
        pass
    kill_marked(LEASE_VARIABLE, lease)


if __name__ == "__main__":
    main()
