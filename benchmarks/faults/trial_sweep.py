"""Whole sweeps on real hosts (:mod:`benchmarks.faults.ray_nodes`): the command line, small real gangs."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.faults.checks import Story
from benchmarks.faults.namespaces import LIMIT_S, command_line, descendants, send
from benchmarks.faults.ray_nodes import RayNodes
from benchmarks.faults.runner import STAGE
from orchestrator.commands import steering
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger, LedgerError
from orchestrator.sweep.snapshot import Home
from orchestrator.sweep.state import Attempt, SweepState
from tests.support import sweeps
from tests.support.mlflow_store import new_store

SWEEP = {
    "name": "faulty",
    "runner": "benchmarks.faults.runner:run_rank",
    "workload": {"global_batch_size": 32},
    "space": {"dp_replicate": [2, 4, 8], "micro_batch_size": [1, 2, 4], "world_size": [2, 4, 8]},
    "baseline": {"dp_replicate": 8, "micro_batch_size": 1},
    "search": {"sampler": "random", "seed": 4, "max_concurrent": 2, "early_stop": "off"},
    "budget": {"max_trials": 6},
    "confirm": "off",  # what is proven has tests of its own
    "gate": "off",
    "tracking": {"report": False},  # pages have tests of their own, too
    "deadlines": {"starting_s": 240, "stall_s": 60},
}
CLUSTER = {"kind": "ray", "num_nodes": 3, "min_nodes": 2, "devices_per_node": 4, "isolation": "device"}


class Sweep:
    """One sweep and its controllers.

    Args:
        folder: takes the sweep file and what the controllers print.
        home: of tune-cluster; gets a MLflow store that is migrated already.
        sections: replace keys of :data:`SWEEP`, as in :func:`tests.support.sweeps.write`.
    """

    def __init__(self, cluster: RayNodes, folder: Path, home: Path | None = None, **sections: Any) -> None:
        self.cluster = cluster
        self.home = home or folder / "home"
        self.home.mkdir()
        new_store(self.home)
        place = {**CLUSTER, "address": cluster.address}
        self.file = sweeps.write(folder, **{**SWEEP, "cluster": place, **sections})
        self._log = folder / "controller.log"
        self._controller: subprocess.Popen[bytes] | None = None

    def submit(self, *command: str) -> None:
        """Start a controller, on the controller's host; ``command`` is another than submit."""
        tune_cluster = Path(sys.executable).with_name("tune-cluster")
        arguments = command or ("submit", str(self.file), "--foreground")
        with self._log.open("ab") as log:
            self._controller = self.cluster.popen(
                self.cluster.controller, tune_cluster, *arguments, f"--home={self.home}", stdout=log, stderr=log
            )

    def wait(self, *, limit_s: float = 2 * LIMIT_S) -> int:
        """The controller's exit code."""
        assert self._controller is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._controller.wait(limit_s)
        self.kill()
        raise AssertionError(f"the controller does not end; {self.screen()}")

    def run(self, *command: str) -> None:
        """Submit, and see it succeed."""
        self.submit(*command)
        self.expect_end()

    def expect_end(self) -> None:
        """Wait until the controller ends well."""
        code = self.wait()
        assert code == 0, f"exit code {code}; {self.screen()}"

    def has_ended(self) -> bool:
        """Whether its controller has, well or not."""
        assert self._controller is not None
        return self._controller.poll() is not None

    def retry(self, kind: str) -> tuple[int, ...]:
        """Have the trials that ended so launched again by the next controller; their numbers."""
        return steering.retry(SWEEP["name"], Home(self.home), [kind]).trials

    @property
    def controllers(self) -> list[int]:
        """Processes at work on it, without those that supervise them; none while one that was lost is not replaced."""
        assert self._controller is not None
        lines = {pid: command_line(pid) for pid in descendants(self._controller.pid)}
        return [pid for pid, line in lines.items() if line and "orchestrator.commands.supervisor" not in line]

    def kill(self) -> None:
        """SIGKILL all there is of its controller on the host: what looks after it, too."""
        if self._controller is not None:
            for pid in list(descendants(self._controller.pid)):
                send(pid, signal.SIGKILL)
            self._controller.wait()

    def screen(self) -> str:
        """What its controllers have printed, for messages."""
        return f"{self._log}:\n{self._log.read_text(encoding='utf-8')[-4000:]}"

    def state(self) -> SweepState:
        """As the ledger has it now; an empty one where there is none yet."""
        try:
            with Ledger.open_existing(self.home / "sweeps" / SWEEP["name"], read_only=True) as ledger:
                return fold(ledger.events())
        except (LookupError, LedgerError):
            return SweepState()

    def story(self, tracking_uri: str | None = None) -> Story:
        return Story.read(self.home, SWEEP["name"], tracking_uri)

    def number_of(self, config_key: str) -> int:
        """Of the candidate's trial."""
        (number,) = [trial.number for trial in self.state().trials if trial.candidate.config_key == config_key]
        return number

    def attempt(self, config_key: str) -> Attempt:
        """The candidate's last one."""
        return self.state().trials[self.number_of(config_key)].attempts[-1]


class Stage:
    """The folder through which tests tell ranks what to do; see :mod:`benchmarks.faults.runner`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.env = {STAGE: str(folder)}

    @contextlib.contextmanager
    def hold(self, config_key: str, *, hang: int | None = None) -> Iterator[None]:
        """Inside, the candidate's gang does not get on: the ``hang``-th of its ranks hangs, or all of them go round."""
        self.release()  # a frozen rank may have reported since that it is held
        if hang is not None:
            self._write("hang", str(hang))
        self._write("hold", config_key)
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Let every gang get on."""
        for name in ("hold", "hang", "held"):
            (self._folder / name).unlink(missing_ok=True)

    def forget_held(self) -> None:
        """The next gang that is held says so again."""
        (self._folder / "held").unlink(missing_ok=True)

    def is_holding(self) -> bool:
        """Whether the gang to be held has come so far."""
        return (self._folder / "held").exists()

    def last_pid(self) -> int:
        """Of the last rank of the gang that is held, as it knows itself."""
        return int((self._folder / "held").read_text(encoding="ascii"))

    def _write(self, name: str, text: str) -> None:
        part = self._folder / f"{name}.part"
        part.write_text(text, encoding="ascii")
        part.replace(self._folder / name)
