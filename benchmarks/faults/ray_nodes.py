"""A Ray cluster of real ``ray start`` processes, each node on a host of its own
(:mod:`benchmarks.faults.namespaces`).

The head has no devices, the controller's host is a node without devices (a driver needs a raylet on its host), and the
nodes that train have ``devices`` CPUs each. Token authentication is on.

Ray takes about a minute to notice that a host is frozen or cut off. For the tests the head asks every 0.5 s, waits
1.5 s for an answer and gives a node up after four without one: some 8 s, and a raylet that is merely slow on a busy
machine still has several times what it needs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks.faults.namespaces import Host, Switch, command_line, send, wait_until
from tests.support import ROOT

PORT = 6379
HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1500",
    "RAY_health_check_failure_threshold": "4",
}
HEAD_AWAY_S = 10
"""How long raylets and drivers wait for a head that is away before they end; Ray's own setting is a minute."""
NODES = ("node1", "node2", "node3")
RAYLET = "/raylet/raylet"
GCS = "/gcs/gcs_server"


DISK_BYTES = 32 << 20
RAYS_OWN = (
    "/ray start ",
    "/gcs/gcs_server",
    "/raylet/raylet",
    "/dashboard/dashboard.py",
    "ray.util.client.server",
    "ray::DashboardAgent",
    "ray::RuntimeEnvAgent",
    "dashboard/agent.py",
    "runtime_env/agent/main.py",
    "ray::IDLE",
    "workers/default_worker.py",
    "ray::QueueActor",  # of all sweeps, on the head: it stays
    "benchmarks.faults.monitor",
)


def mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def is_rays_own(command: str) -> bool:
    """Whether this is the command line of a process of the cluster, not of a sweep."""
    return any(own in command for own in RAYS_OWN)


class RayNodes:
    """The cluster. A context manager: afterwards no process and no namespace of it is left.

    Args:
        folder: takes token, logs and whatever tests keep there; all hosts see it.
        devices: CPUs of each node that trains.
    """

    def __init__(self, folder: Path, *, devices: int = 4) -> None:
        self.folder = folder
        self._devices = devices
        self._switch = Switch()
        self._starts: dict[str, subprocess.Popen[bytes]] = {}
        self._monitor: subprocess.Popen[str] | None = None
        self.disk = folder / "disk"
        """A small disk of its own, which all hosts see."""
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        self.env = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_worker_niceness": "0",  # not behind whatever else this machine does
            "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEAD_AWAY_S),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }

    def __enter__(self) -> Self:
        self.disk.mkdir()
        mount("-t", "tmpfs", "none", self.disk)
        try:
            self.resize_disk(1)
            self._switch.__enter__()
            self.head = self._switch.host("head")
            self.controller = self._switch.host("controller")
            self.nodes = {name: self._switch.host(name) for name in NODES}
            self.address = f"{self.head.address}:{PORT}"
            self.start_head()
            self.start(self.controller, *self.nodes.values())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._switch.__exit__(*exc)
        for process in [*self._starts.values(), *filter(None, [self._monitor])]:
            process.kill()
            process.communicate()
        subprocess.run(["umount", "--lazy", self.disk], check=False)

    @property
    def hosts(self) -> tuple[Host, ...]:
        return (self.head, self.controller, *self.nodes.values())

    def start_head(self) -> None:
        """Start the head and wait until it answers."""
        options = ("--head", f"--port={PORT}", "--num-cpus=0", "--include-dashboard=false", "--no-monitor")
        self._start(self.head, *options, **HEALTH_CHECKS)
        wait_until(lambda: self._is_alive(self.head), "the head")

    def start(self, *hosts: Host) -> None:
        """Start their raylets and wait until they have joined: few at a time, as each has 30 s for it by a constant of
        Ray's, and again where a busy machine was too slow for that."""
        for some in (hosts[i : i + 2] for i in range(0, len(hosts), 2)):
            for host in some:
                self._start_node(host)
            wait_until(functools.partial(self._have_joined, some), "the nodes to join")

    def _start_node(self, host: Host) -> None:
        num_cpus = 0 if host is self.controller else self._devices
        self._start(host, f"--address={self.address}", f"--num-cpus={num_cpus}")

    def _have_joined(self, hosts: Sequence[Host]) -> bool:
        for host in hosts:
            if self._starts[host.name].poll() is not None:
                self._end_ray(host)
                self._start_node(host)
        return all(self._is_alive(host) for host in hosts)

    def kill_head(self) -> None:
        """The head's processes end at once, and with them all Ray knew."""
        self.head.end_all()

    def kill_raylet(self, host: Host) -> None:
        """Only the raylet itself: what it started has to notice."""
        assert host.signal(signal.SIGKILL, RAYLET) == 1

    def fill_disk(self) -> None:
        """Leave no byte of it free."""
        with contextlib.suppress(OSError), (self.disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"\0" * (1 << 16))

    def resize_disk(self, factor: int) -> None:
        """Times its size at the beginning."""
        mount("-o", f"remount,size={factor * DISK_BYTES}", self.disk)

    def fix(self, host: Host) -> None:
        self._switch.fix(host)

    def cut(self, host: Host) -> None:
        self._switch.cut(host)

    def repair(self) -> None:
        """Fix every cable, wake every host, start what is not running, empty the disk."""
        (self.disk / "filler").unlink(missing_ok=True)
        self.resize_disk(1)
        for host in self.hosts:
            self._switch.fix(host)
            host.thaw()
        away = [host for host in self.hosts[1:] if not self.head.find(GCS) or not self._is_alive(host)]
        for host in away:
            self._end_ray(host)
        if not self.head.find(GCS):
            self.head.end_all()
            self.start_head()
        self.start(*away)

    def _end_ray(self, host: Host) -> None:
        """What is left of it; a controller goes on, as it would where it has a host to itself."""
        own = [pid for pid in host.pids() if host is not self.controller or is_rays_own(command_line(pid))]
        wait_until(lambda: not sum(send(pid, signal.SIGKILL) for pid in own), f"the end of Ray on {host.name}")
        host.thaw()

    def alive(self) -> dict[str, bool]:
        """By address, what the head thinks of each node; empty where the head does not answer."""
        answer: dict[str, bool] = self._ask("nodes")
        return {} if "error" in answer else answer

    def groups(self) -> list[str]:
        """Names of placement groups."""
        answer: list[str] = self._ask("groups")
        assert isinstance(answer, list), answer
        return answer

    def popen(self, host: Host, *arguments: str | Path, env: Mapping[str, str] | None = None, **options: Any) -> Any:
        """Start a command on a host, with the cluster's token."""
        return subprocess.Popen(host.command(*arguments, env={**self.env, **(env or {})}), cwd=ROOT, **options)

    def _start(self, host: Host, *options: str, **env: str) -> None:
        if host.name in self._starts:
            self._starts[host.name].wait()
        ray = Path(sys.executable).with_name("ray")
        command = [ray, "start", "--block", f"--node-ip-address={host.address}", "--object-store-memory=83886080"]
        command += ["--include-log-monitor=false"]
        with (self.folder / f"{host.name}.log").open("ab") as log:
            self._starts[host.name] = self.popen(host, *command, *options, env=env, stdout=log, stderr=log)

    def _is_alive(self, host: Host) -> bool:
        return self._starts[host.name].poll() is None and bool(self.alive().get(host.address))

    def _ask(self, question: str) -> Any:
        """Asked on the head's host, whose cable is never cut."""
        if not self.head.listens(PORT):  # Ray itself would try for many seconds
            return {"error": "no head"}
        if self._monitor is not None and self._monitor.poll() is not None:
            self._monitor.communicate()
            self._monitor = None
        if self._monitor is None:
            command = [sys.executable, "-m", "benchmarks.faults.monitor", self.address]
            with (self.folder / "monitor.log").open("ab") as log:
                self._monitor = self.popen(
                    self.head, *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
                )
        assert self._monitor.stdin is not None
        assert self._monitor.stdout is not None
        self._monitor.stdin.write(f"{question}\n")
        self._monitor.stdin.flush()
        return json.loads(self._monitor.stdout.readline() or '{"error": "the monitor ended"}')
