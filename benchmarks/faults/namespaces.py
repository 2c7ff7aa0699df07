"""Hosts of their own on one machine, joined by a switch: each with a network, a process tree, a name, a /tmp/ray.

A host is an init process in namespaces of its own. Everything started inside dies with it, and it dies with the process
that made it: nothing has to be cleaned up after a test that was killed. A host sees its own processes only, as real
ones do. Files are shared, as on a cluster with a network file system; each host has a /dev/shm of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

LIMIT_S = 240.0
"""How long to wait for something that takes a moment, on a machine that has much else to do."""
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount")
INIT = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN); print('up', flush=True); signal.pause()"
"""The first process of a host: it reaps what is orphaned there, which is all that is asked of it."""


def wait_until(condition: Callable[[], object], what: str, *, limit_s: float = LIMIT_S) -> None:
    give_up_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_s, f"gave up waiting for {what}"
        time.sleep(0.05)


def why_not() -> str:
    """Why no hosts can be made here; empty where they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    try:
        with Switch() as switch:
            switch.host("trial").check("true")
    except (OSError, RuntimeError, AssertionError) as error:
        return f"no network namespaces can be made here: {error}"
    return ""


class Host:
    """One host. Made by :meth:`Switch.host`."""

    def __init__(self, name: str, address: str = "") -> None:
        self.name = name
        self.address = address
        self._init = _start_init(name)
        assert self._init.stdout is not None
        if self._init.stdout.readline() != "up\n":
            raise RuntimeError(f"no host {name}: {self._init.communicate()[1].strip() or 'it does not start'}")
        self.pid = _children(self._init.pid)[0]
        """Of its first process, as seen from outside."""

    def command(self, *arguments: str | Path, env: Mapping[str, str] | None = None) -> list[str]:
        """What runs ``arguments`` inside, started from here."""
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        inside = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--mount", "--pid", "--ipc", "--wd=."]
        # Ahead of what else the machine does: Ray's own start-up limits take no account of that.
        return [*inside, "--", "nice", "-n", "-10", "env", *variables, *map(str, arguments)]

    def check(self, *arguments: str | Path) -> str:
        """Run a command inside to its end and return what it prints."""
        done = subprocess.run(self.command(*arguments), capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, arguments))} on {self.name}: {done.stderr.strip()}")
        return done.stdout

    def pids(self) -> list[int]:
        """All processes inside but the first, by the numbers they have outside; zombies left out."""
        own = _namespace(self.pid)
        return [
            pid for pid in _all_pids() if pid != self.pid and _namespace(pid) == own and _state(pid) not in ("Z", "")
        ]

    def find(self, *words: str) -> list[int]:
        """Processes inside whose command line has all of ``words``."""
        return [pid for pid in self.pids() if all(word in command_line(pid) for word in words)]

    def outside(self, pid: int) -> int:
        """The number outside of a process that is ``pid`` inside."""
        for candidate in self.pids():
            if _status(candidate, "NSpid").split()[-1:] == [str(pid)]:
                return candidate
        raise LookupError(f"no process {pid} on {self.name}")

    def signal(self, number: int, *words: str) -> int:
        """Send it to those :meth:`find` gives; return how many there were."""
        pids = self.find(*words)
        for pid in pids:
            send(pid, number)
        return len(pids)

    def listens(self, port: int) -> bool:
        """Whether a process inside accepts TCP connections at this port."""
        tables = [_read(self.pid, f"net/{name}") for name in ("tcp", "tcp6")]
        return any(re.search(f":{port:04X} 0+:0000 0A ", table) for table in tables)

    def freeze(self) -> None:
        """Stop every process, so that the host no longer answers."""
        wait_until(lambda: not [send(pid, signal.SIGSTOP) for pid in self.pids() if _state(pid) not in "Tt"], "a stop")

    def thaw(self) -> None:
        """Let it go on. nsenter stops itself when what it started is stopped, so it has to be woken, too."""
        entrances = [pid for pid in _all_pids() if f"nsenter --target={self.pid} " in command_line(pid)]
        stopped = [*self.pids(), *entrances]
        wait_until(lambda: not [send(pid, signal.SIGCONT) for pid in stopped if _state(pid) in ("T", "t")], "a start")

    def end_all(self) -> None:
        """Kill every process inside; the host itself stays."""
        wait_until(lambda: not self.signal(signal.SIGKILL), f"the processes of {self.name} to end")
        self.thaw()

    def ip(self, *arguments: str) -> None:
        """The tool of this name on its network, seeing the processes of this machine by their numbers outside."""
        command = ["nsenter", f"--target={self.pid}", "--net", "--", "ip", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            raise RuntimeError(f"ip {' '.join(arguments)} on {self.name}: {done.stderr.strip()}")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._init.communicate()


class Switch:
    """Joins hosts to one network, which nothing outside can see. A context manager: it takes its hosts with it."""

    def __enter__(self) -> Self:
        self._switch = Host("switch")
        self._hosts: list[Host] = []
        self._switch.ip("link", "add", "switch", "type", "bridge")
        self._switch.ip("link", "set", "switch", "up")
        return self

    def __exit__(self, *exc: object) -> None:
        for host in [*self._hosts, self._switch]:
            host.close()

    def host(self, name: str) -> Host:
        """Another host on this network, called ``name``."""
        host = Host(name, f"10.77.0.{len(self._hosts) + 1}")
        self._hosts.append(host)
        self._switch.ip("link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", str(host.pid))
        self._switch.ip("link", "set", "dev", name, "up")
        self.fix(host)
        host.ip("addr", "add", f"{host.address}/24", "dev", "eth0")
        host.ip("link", "set", "eth0", "up")
        host.ip("link", "set", "lo", "up")
        return host

    def cut(self, host: Host) -> None:
        """Take its cable out of the switch: what it sends gets lost, and nothing reaches it."""
        self._switch.ip("link", "set", "dev", host.name, "nomaster")

    def fix(self, host: Host) -> None:
        """Put its cable back."""
        self._switch.ip("link", "set", "dev", host.name, "master", "switch")


def send(pid: int, number: int) -> bool:
    """Signal a process that may be gone by now; True if it was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def command_line(pid: int) -> str:
    """Its arguments joined by spaces; empty if it is gone."""
    return _read(pid, "cmdline").replace("\0", " ")


def descendants(pid: int) -> Iterator[int]:
    """Everything ``pid`` has started that still hangs below it."""
    for child in _children(pid):
        yield child
        yield from descendants(child)


def parent(pid: int) -> int:
    """The process that started it, or took it over."""
    return int(_status(pid, "PPid"))


def _start_init(name: str) -> subprocess.Popen[str]:
    unshare = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    prepare = 'hostname "$1" && mount -t tmpfs none /dev/shm && mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray'
    start: Sequence[str] = ["sh", "-c", f'{prepare} && exec "$2" -S -c "$3"', "sh", name, sys.executable, INIT]
    # die with the thread that starts them, and so do all inside
    return subprocess.Popen(
        ["setpriv", "--pdeathsig=KILL", *unshare, "--", *start],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    except OSError:
        return ""


def _children(pid: int) -> list[int]:
    return [int(child) for child in _read(pid, f"task/{pid}/children").split()]


def _status(pid: int, name: str) -> str:
    lines = [line for line in _read(pid, "status").splitlines() if line.startswith(f"{name}:")]
    return lines[0].partition(":")[2].strip() if lines else ""


def _state(pid: int) -> str:
    """One letter as in ps; empty if it is gone."""
    return _read(pid, "stat").rpartition(")")[2].strip()[:1]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
