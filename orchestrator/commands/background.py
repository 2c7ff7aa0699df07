"""Controllers without a terminal: processes of this host in a session of their own, and Ray Jobs on a head. And the
logs of all controllers."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import platform
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from cluster.base import ClusterError, GangProgress
from cluster.processes import process_info
from orchestrator import processes
from orchestrator.errors import ConfigError
from orchestrator.sweep.documents import MODE_VARIABLE, Controller, HeldNodes
from orchestrator.sweep.home import CONTROLLER_LOG, Home, is_at_work
from orchestrator.sweep.ledger import FILE_NAME, LedgerError, SweepBusyError
from orchestrator.sweep.state import SweepState
from orchestrator.text import Follower, plain, tail
from trials.files import make_private_folder, write_atomically
from trials.secrets import RedactingFormatter, redact

DETACHED, RAY_JOB = "detached", "ray job"
"""Values of ``TUNE_CLUSTER_CONTROLLER_MODE``."""
MARK_VARIABLE = "TUNE_CLUSTER_HOME_MARK"
"""Tells a Ray Job what :func:`require_mark` is to find in its home."""
POLL_S = 0.2
NUM_LINES = 200
"""Last lines of a log that are shown."""
_MARK = "submitted"
"""File in the sweep's folder with the mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedController:
    """What became of a controller that was started in the background."""

    exit_code: int | None
    """None: it has taken the sweep, and goes on."""
    log: Follower
    """What it writes from here on."""


def detach(argv: Sequence[str], home: Home, name: str, *, show: Callable[[str], None]) -> StartedController:
    """Run ``argv``, a supervised controller, apart from this terminal. Returns when it is at work, or has ended.

    Args:
        show: gets the lines it writes until then.

    Raises:
        SweepBusyError: there is one already.
        OSError: its log cannot be written, or it cannot be started.
    """
    folder = make_private_folder(home.sweep_folder(name))
    with _open_log(folder / CONTROLLER_LOG) as file:
        if not processes.take(file):  # it is held until every process that writes to this file has ended
            raise SweepBusyError(f"a detached controller runs the sweep {name!r} already")
        follower = Follower(folder / CONTROLLER_LOG, file.tell())
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, MODE_VARIABLE: DETACHED, "PYTHONUNBUFFERED": "1"},
        )
    while True:
        exit_code = child.poll()
        is_ready = is_under_way(home, name, functools.partial(_is_below, ancestor=child.pid))
        for line in follower.new_lines():
            show(line)
        if is_ready or exit_code is not None:
            return StartedController(exit_code=exit_code, log=follower)
        time.sleep(POLL_S)


def controller_log(home: Home, name: str, *, follow: bool = False, num_lines: int = NUM_LINES) -> Iterator[str]:
    """The last lines of the log of the sweep's controller, safe to print; with ``follow``, all further ones, too, until
    it has ended.

    Raises:
        ConfigError: it has written none, or on another host.
        ClusterError: it is a Ray Job, and the cluster does not answer.
    """
    with home.open(name, begun=False) as ledger:
        about = Controller.read(ledger)
    log = home.sweep_folder(name) / CONTROLLER_LOG
    if about is not None and about.mode == RAY_JOB:
        return job_log(about.address or "", about.job or "", follow=follow, num_lines=num_lines)
    if log.exists():
        return _file_log(home, name, follow=follow, num_lines=num_lines)
    where = f" on {about.host}" if about else ""
    raise ConfigError(
        f"the controller of {name!r}{where} has written no log yet", remedy=f"`tune-cluster status {name}` shows it."
    )


class ForegroundLog(io.TextIOBase):
    """What a controller in a terminal leaves in ``controller.log`` for others to read, like one in the background.

    A stream, and an observer: nothing is written before the sweep has been created, so that one that is refused leaves
    nothing behind. A log that cannot be written costs the sweep nothing.
    """

    def __init__(self, home: Home, name: str) -> None:
        self._path = home.sweep_folder(name) / CONTROLLER_LOG
        self._early: list[str] = []
        self._file: IO[bytes] | None = None
        self._last = ""
        self._handler = logging.StreamHandler(self)
        self._handler.setFormatter(RedactingFormatter("%(levelname)s %(name)s: %(message)s"))

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self._handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        logging.getLogger().removeHandler(self._handler)
        end = self._last if error is None else f"interrupted by {type(error).__name__}: {error}".rstrip(": ")
        self.write(f"{redact(plain(end))}\n")
        if self._file is not None:
            self._file.close()

    def write(self, text: str) -> int:
        """Keep the text until there is a sweep, then write it; an error of the disk loses it."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._early.append(text)
            else:
                self._file.write(text.encode(errors="replace"))
                self._file.flush()
        return len(text)

    def on_state(self, state: SweepState) -> None:
        """Begin to write where the sweep has been created by now."""
        self._last = f"{state.status}: {state.finish_reason}".rstrip(": ")
        if self._file is None and state.created is not None:
            with contextlib.suppress(OSError):
                self._file = _open_log(self._path)
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            early, self._early = self._early, []
            self.write(f"{began} process {os.getpid()} on {platform.node()} is at work, in a terminal\n")
            self.write("".join(early))

    def on_progress(self, trial: int, progress: GangProgress) -> None:
        """Steps are not worth a line."""

    def on_lease(self, nodes: Sequence[str], waiting: str) -> None:
        """The lines of the live view tell it."""


def follow_detached(home: Home, name: str, log: Follower) -> Iterator[str]:
    """What a detached controller writes to its log from here on, until it has ended."""
    while True:
        is_over = not is_at_work(home, name)  # before reading: what was written until then is read below
        lines = log.new_lines()
        yield from lines
        if is_over and not lines:
            yield from log.last_line()
            return
        time.sleep(POLL_S)


def job_log(address: str, job: str, *, follow: bool, num_lines: int = NUM_LINES) -> Iterator[str]:
    """What a Ray Job has written: its last lines, or with ``follow`` all of them, and all further ones until it ends.

    Raises:
        ClusterError: the cluster does not answer.
    """
    from cluster.ray.jobs import find_job, job_logs

    rest = ""
    for piece in job_logs(find_job(address, job), follow=follow):
        *lines, rest = (rest + piece).split("\n")
        yield from map(plain, lines if follow else lines[-num_lines:])
    if rest:
        yield plain(rest)


def leave_mark(home: Home, name: str) -> str:
    """Put a mark into the sweep's folder, by which a controller on another host can tell that it sees the same folder,
    see :func:`require_mark`; return the mark."""
    mark = secrets.token_hex(8)
    folder = make_private_folder(home.sweep_folder(name))
    write_atomically(folder / _MARK, [f"{mark} {platform.node()}\n".encode()])
    return mark


def require_mark(home: Home, name: str) -> None:
    """Check that this process's home is the one that its job was submitted from.

    Raises:
        ClusterError: it is another folder of the same name.
    """
    mark = os.environ.get(MARK_VARIABLE)
    if mark is None:
        return
    try:
        found = (home.sweep_folder(name) / _MARK).read_text(encoding="utf-8").split(" ")[0]
    except OSError:
        found = ""
    if found != mark:
        raise ClusterError(
            f"the folder {home.path.absolute()} of the host that submitted the sweep is not visible on the head "
            f"{platform.node()}; use --home for a folder on a file system that all hosts share, or submit on the head"
        )


def job_environment(mark: str) -> dict[str, str]:
    """What a controller needs to know that runs as a Ray Job. No secrets: anybody may read it."""
    paths = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return {MODE_VARIABLE: RAY_JOB, MARK_VARIABLE: mark, **paths}


def _open_log(path: Path) -> IO[bytes]:
    """Open the log for appending, readable by its owner only; a link in its place is not followed."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)
    file = os.fdopen(fd, "ab")
    file.seek(0, os.SEEK_END)
    return file


def is_under_way(home: Home, name: str, is_it: Callable[[Controller], bool]) -> bool:
    """Whether a controller is at work that ``is_it`` recognises by what it says about itself, and that has found its
    cluster: it holds nodes, or waits for some."""
    if not (home.sweep_folder(name) / FILE_NAME).exists():
        return False
    try:
        with home.open(name, begun=False) as ledger:
            about, lease = Controller.read(ledger), HeldNodes.read(ledger)
            is_held = ledger.is_held()
    except (ConfigError, LedgerError):  # it has given up at this very moment
        return False
    if about is None or lease is None or not is_held:
        return False
    return (lease.at_s or 0.0) >= (about.started_at_s or 0.0) and is_it(about)


def _is_below(about: Controller, ancestor: int) -> bool:
    """Whether the controller is this process or one that it has started."""
    pid = about.pid
    while pid is not None and pid > 1:
        if pid == ancestor:
            return True
        info = process_info(pid)
        pid = None if info is None else info.parent_pid
    return False


def _file_log(home: Home, name: str, *, follow: bool, num_lines: int) -> Iterator[str]:
    path = home.sweep_folder(name) / CONTROLLER_LOG
    last = tail(path, num_lines)
    yield from last.lines
    if follow:
        yield from follow_detached(home, name, Follower(path, last.end))
