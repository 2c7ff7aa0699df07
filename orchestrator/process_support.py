"""This process: how it was called, locks and signals, environments of commands, homes that sweeps were submitted to."""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

from trials.files import make_private_folder, write_atomically
from trials.secrets import for_ranks

# ---- How this program was called, so that the commands it shows can be typed as they stand

PROGRAM = "tune-cluster"
HOME_VARIABLE = "TUNE_CLUSTER_HOME"
DEFAULT_HOME = Path("tune-cluster-runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """What to type for this program, and the options every command needs."""

    program: str = PROGRAM
    """As the shell takes it."""
    options: tuple[str, ...] = ()

    @classmethod
    def current(cls, home: Path) -> Self:
        """How this process was called: by its path where it is not on PATH, and with ``--home`` where that matters."""
        path = Path(sys.argv[0])
        is_module = path.name == "__main__.py" and path.parent == Path(__file__).parent
        own = [sys.executable, "-m", __package__ or ""] if is_module else [sys.argv[0]]
        is_on_path = shutil.which(PROGRAM) is not None or (not is_module and path.name != PROGRAM)
        is_implied = str(home) in (str(DEFAULT_HOME), os.environ.get(HOME_VARIABLE))
        return cls(
            program=PROGRAM if is_on_path else shlex.join(own), options=() if is_implied else ("--home", str(home))
        )

    def command(self, *words: str) -> str:
        """One line for the shell."""
        return " ".join([self.program, *words, *(shlex.quote(option) for option in self.options)])


PLAIN = Invocation()
"""The program as the documents call it: by name, without options."""


def user_name() -> str:
    """Whoever runs this process; containers run as users without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"


# ---- What processes share: locks on files that end with their holder, signals that interrupt, environments of
# commands

_POLL_S = 0.5


def take(file: IO[Any]) -> bool:
    """Take the lock on ``file`` if it can be had within half a second: whoever asks :func:`is_held` has it for an
    instant, too. Returns whether it was taken."""
    deadline_s = time.monotonic() + _POLL_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.02)


def is_held(path: Path) -> bool:
    """Whether some process holds the lock on this file; nobody does where it cannot be read."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def pause_s(num_failures: int, *, first_s: float, last_s: float) -> float:
    """Seconds to wait before the next try after ``num_failures`` earlier pauses: each is twice the one before, up to
    ``last_s``."""
    return float(min(last_s, first_s * 2 ** min(num_failures, 30)))


REPEATED_S = 2.0
"""Copies of a signal that come within this time count as one."""


@contextmanager
def interruptible() -> Iterator[None]:
    """While inside, SIGTERM does what Ctrl-C does. Copies of a signal, from a supervisor and from whoever signals all
    processes of a group, count once; one that comes later interrupts again."""
    received_s = -REPEATED_S

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal received_s
        before_s, received_s = received_s, time.monotonic()
        if received_s - before_s >= REPEATED_S:
            raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment for a user's command: that of this process without its secrets and without what is meant for a
    controller, and with the variables ``own``."""
    kept = {name: value for name, value in for_ranks(os.environ).items() if not name.startswith("TUNE_CLUSTER_")}
    home = {HOME_VARIABLE: os.environ[HOME_VARIABLE]} if HOME_VARIABLE in os.environ else {}
    return {**kept, **home, **own}


# ---- Finds homes of sweeps again from another folder: those above this one, and those that sweeps were submitted to
#
# The latter are kept in a file of the user's, ``$XDG_STATE_HOME/tune-cluster/homes``, one a line, the last used
# first. It only serves to say where a sweep was seen: no command looks into another home than it was told.

MAX_HOMES = 20
"""Homes that are remembered."""


def remember(home: Path) -> None:
    """Note that sweeps are kept in this home. What keeps it from being noted is nobody's concern."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        here, file = str(home.absolute()), _file()
        known = _remembered()
        if known[:1] == [here] or "\n" in here:
            return
        kept = [here, *(one for one in known if one != here)][:MAX_HOMES]
        make_private_folder(file.parent)
        write_atomically(file, ["".join(f"{one}\n" for one in kept).encode()])


def host_queue(home: Path) -> Path:
    """The folder of the queue that a user's sweeps on one host share, whatever their homes; the home itself where the
    user has no folder that can be written to."""
    with contextlib.suppress(OSError, RuntimeError):
        folder = make_private_folder(_file().parent)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return home


def elsewhere(home: Path) -> Iterator[Path]:
    """Other homes that exist: those above this folder, the nearest first, then those remembered, the last one first."""
    with contextlib.suppress(OSError, RuntimeError):
        seen = {home.resolve()}
        here = Path.cwd()
        for other in (*(folder / DEFAULT_HOME for folder in (here, *here.parents)), *map(Path, _remembered())):
            if other.resolve() not in seen and (other / "sweeps").is_dir():
                seen.add(other.resolve())
                yield other


def where_seen(sweep: str, home: Path, ledger: str) -> str:
    """Where else the sweep is, and the option that leads there; empty where it is nowhere else.

    Args:
        ledger: name of the file that every sweep's folder has.
    """
    with contextlib.suppress(OSError):
        for other in elsewhere(home):
            if (other / "sweeps" / sweep / ledger).is_file():
                return f"It is in {other}: add --home {shlex.quote(str(other))}."
    return ""


def _file() -> Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    return folder / "tune-cluster" / "homes"


def _remembered() -> list[str]:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        lines = _file().read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.startswith("/") and "\0" not in line][:MAX_HOMES]
    return []
