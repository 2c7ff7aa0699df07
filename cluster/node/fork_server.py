"""The fork server: a process with torch and the runners' modules imported, whose children start in milliseconds.

It is single-threaded, imports no ray and touches no device, so that its children may. The agent hands it one end of
a socket per attempt; a :mod:`cluster.node.warden` forked for it does the rest. When the agent's end of the control
socket closes, however that comes about, the fork server kills all its descendants and exits. (It cannot use the
kernel's parent-death signal: that is sent when the *thread* that started it ends, and an agent has several.)
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import selectors
import socket
import sys
import traceback
from collections.abc import Sequence

from cluster.base import Deadlines
from cluster.gang.messages import Beat, NodeLaunch, RankFailure, RankPlace, RankProgress, RankSlot, RankSuccess
from cluster.node.hang import DUMP_SIGNAL
from cluster.node.memory_watch import MIN_SHARED_BYTES, shared_memory_shortage
from cluster.node.warden import warden_main
from cluster.processes import adopt_orphans, children, collapse_pages, kill, kill_descendants
from trials import torch_support
from trials.files import CodecError, from_json
from trials.outcome import RankReport, StepBreakdown
from trials.secrets import redact

MESSAGES = (
    NodeLaunch,
    RankSlot,
    Deadlines,
    Beat,
    RankProgress,
    RankSuccess,
    RankPlace,
    RankFailure,
    RankReport,
    StepBreakdown,
)
"""Types of the messages that wardens and ranks read: looked up before the first fork, so that no child has to."""

CLOSE_TIMEOUT_S = 120.0
"""How long its descendants may take to be gone before it leaves them: a broken driver holds processes for ever."""


def preload(modules: Sequence[str]) -> list[str]:
    """Import ``modules``; return what went wrong, one line per module."""
    problems = []
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            sys.stderr.write(redact(traceback.format_exc()))
            problems.append(redact(f"cannot import {module}: {type(error).__name__}: {error}"))
    if problems and (known := torch_support.problem(torch_support.installed_version())):
        problems.append(known)
    return problems


class ForkServer:
    """Forks a warden for each attempt socket that arrives on ``control``, a packet socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._selector = selectors.DefaultSelector()
        self._wardens: dict[int, int] = {}
        """Pid of each warden -> the fork server's copy of its socket."""

    def serve(self) -> None:
        """Fork and reap until the agent is gone."""
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._reap(warden=key.data, pidfd=key.fd)
                elif not self._accept():
                    return

    def _accept(self) -> bool:
        message, fds, _, _ = socket.recv_fds(self._control, 1, 1)
        if not message:
            return False
        warden = os.fork()
        if warden == 0:
            _run_warden(fds[0])
        self._wardens[warden] = fds[0]
        self._selector.register(os.pidfd_open(warden), selectors.EVENT_READ, warden)
        return True

    def _reap(self, *, warden: int, pidfd: int) -> None:
        """Reap a warden that has ended, and kill what it left behind if it was killed.

        The agent takes the end of the attempt's socket, of which this process keeps a copy so long, for the proof.
        """
        self._selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(warden, 0)
        fd = self._wardens.pop(warden)
        while orphans := [pid for pid in children() if pid not in self._wardens]:
            for pid in orphans:
                kill(pid)
                os.waitpid(pid, 0)
        os.close(fd)


def _run_warden(fd: int) -> None:
    code = 1
    try:
        warden_main(fd)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """``python -m cluster.node.fork_server <control fd> <sys.path entries as JSON> <module>...``"""
    gc.disable()  # what is imported stays: looking through it again and again is a fifth of the start
    control = socket.socket(fileno=int(sys.argv[1]))
    sys.path.extend(entry for entry in json.loads(sys.argv[2]) if entry not in sys.path)
    adopt_orphans()
    faulthandler.enable(file=2)  # ranks inherit both: in them descriptor 2 is their own log
    faulthandler.register(DUMP_SIGNAL, file=2)
    problems = preload(sys.argv[3:])
    if too_small := shared_memory_shortage(MIN_SHARED_BYTES):
        problems.append(too_small)
    for cls in MESSAGES:  # an empty message is no message, but its types are looked up and remembered
        with contextlib.suppress(CodecError):
            from_json(cls, {})
    gc.collect()
    gc.freeze()
    gc.enable()
    collapse_pages()
    with contextlib.suppress(ConnectionError):
        control.send(json.dumps({"problems": problems}).encode())
        ForkServer(control).serve()
    kill_descendants(CLOSE_TIMEOUT_S)


if __name__ == "__main__":
    main()
