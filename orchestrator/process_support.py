"""This process: its command line, locks and signals, environments of commands, homes used before."""

from __future__ import annotations

import contextlib
import fcntl
import gc
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

# ---- How this program was called, so that the commands it shows can be copied

PROGRAM = "tune-cluster"
HOME_VARIABLE = "TUNE_CLUSTER_HOME"
DEFAULT_HOME = Path("tune-cluster-runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """This program's name and the options that every command needs."""

    program: str = PROGRAM
    """As the shell takes it."""
    options: tuple[str, ...] = ()

    @classmethod
    def current(cls, home: Path) -> Self:
        """How this process was called: by its path if it is not on PATH, and with ``--home`` if it differs."""
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
    """The user of this process; containers may run as users without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"


# ---- What processes share: locks on files that end with their holder, signals that interrupt, environments of
# commands

_POLL_S = 0.5


def take(file: IO[Any]) -> bool:
    """Take the lock on ``file`` within half a second: callers of :func:`is_held` take it for an instant, too. Returns
    whether it was taken."""
    deadline_s = time.monotonic() + _POLL_S
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(0.02)


def is_held(path: Path) -> bool:
    """Whether a process holds the lock on this file; False if it cannot be read."""
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
"""Copies of a signal within this time count as one."""


@contextmanager
def without_collection() -> Iterator[None]:
    """Pause the garbage collector: it would traverse millions of objects that stay alive, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def interruptible() -> Iterator[None]:
    """While inside, SIGTERM acts like Ctrl-C. Copies of a signal, from a supervisor and to the whole process group,
    count once; a later one interrupts again."""
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
    """The environment for a user's command: this process's, without secrets and controller variables, plus ``own``."""
    kept = {name: value for name, value in for_ranks(os.environ).items() if not name.startswith("TUNE_CLUSTER_")}
    home = {HOME_VARIABLE: os.environ[HOME_VARIABLE]} if HOME_VARIABLE in os.environ else {}
    return {**kept, **home, **own}


# ---- Finds homes of sweeps from another folder: those above this one, and those used before
#
# The latter are kept in the user's file ``$XDG_STATE_HOME/tune-cluster/homes``, one per line, last used first. It is
# only used for hints: no command reads another home than the given one.

MAX_HOMES = 20
"""Homes that are remembered."""


def remember(home: Path) -> None:
    """Remember this home. Failures are ignored."""
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        here, file = str(home.absolute()), _file()
        known = _remembered()
        if known[:1] == [here] or "\n" in here:
            return
        kept = [here, *(one for one in known if one != here)][:MAX_HOMES]
        make_private_folder(file.parent)
        write_atomically(file, ["".join(f"{one}\n" for one in kept).encode()])


def host_queue(home: Path) -> Path:
    """The folder of the queue that a user's sweeps on one host share, regardless of their homes; the home itself if the
    user has no writable folder."""
    with contextlib.suppress(OSError, RuntimeError):
        folder = make_private_folder(_file().parent)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    return home


def elsewhere(home: Path) -> Iterator[Path]:
    """Other existing homes: those above this folder, nearest first, then the remembered ones, latest first."""
    with contextlib.suppress(OSError, RuntimeError):
        seen = {home.resolve()}
        here = Path.cwd()
        for other in (*(folder / DEFAULT_HOME for folder in (here, *here.parents)), *map(Path, _remembered())):
            if other.resolve() not in seen and (other / "sweeps").is_dir():
                seen.add(other.resolve())
                yield other


def where_seen(sweep: str, home: Path, ledger: str) -> str:
    """A hint with the home that contains the sweep and the option to use; empty if there is none.

    Args:
        ledger: name of the file that every sweep's folder has.
    """
    with contextlib.suppress(OSError):
        for other in elsewhere(home):
            if (other / "sweeps" / sweep / ledger).is_file():
                return f"A sweep of this name is in {other}: add --home {shlex.quote(str(other))}."
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
