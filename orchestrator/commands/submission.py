"""Submits a sweep: finds where it runs already, and starts its controller here, in the background or as a Ray job."""

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
from orchestrator import process_support
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


# Controllers without a terminal: processes of this host in a session of their own, and Ray Jobs on a head. And the
# logs of all controllers.


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
        if not process_support.take(file):  # it is held until every process that writes to this file has ended
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
        ConfigError: it is another folder of the same name.
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
            f"the folder {home.path.absolute()} of the host that submitted the sweep is not visible on the head "
            f"{platform.node()}",
            remedy="Use --home for a folder on a file system that all hosts share, or submit on the head.",
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


# What ``submit`` and ``resume`` do before there is a controller: what is to be run, where, and who runs it already.
#
# A sweep's file is parsed here, once; a controller in this process gets it as a value. One in the background is
# another process, which reads the file once, too.


Mode = Literal["foreground", "detached", "ray job"]
"""Where a controller runs: in this terminal, detached on this host, or as a Ray Job on the cluster's head."""

ADDRESS_VARIABLE = "RAY_ADDRESS"
ENDING_S = 30.0
"""How long a controller that has paused or finished its sweep may take to end."""
JOB_START_S = 180.0
"""How long a command waits for the job it has submitted to begin its work."""
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A sweep that is to be run or resumed, and where its controller is to run."""

    verb: Literal["submit", "resume"]
    target: str
    """What the command of that name is given: the sweep's file, or its name."""
    spec: SweepSpec
    """The sweep as its file says, or as its ledger keeps it."""
    home: Home
    mode: Mode
    address: str | None
    """The Ray cluster's; None: no cluster but this host, or one that does not exist."""
    is_over: bool = False
    """Nothing is left to do but to show the result."""
    is_checked: bool = False
    """A short run has shown already that its trials can be measured, or nobody wants to know."""
    options: tuple[str, ...] = ()
    """Options of the whole program, such as ``--verbose``."""
    budget: Mapping[str, Any] = field(default_factory=dict)
    """Values of the command line that replace those of the file's section ``budget``."""
    budget_change: str = ""
    """How the budget of a sweep that exists was changed; empty where it was not."""

    @property
    def needs_check(self) -> bool:
        """Whether a short run is to come first: of users' training programs, before the sweep begins."""
        is_new = self.verb == "submit" and not self.is_over and self.name not in self.home.sweeps()
        return is_new and not self.is_checked and self.spec.script is not None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def needs_supervisor(self) -> bool:
        """Whether its controller is to be started again when it loses its cluster or dies."""
        return not self.is_over and (self.mode != "foreground" or self.address is not None)

    def command(self, *extra: str) -> list[str]:
        """The command line of the controller, with options ``extra``. A Ray Job learns the address from its cluster."""
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
    """A controller at work in the background."""

    sweep: str
    mode: Mode
    job: str | None = None
    """The Ray Job's id."""
    address: str | None = None
    """The Ray cluster's."""
    is_attached: bool = False
    """It was at work already."""
    exit_code: int | None = None
    """None while it goes on; otherwise it has ended by now."""
    log: Follower | None = field(default=None, compare=False)
    """What a detached controller writes from here on."""

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
    """What ``submit FILE`` asks for. A sweep of this name that exists gets the budget that is given now.

    Args:
        replace: begin a sweep of the same name again, which measured nothing.
        is_checked: leave out the short run that comes first.
        budget: values that replace those of the file's section ``budget``.
        address: as the user gave it; None looks at ``RAY_ADDRESS``, then at the file.
        mode: None: a Ray Job where there is an address, else in the foreground.

    Raises:
        ConfigError: the file, or a sweep of this name with another content.
    """
    spec = load_sweep(file, address=address, budget=budget)
    is_over, budget_change = False, ""
    if replace and spec.name in home.all_names():
        from orchestrator.commands.steering import replace_unmeasured  # few submits need it

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
    """Give a sweep that exists the budget of its file; return whether it is over then, and what changed in words.

    A finished sweep that the budget does not open again keeps the one that ended it. A controller that its supervisor
    starts again changes nothing: its command line may be older than the budget.
    """
    before, after = state.sweep.budget, spec.to_budget()
    change = BudgetChanged(at_s=state.now_s, request=0, budget=after, by="")
    is_in_vain = state.status == "cancelled" or (state.status == "finished" and apply(state, change).is_over)
    if after == before or is_in_vain or supervisor.is_restarted():
        return state.is_over, ""
    receipt = steering.change_budget(spec.name, home, after)
    is_over = receipt.state in ("finished", "failed", "cancelled")
    return is_over, f"{_difference(before, after)}{'; the sweep goes on' if state.is_over and not is_over else ''}"


def _difference(before: Budget, after: Budget) -> str:
    """``max_trials 12 -> 20, wall_time none -> 600 s``."""
    changed = (one.name for one in fields(Budget) if getattr(before, one.name) != getattr(after, one.name))
    return ", ".join(f"{name.removesuffix('_s')} {_limit(before, name)} -> {_limit(after, name)}" for name in changed)


def _limit(budget: Budget, name: str) -> str:
    value = getattr(budget, name)
    return "none" if value is None else f"{value:g}{' s' if name.endswith('_s') else ''}"


def _check_same(state: SweepState, spec: SweepSpec) -> None:
    """Refuse another content under the same name; where nothing was measured under it, it can be begun again."""
    try:
        check_same(state.sweep, spec)
    except ConfigError as error:
        if state.best is None:
            error.remedy = f"{error.remedy} It measured nothing: --replace begins it again."
        raise


def submission_of_sweep(
    name: str, home: Home, *, address: str | None, mode: Mode | None, options: tuple[str, ...] = ()
) -> Submission:
    """What ``resume NAME`` asks for; arguments as :func:`submission_of_file`.

    Raises:
        ConfigError: there is no such sweep.
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
    """Refuse a sweep whose trials would run on this host, with a torch that they cannot run with.

    Raises:
        ConfigError: torch is missing or too old.
    """
    if address is None and spec.cluster.kind in ("local", "ray") and (known := problem(installed_version())):
        raise ConfigError(known, key="cluster", remedy=REMEDY)


def choose_address(spec: SweepSpec, given: str | None) -> str | None:
    """The address of the Ray cluster to use: as given, else ``RAY_ADDRESS``, else as in the file.

    Raises:
        ConfigError: one was given for a sweep that does not run on Ray.
    """
    if spec.cluster.kind != "ray":
        if given is not None:
            raise ConfigError(
                f"the sweep {spec.name!r} runs on a {spec.cluster.kind} cluster, which has no address",
                key="cluster.kind",
                remedy="Leave --address out, or use kind: ray.",
            )
        return None
    address = given or os.environ.get(ADDRESS_VARIABLE) or spec.cluster.address
    return None if address in ("", "local") else address


def find_running(home: Home, name: str) -> StartedSubmission | None:
    """The controller at work on the sweep already; None where there is none. One that has just paused or finished it is
    given time to end, and one that died to be started again."""
    deadline_s = time.monotonic() + ENDING_S
    while is_at_work(home, name) and _is_being_left(home, name):
        if time.monotonic() > deadline_s:
            break  # it is none that ends, but one that waits: for nodes to go on with, or to be started again
        time.sleep(_POLL_S)
    if not is_at_work(home, name):
        return None
    about = home.read(name).controller or Controller()
    return StartedSubmission(sweep=name, mode=about.mode, job=about.job, address=about.address, is_attached=True)


def _is_being_left(home: Home, name: str) -> bool:
    """Whether the process at work on the sweep seems to be about to end: the sweep is paused or over, or nobody holds
    its ledger, so that only the supervisor of a controller that has ended is left."""
    try:
        sweep = home.read(name, begun=True)
        return not sweep.is_held or sweep.state.status != "running"
    except (ConfigError, LedgerError):  # it has not been created yet: its controller waits for the first nodes
        return False


def start_in_background(submission: Submission, show: Callable[[str], None]) -> StartedSubmission:
    """Start the controller in the background, and wait until it is at work or has ended.

    Args:
        show: gets what there is to say meanwhile, line by line.

    Raises:
        ClusterError: the cluster does not take the job.
        SweepBusyError: a detached controller runs the sweep already.
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
    """The job's exit code if it ends before it has taken the sweep; None if it is at work or still to start."""
    from cluster.ray.jobs import job_status

    deadline_s = time.monotonic() + JOB_START_S
    while True:
        status = job_status(job)
        if status.is_over:
            # jobs without a code could not be started, or were stopped
            return status.exit_code if status.exit_code is not None else ExitCode.INFRASTRUCTURE
        if is_under_way(submission.home, submission.name, lambda about: about.job == job.submission_id):
            return None
        if time.monotonic() > deadline_s:
            show(f"the job {job.submission_id} is {status.state} still; it begins when the head gets to it")
            return None
        time.sleep(_POLL_S)


def follow(started: StartedSubmission, home: Home) -> Iterator[str]:
    """What the controller writes from here on, or all of it where it was not started just now; until it has ended.

    Raises:
        ConfigError: it writes to a terminal.
        ClusterError: it is a Ray Job, and its cluster does not answer.
    """
    if started.log is not None:
        return follow_detached(home, started.sweep, started.log)
    if started.job is not None and started.address is not None:
        return job_log(started.address, started.job, follow=True)
    return controller_log(home, started.sweep, follow=True)
