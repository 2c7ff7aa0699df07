"""What the buttons of a sweep's page do: the use cases of the command line, and what came of them in one sentence."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any, get_args

from cluster.processes import python_module
from orchestrator.commands import control, submit
from orchestrator.errors import ConfigError
from orchestrator.invocation import Invocation
from orchestrator.sweep.events import Action
from orchestrator.sweep.home import Home
from orchestrator.sweep.requests import RETRIABLE
from orchestrator.text import first_line, plain
from orchestrator.units import trial_id

ACTIONS = (*get_args(Action), "retry", "resume")
"""What may be asked for."""

Tell = Callable[[str, bool], None]
"""Gets a sentence for people, and whether it is bad news."""


class Actions:
    """Carries out what is asked of the sweeps of a home. A controller that has to be started runs in the background,
    as after ``resume --detach``, and outlives this program."""

    def __init__(self, home: Home, invocation: Invocation) -> None:
        self._home = home
        self._invocation = invocation
        self._starting: set[str] = set()
        self._lock = threading.Lock()

    def carry_out(self, sweep: str, action: str, body: Mapping[str, Any], tell: Tell) -> str:
        """Do it; the answer is a sentence. What takes longer goes on, and ``tell`` gets what came of it.

        Raises:
            ConfigError: it cannot be done.
            LedgerError: the sweep cannot be read or written.
        """
        if action in get_args(Action):
            receipt = control.ask(sweep, self._home, action)  # type: ignore[arg-type]  # one of its names
            return f"asked to {action}" if receipt.is_controlled else f"now {receipt.state}"
        if action == "retry":
            receipt = control.retry(sweep, self._home, _kinds(body))
            numbers = ", ".join(trial_id(number) for number in receipt.trials)
            if receipt.is_controlled:
                return f"to be launched again: {numbers}"
            return f"to be launched again: {numbers}; {self._resume(sweep, tell)}"
        return self._resume(sweep, tell)

    def _resume(self, sweep: str, tell: Tell) -> str:
        """Start a controller, and wait for it in a thread: a cluster may take minutes to answer."""
        submission = submit.submission_of_sweep(sweep, self._home, address=None, mode=None)
        if submission.is_over:
            raise ConfigError(f"the sweep {sweep!r} is over", remedy="Retry its failed trials, or confirm another one.")
        with self._lock:
            if sweep in self._starting:
                return "its controller is being started already"
            self._starting.add(sweep)
        detach = [] if submission.address else ["--detach"]
        argv = python_module("orchestrator", "resume", sweep, "--home", str(self._home.path.absolute()), *detach)
        threading.Thread(target=self._start, args=(sweep, argv, tell), name="live-start", daemon=True).start()
        return "its controller is being started"

    def _start(self, sweep: str, argv: list[str], tell: Tell) -> None:
        """The command for it, in a process of its own, which leaves no child to this one."""
        try:
            done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            said = [line for line in done.stderr.splitlines() if line.strip()]
            if done.returncode == 0:
                tell("its controller is at work", False)
            else:
                command = self._invocation.command("logs", sweep)
                tell(f"{plain(said[-1]) if said else 'its controller ended at once'}; `{command}` says more", True)
        except OSError as error:
            tell(f"its controller could not be started: {first_line(error)}", True)
        finally:
            with self._lock:
                self._starting.discard(sweep)


def _kinds(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Kinds of outcomes as a page sent them.

    Raises:
        ConfigError: there are none, or others than trials end in.
    """
    kinds = body.get("kinds")
    if not isinstance(kinds, list) or not kinds or not all(kind in RETRIABLE for kind in kinds):
        raise ConfigError("no kind of outcome was chosen", remedy=f"One or more of {', '.join(RETRIABLE)}.")
    return tuple(kinds)
