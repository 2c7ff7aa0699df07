"""Submits a sweep: finds its running controller, or starts one here, in the background or as a Ray Job."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self

from cluster.base import GangProgress
from cluster.processes import process_info, python_module
from orchestrator import process_support, units
from orchestrator.commands import steering, supervisor
from orchestrator.config.sweep import SweepSpec, check_same, load_sweep
from orchestrator.errors import ConfigError, ExitCode
from orchestrator.sweep.events import Budget, BudgetChanged
from orchestrator.sweep.fold import apply
from orchestrator.sweep.ledger import FILE_NAME, MODE_VARIABLE, Controller, HeldNodes, LedgerError, SweepBusyError
from orchestrator.sweep.snapshot import CONTROLLER_LOG, Home, is_at_work
from orchestrator.sweep.state import SweepState
from orchestrator.text import Follower, plain, tail
from trials.files import fields_json, make_private_folder, write_atomically
from trials.secrets import RedactingFormatter, redact
from trials.torch_support import REMEDY, installed_version, problem

if TYPE_CHECKING:
    from cluster.ray.jobs import JobHandle


# Controllers without a terminal: background processes on this host, and Ray Jobs on a head; and the logs of all
# controllers.


DETACHED, RAY_JOB = "detached", "ray job"
"""Values of ``TUNE_CLUSTER_CONTROLLER_MODE``."""
MARK_VARIABLE = "TUNE_CLUSTER_HOME_MARK"
"""Passes to a Ray Job the mark that :func:`require_mark` expects in its home."""
POLL_S = 0.2
NUM_LINES = 200
"""Number of last lines of a log to show."""
_MARK = "submitted"
"""File in the sweep's folder with the mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedController:
    """The state of a controller that was started in the background."""

    exit_code: int | None
    """None: it has taken the sweep and is running."""
    log: Follower
    """Its further output."""


def detach(argv: Sequence[str], home: Home, name: str, *, show: Callable[[str], None]) -> StartedController:
    """Run ``argv``, a supervised controller, in the background. Returns once it is running or has ended.

    Args:
        show: receives its output until then.

    Raises:
        SweepBusyError: one is already running.
        OSError: its log cannot be written, or it cannot be started.
    """
    folder = make_private_folder(home.sweep_folder(name))
    with _open_log(folder / CONTROLLER_LOG) as file:
        if not process_support.take(file):  # it is held until every process that writes to this file has ended
            raise SweepBusyError(f"a detached controller is already running the sweep {name!r}")
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
    """The last lines of the controller's log, safe to print; with ``follow``, also all further ones until it has
    ended.

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
        f"the controller of {name!r}{where} has not written a log yet", remedy=f"See `tune-cluster status {name}`."
    )


class ForegroundLog(io.TextIOBase):
    """Writes ``controller.log`` for a controller in a terminal, as for one in the background.

    A stream and an observer: it writes nothing before the sweep is created, so that a refused one leaves no files. If
    the log cannot be written, the sweep runs without it.
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
        """Buffer the text until the sweep exists, then write it; a disk error discards it."""
        with contextlib.suppress(OSError):
            if self._file is None:
                self._early.append(text)
            else:
                self._file.write(text.encode(errors="replace"))
                self._file.flush()
        return len(text)

    def on_state(self, state: SweepState) -> None:
        """Start writing if the sweep has been created."""
        self._last = units.with_reason(state.status, state.finish_reason, ": ")
        if self._file is None and state.created is not None:
            with contextlib.suppress(OSError):
                self._file = _open_log(self._path)
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            early, self._early = self._early, []
            self.write(f"{began} process {os.getpid()} on {platform.node()} started in a terminal\n")
            self.write("".join(early))

    def on_progress(self, trial: int, progress: GangProgress) -> None:
        """Steps are not logged."""

    def on_lease(self, nodes: Sequence[str], waiting: str) -> None:
        """The live view's lines cover it."""


def follow_detached(home: Home, name: str, log: Follower) -> Iterator[str]:
    """Further lines of a detached controller's log, until it has ended."""
    while True:
        is_over = not is_at_work(home, name)  # checked before reading, so that the last lines are read below
        lines = log.new_lines()
        yield from lines
        if is_over and not lines:
            yield from log.last_line()
            return
        time.sleep(POLL_S)


def job_log(address: str, job: str, *, follow: bool, num_lines: int = NUM_LINES) -> Iterator[str]:
    """The output of a Ray Job: its last lines, or with ``follow`` all lines until it ends.

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
    """Write a mark into the sweep's folder and return it. A controller on another host uses it to verify that it sees
    the same folder, see :func:`require_mark`."""
    mark = secrets.token_hex(8)
    folder = make_private_folder(home.sweep_folder(name))
    write_atomically(folder / _MARK, [f"{mark} {platform.node()}\n".encode()])
    return mark


def require_mark(home: Home, name: str) -> None:
    """Check that this process's home is the one its job was submitted from.

    Raises:
        ConfigError: it is a different folder of the same name.
    """
    mark = os.environ.get(MARK_VARIABLE)
    if mark is None:
        return
    try:
        found = (home.sweep_folder(name) / _MARK).read_text(encoding="utf-8").split(" ")[0]
    except OSError:
        found = ""
    if found != mark:
        raise ConfigError(
            f"the head node {platform.node()} cannot access the directory {home.path.absolute()}",
            remedy="Set --home to a directory on a shared file system, or submit on the head node.",
        )


def job_environment(mark: str) -> dict[str, str]:
    """Metadata of the Ray Job of a controller. No secrets: it is public."""
    paths = {"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}
    return {MODE_VARIABLE: RAY_JOB, MARK_VARIABLE: mark, **paths}


def _open_log(path: Path) -> IO[bytes]:
    """Open the log for appending, readable by its owner only; does not follow a link."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)
    file = os.fdopen(fd, "ab")
    file.seek(0, os.SEEK_END)
    return file


def is_under_way(home: Home, name: str, is_it: Callable[[Controller], bool]) -> bool:
    """Whether a controller accepted by ``is_it`` is running and has found its cluster: it holds nodes, or waits for
    some."""
    if not (home.sweep_folder(name) / FILE_NAME).exists():
        return False
    try:
        with home.open(name, begun=False) as ledger:
            about, lease = Controller.read(ledger), HeldNodes.read(ledger)
            is_held = ledger.is_held()
    except (ConfigError, LedgerError):  # it has just given up
        return False
    if about is None or lease is None or not is_held:
        return False
    return (lease.at_s or 0.0) >= (about.started_at_s or 0.0) and is_it(about)


def _is_below(about: Controller, ancestor: int) -> bool:
    """Whether the controller is this process or a child of it."""
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


# ``submit`` and ``resume`` before a controller starts: what to run, where, and whether it is already running.
#
# A sweep's file is parsed here once, and passed to a controller in this process. A background controller is another
# process and also reads the file once.


Mode = Literal["foreground", "detached", "ray job"]
"""Where a controller runs: in this terminal, detached on this host, or as a Ray Job on the cluster's head."""

ADDRESS_VARIABLE = "RAY_ADDRESS"
ENDING_S = 30.0
"""How long a controller may take to exit after its sweep is paused or finished."""
JOB_START_S = 180.0
"""How long a command waits for its submitted job to start."""
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A sweep to run or resume, and where to run its controller."""

    verb: Literal["submit", "resume"]
    target: str
    """The argument of that command: the sweep's file, or its name."""
    spec: SweepSpec
    """The sweep, from its file or its ledger."""
    home: Home
    mode: Mode
    address: str | None
    """The Ray cluster's; None: this host, or a simulated cluster."""
    is_over: bool = False
    """Only the result remains to be shown."""
    is_checked: bool = False
    """A short run has shown that its trials can be measured, or the check is skipped."""
    options: tuple[str, ...] = ()
    """Options before the command, such as ``--verbose``."""
    budget: Mapping[str, Any] = field(default_factory=dict)
    """Values from the command line that override the file's section ``budget``."""
    budget_change: str = ""
    """How the budget of an existing sweep changed; empty if it did not."""

    @property
    def needs_check(self) -> bool:
        """Whether to run a short check first: for custom training programs, before the sweep starts."""
        is_new = self.verb == "submit" and not self.is_over and self.name not in self.home.sweeps()
        return is_new and not self.is_checked and self.spec.script is not None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def needs_supervisor(self) -> bool:
        """Whether to restart its controller when it dies or loses its cluster."""
        return not self.is_over and (self.mode != "foreground" or self.address is not None)

    def command(self, *extra: str) -> list[str]:
        """The command line of the controller, with options ``extra``. A Ray Job gets the address from its cluster."""
        address = ["--address", self.address] if self.address and self.mode != "ray job" else []
        home = ["--home", str(self.home.path.absolute())]
        budget = [word for key, value in self.budget.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        checked = ["--no-check"] if self.is_checked and self.verb == "submit" else []
        return [
            *python_module("orchestrator", *self.options),
            *(self.verb, self.target, *home, "--foreground", *checked, *budget, *address, *extra),
        ]

    def supervised(self, *extra: str) -> list[str]:
        """The command line of a supervisor of that controller."""
        return supervisor.command(
            self.command(*extra),
            home=self.home.path,
            sweep=self.name,
            address=self.address,
            on_cluster=self.mode == "ray job",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedSubmission:
    """A running background controller."""

    sweep: str
    mode: Mode
    job: str | None = None
    """The Ray Job's id."""
    address: str | None = None
    """The Ray cluster's."""
    is_attached: bool = False
    """It was already running."""
    exit_code: int | None = None
    """None while it is running; otherwise it has ended."""
    log: Follower | None = field(default=None, compare=False)
    """Further output of a detached controller."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``submit --detach --json``."""
        return {**fields_json(self, "sweep", "mode", "job", "address", "exit_code"), "attached": self.is_attached}


def submission_of_file(
    file: Path,
    home: Home,
    *,
    address: str | None,
    mode: Mode | None,
    options: tuple[str, ...] = (),
    replace: bool = False,
    is_checked: bool = False,
    budget: Mapping[str, Any] | None = None,
) -> Submission:
    """The submission of ``submit FILE``. An existing sweep of this name gets the new budget.

    Args:
        replace: replace an existing sweep of the same name that has no measurements.
        is_checked: skip the short check.
        budget: overrides values of the file's section ``budget``.
        address: from the command line; None: ``RAY_ADDRESS``, then the file.
        mode: None: a Ray Job if there is an address, else in the foreground.

    Raises:
        ConfigError: the file is invalid, or a different sweep of this name exists.
    """
    spec = load_sweep(file, address=address, budget=budget)
    is_over, budget_change = False, ""
    if replace and spec.name in home.all_names():
        from orchestrator.commands.steering import replace_unmeasured  # imported only if needed

        replace_unmeasured(spec.name, home)
    if spec.name in home.sweeps():
        state = home.read(spec.name, begun=True).state
        _check_same(state, spec)
        is_over, budget_change = _with_budget(state, spec, home)
    where = choose_address(spec, address)
    if not is_over:
        _require_torch(spec, where)
    return Submission(
        verb="submit",
        target=str(file.absolute()),
        spec=spec,
        home=home,
        mode=_mode(mode, where, is_over=is_over),
        address=where,
        is_over=is_over,
        is_checked=is_checked,
        options=options,
        budget=budget or {},
        budget_change=budget_change,
    )


def _with_budget(state: SweepState, spec: SweepSpec, home: Home) -> tuple[bool, str]:
    """Update the budget of an existing sweep from its file; return whether it is over, and the change in words.

    A finished sweep that the new budget does not reopen keeps its old one. A controller restarted by its supervisor
    changes nothing: its command line may be older than the budget.
    """
    before, after = state.sweep.budget, spec.to_budget()
    change = BudgetChanged(at_s=state.now_s, request=0, budget=after, by="")
    is_in_vain = state.status == "cancelled" or (state.status == "finished" and apply(state, change).is_over)
    if after == before or is_in_vain or supervisor.is_restarted():
        return state.is_over, ""
    receipt = steering.change_budget(spec.name, home, after)
    is_over = receipt.state in ("finished", "failed", "cancelled")
    return is_over, f"{_difference(before, after)}{'; the sweep continues' if state.is_over and not is_over else ''}"


def _difference(before: Budget, after: Budget) -> str:
    """``max_trials 12 -> 20, wall_time none -> 600 s``."""
    changed = (one.name for one in fields(Budget) if getattr(before, one.name) != getattr(after, one.name))
    return ", ".join(f"{name.removesuffix('_s')} {_limit(before, name)} -> {_limit(after, name)}" for name in changed)


def _limit(budget: Budget, name: str) -> str:
    value = getattr(budget, name)
    return "none" if value is None else f"{value:g}{' s' if name.endswith('_s') else ''}"


def _check_same(state: SweepState, spec: SweepSpec) -> None:
    """Refuse a different sweep under the same name; one without measurements can be replaced."""
    try:
        check_same(state.sweep, spec)
    except ConfigError as error:
        if state.best is None:
            error.remedy = f"{error.remedy} It has no measurements: --replace starts it again."
        raise


def submission_of_sweep(
    name: str, home: Home, *, address: str | None, mode: Mode | None, options: tuple[str, ...] = ()
) -> Submission:
    """The submission of ``resume NAME``; arguments as for :func:`submission_of_file`.

    Raises:
        ConfigError: the sweep does not exist.
    """
    sweep = home.read(name, begun=True)
    state, spec = sweep.state, SweepSpec.from_json(sweep.spec or {})
    where = choose_address(spec, address)
    if not state.is_over:
        _require_torch(spec, where)
    return Submission(
        verb="resume",
        target=name,
        spec=spec,
        home=home,
        mode=_mode(mode, where, is_over=state.is_over),
        address=where,
        is_over=state.is_over,
        options=options,
    )


def _mode(requested: Mode | None, address: str | None, *, is_over: bool) -> Mode:
    if is_over:
        return "foreground"
    return requested or ("foreground" if address is None else "ray job")


def _require_torch(spec: SweepSpec, address: str | None) -> None:
    """Refuse a sweep whose trials would run on this host if its torch is unusable.

    Raises:
        ConfigError: torch is missing or too old.
    """
    if address is None and spec.cluster.kind in ("local", "ray") and (known := problem(installed_version())):
        raise ConfigError(known, key="cluster", remedy=REMEDY)


def choose_address(spec: SweepSpec, given: str | None) -> str | None:
    """The address of the Ray cluster: from the command line, else ``RAY_ADDRESS``, else the file.

    Raises:
        ConfigError: an address for a sweep that does not run on Ray.
    """
    if spec.cluster.kind != "ray":
        if given is not None:
            raise ConfigError(
                f"the sweep {spec.name!r} uses kind: {spec.cluster.kind}, which does not take an address",
                key="cluster.kind",
                remedy="Remove --address, or set kind: ray.",
            )
        return None
    address = given or os.environ.get(ADDRESS_VARIABLE) or spec.cluster.address
    return None if address in ("", "local") else address


def find_running(home: Home, name: str) -> StartedSubmission | None:
    """The running controller of the sweep, if any. One that has just paused or finished it gets time to exit, and one
    that died gets time to be restarted."""
    deadline_s = time.monotonic() + ENDING_S
    while is_at_work(home, name) and _is_being_left(home, name):
        if time.monotonic() > deadline_s:
            break  # it is not exiting but waiting: for nodes, or to be restarted
        time.sleep(_POLL_S)
    if not is_at_work(home, name):
        return None
    about = home.read(name).controller or Controller()
    return StartedSubmission(sweep=name, mode=about.mode, job=about.job, address=about.address, is_attached=True)


def _is_being_left(home: Home, name: str) -> bool:
    """Whether the sweep's process seems about to exit: the sweep is paused or over, or its ledger is not held, so that
    only the supervisor is left."""
    try:
        sweep = home.read(name, begun=True)
        return not sweep.is_held or sweep.state.status != "running"
    except (ConfigError, LedgerError):  # not created yet: its controller is waiting for the first nodes
        return False


def start_in_background(submission: Submission, show: Callable[[str], None]) -> StartedSubmission:
    """Start the controller in the background, and wait until it is running or has ended.

    Args:
        show: receives progress lines.

    Raises:
        ClusterError: the cluster rejects the job.
        SweepBusyError: a detached controller is already running the sweep.
    """
    if submission.mode == "detached":
        started = detach(submission.supervised(), submission.home, submission.name, show=show)
        return StartedSubmission(
            sweep=submission.name,
            mode="detached",
            address=submission.address,
            exit_code=started.exit_code,
            log=started.log,
        )
    return _submit_job(submission, show)


def _submit_job(submission: Submission, show: Callable[[str], None]) -> StartedSubmission:
    from cluster.ray.connection import dashboard_url
    from cluster.ray.jobs import submit_job

    assert submission.address is not None
    url = dashboard_url(submission.address)
    mark = leave_mark(submission.home, submission.name)
    job = submit_job(
        url,
        f"tune-cluster-{submission.name}",
        submission.supervised(),
        env=job_environment(mark),
        metadata={"tune_cluster_home": str(submission.home.path.absolute())},
    )
    started = StartedSubmission(
        sweep=submission.name,
        mode="ray job",
        job=job.submission_id,
        address=submission.address,
        is_attached=job.attached,
        exit_code=None if job.attached else _await_job(submission, job, show),
    )
    if started.exit_code is not None:
        for line in follow(started, submission.home):
            show(line)
    return started


def _await_job(submission: Submission, job: JobHandle, show: Callable[[str], None]) -> int | None:
    """The job's exit code if it ends before it has taken the sweep; None if it is running or has not started."""
    from cluster.ray.jobs import job_status

    deadline_s = time.monotonic() + JOB_START_S
    while True:
        status = job_status(job)
        if status.is_over:
            # jobs without a code failed to start, or were stopped
            return status.exit_code if status.exit_code is not None else ExitCode.INFRASTRUCTURE
        if is_under_way(submission.home, submission.name, lambda about: about.job == job.submission_id):
            return None
        if time.monotonic() > deadline_s:
            show(f"the job {job.submission_id} is still {status.state}; it starts when the head has capacity")
            return None
        time.sleep(_POLL_S)


def follow(started: StartedSubmission, home: Home) -> Iterator[str]:
    """The controller's output until it has ended: from now on, or all of it if it was already running.

    Raises:
        ConfigError: it writes to a terminal.
        ClusterError: it is a Ray Job, and its cluster does not answer.
    """
    if started.log is not None:
        return follow_detached(home, started.sweep, started.log)
    if started.job is not None and started.address is not None:
        return job_log(started.address, started.job, follow=True)
    return controller_log(home, started.sweep, follow=True)
