"""What ``submit`` and ``resume`` do before there is a controller: what is to be run, where, and who runs it already.

A sweep's file is parsed here, once; a controller in this process gets it as a value. One in the background is another
process, which reads the file once, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cluster.processes import python_module
from orchestrator.commands import background, supervisor
from orchestrator.config.sweep import SweepSpec, check_same, load_sweep
from orchestrator.errors import EXIT_USER, ConfigError
from orchestrator.sweep.documents import Controller
from orchestrator.sweep.home import Home, is_at_work
from orchestrator.sweep.ledger import LedgerError
from orchestrator.sweep.state import SweepState
from orchestrator.text import Follower
from trials.torch_support import REMEDY, installed_version, problem

if TYPE_CHECKING:
    from cluster.ray.jobs import JobHandle

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

    @property
    def needs_check(self) -> bool:
        """Whether a short run is to come first: of training programs of the user's own, before the sweep begins."""
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
        checked = ["--no-check"] if self.is_checked and self.verb == "submit" else []
        return [
            *python_module("orchestrator", *self.options),
            *(self.verb, self.target, *home, "--foreground", *checked, *address, *extra),
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
        names = ("sweep", "mode", "job", "address", "exit_code")
        return {**{name: getattr(self, name) for name in names}, "attached": self.is_attached}


def submission_of_file(
    file: Path,
    home: Home,
    *,
    address: str | None,
    mode: Mode | None,
    options: tuple[str, ...] = (),
    replace: bool = False,
    is_checked: bool = False,
) -> Submission:
    """What ``submit FILE`` asks for.

    Args:
        replace: begin a sweep of the same name anew, which measured nothing.
        is_checked: leave out the short run that comes first.
        address: as the user gave it; None looks at ``RAY_ADDRESS``, then at the file.
        mode: None: a Ray Job where there is an address, else in the foreground.

    Raises:
        ConfigError: the file, or a sweep of this name with another content.
    """
    spec = load_sweep(file, address=address)
    is_over = False
    if replace and spec.name in home.all_names():
        from orchestrator.commands.stop import replace_unmeasured  # few submits need it

        replace_unmeasured(spec.name, home)
    if spec.name in home.sweeps():
        state = home.read(spec.name, begun=True).state
        _check_same(state, spec)
        is_over = state.is_over
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
    )


def _check_same(state: SweepState, spec: SweepSpec) -> None:
    """Refuse another content under the same name; where nothing was measured under it, it can be begun anew."""
    try:
        check_same(state.sweep, spec)
    except ConfigError as error:
        if state.best is None:
            error.remedy = f"{error.remedy} It measured nothing: --replace begins it anew."
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


def _mode(asked: Mode | None, address: str | None, *, is_over: bool) -> Mode:
    if is_over:
        return "foreground"
    return asked or ("foreground" if address is None else "ray job")


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
        started = background.detach(submission.supervised(), submission.home, submission.name, show=show)
        return StartedSubmission(
            sweep=submission.name,
            mode="detached",
            address=submission.address,
            exit_code=started.exit_code,
            log=started.log,
        )
    return _submit_job(submission, show)


def _submit_job(submission: Submission, show: Callable[[str], None]) -> StartedSubmission:
    from cluster.ray.head import dashboard_url
    from cluster.ray.jobs import submit_job

    assert submission.address is not None
    url = dashboard_url(submission.address)
    mark = background.leave_mark(submission.home, submission.name)
    job = submit_job(
        url,
        f"tune-cluster-{submission.name}",
        submission.supervised(),
        env=background.job_environment(mark),
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
            return status.exit_code if status.exit_code is not None else EXIT_USER
        if background.is_under_way(submission.home, submission.name, lambda about: about.job == job.submission_id):
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
        return background.follow_detached(home, started.sweep, started.log)
    if started.job is not None and started.address is not None:
        return background.job_log(started.address, started.job, follow=True)
    return background.controller_log(home, started.sweep, follow=True)
