"""Controllers as Ray Jobs: they run on the cluster's head, independent of the host that submitted them.

Job ids are ``<name>-<n>``, numbered per ``name``. Only the last of a name can be running, and submitting meanwhile
attaches to it. Everyone with access to the cluster can read what Ray stores of a job, so no secret is ever part of it.
A controller reads its secrets from the head's own environment or files.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import re
import shlex
import time
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobSubmissionClient

from cluster.base import ClusterError
from cluster.ray.connection import TOKEN_REMEDY, dashboard_url, environment, first_line
from trials.secrets import is_secret_name

logger = logging.getLogger(__name__)
logging.getLogger("ray.dashboard.modules.job.sdk").setLevel(logging.WARNING)
logging.getLogger("ray.dashboard.modules.dashboard_sdk").setLevel(logging.WARNING)

JobState = Literal["pending", "running", "succeeded", "failed", "stopped"]

_STATES: dict[str, JobState] = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "FAILED": "failed",
    "STOPPED": "stopped",
}

REQUEST_TIMEOUT_S = 60.0
"""Time limit of a request, in seconds. The first one to a head may wait for its agent to start."""
STOP_TIMEOUT_S = 30
"""Seconds between stopping a job through Ray (SIGTERM) and Ray's SIGKILL."""
MAX_TRIES = 5
"""Attempts to submit under the next free id, which others may take at the same time."""
FOLLOW_OUTAGE_S = 120.0
"""Time without an answer from the head, in seconds, after which following a log ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHandle:
    """A job of a cluster."""

    url: str
    """Address of the head's dashboard, without a path."""
    submission_id: str
    attached: bool = False
    """Whether the job was already running when requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Ray's status of a job."""

    state: JobState
    message: str
    exit_code: int | None = None
    """Exit code of its process; None while it runs, or if unknown to Ray."""

    @property
    def is_over(self) -> bool:
        return self.state not in ("pending", "running")


def submit_job(
    address: str,
    name: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    id_variable: str = "TUNE_CLUSTER_JOB",
    metadata: Mapping[str, str] | None = None,
) -> JobHandle:
    """Run ``argv`` on the head as the next job of ``name``, or attach to the last one if it is still running.

    Args:
        address: ``HOST:PORT`` of the head, or ``http(s)://HOST:PORT`` of its dashboard.
        env: additions to the head's environment for the process; world-readable.
        id_variable: variable that holds the job's id in the process.
        metadata: jobs of this name with other metadata belong to another user, and are not attached to.

    Raises:
        ClusterError: no answer, the token is missing or wrong, or the head has no dashboard.
        ValueError: ``env`` contains the name of a secret.
    """
    if secret := [key for key in env or {} if is_secret_name(key)]:
        raise ValueError(
            f"{secret[0]} is named like a secret, and the environment of a job is readable by all users of the cluster"
        )
    with _connected(address) as client:
        for _ in range(MAX_TRIES):
            jobs = _jobs_of(client, name)
            for number, job in jobs.items():
                if not _status(job).is_over and job.metadata == dict(metadata or {}):
                    return JobHandle(url=client.url, submission_id=f"{name}-{number}", attached=True)
            submission_id = f"{name}-{max(jobs, default=0) + 1}"
            variables = {**(env or {}), id_variable: submission_id}
            entrypoint = shlex.join(["exec", "env", *(f"{key}={value}" for key, value in variables.items()), *argv])
            if _submit(client, submission_id, entrypoint, metadata):
                return JobHandle(url=client.url, submission_id=submission_id)
    raise ClusterError(f"{name} is being submitted to {address} by another process; retry in a minute")


def find_job(address: str, submission_id: str) -> JobHandle:
    """Return the job with this id.

    Raises:
        ClusterError: as :func:`submit_job`, or the job does not exist, as after a restart of the head.
    """
    with _connected(address) as client:
        _details(client, submission_id)
        return JobHandle(url=client.url, submission_id=submission_id, attached=True)


def job_status(job: JobHandle) -> JobStatus:
    """Return the job's present status.

    Raises:
        ClusterError: as :func:`find_job`.
    """
    with _connected(job.url) as client:
        return _status(_details(client, job.submission_id))


def job_logs(job: JobHandle, *, follow: bool = False) -> Iterator[str]:
    """Yield the job's output in pieces; with ``follow``, until it ends.

    Raises:
        ClusterError: as :func:`find_job`; when following, only after ``FOLLOW_OUTAGE_S`` without an answer.
    """
    if follow:
        yield from _follow(job)
        return
    with _connected(job.url) as client:
        _details(client, job.submission_id)
        yield client.get_job_logs(job.submission_id)


class _Client(JobSubmissionClient):
    """Ray's client with a time limit: it would wait forever for a host that stopped answering."""

    def __init__(self, url: str) -> None:
        self.url = url
        super().__init__(url)
        self._ssl_context: Any = True  # same as None in older aiohttp

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        return super()._do_request(method, endpoint, timeout=REQUEST_TIMEOUT_S, allow_redirects=False, **options)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[_Client]:
    """Yield a client. Connection errors within the context become ClusterErrors."""
    url = dashboard_url(address)
    core: Any = importlib.import_module("ray._raylet")  # mostly unannotated
    try:
        core.AuthenticationTokenLoader.instance().has_token()  # raises if a required token is missing
        # Ray would prefer these to the given address.
        with environment({"RAY_ADDRESS": "", "RAY_API_SERVER_ADDRESS": ""}):
            client = _Client(url)
        yield client
    except AuthenticationError:
        raise ClusterError(f"the Ray dashboard at {url} does not accept this token; {TOKEN_REMEDY}") from None
    except (ConnectionError, requests.ConnectionError, requests.Timeout) as error:
        raise ClusterError(
            f"no Ray dashboard responds at {url} ({type(error).__name__}); check that the head and its "
            "dashboard are running"
        ) from None
    except (RuntimeError, requests.RequestException) as error:
        if isinstance(error, ClusterError):
            raise
        raise ClusterError(f"the Ray dashboard at {url} refused the request: {first_line(error)}") from None


def _submit(client: _Client, submission_id: str, entrypoint: str, metadata: Mapping[str, str] | None) -> bool:
    """Submit the job; return whether the id was still free."""
    try:
        client.submit_job(
            entrypoint=entrypoint,
            submission_id=submission_id,
            metadata=dict(metadata or {}),
            runtime_env={"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_TIMEOUT_S)}},
        )
    except RuntimeError as error:
        if "already exists" in str(error):
            return False
        raise
    return True


def _jobs_of(client: _Client, name: str) -> dict[int, JobDetails]:
    """Return the jobs of this name, by number."""
    pattern = re.compile(rf"{re.escape(name)}-(\d{{1,9}})")
    found = ((pattern.fullmatch(job.submission_id or ""), job) for job in client.list_jobs())
    return {int(match[1]): job for match, job in found if match}


def _details(client: _Client, submission_id: str) -> JobDetails:
    try:
        return client.get_job_info(submission_id)
    except RuntimeError as error:
        if "status code 404" in str(error):
            raise ClusterError(f"the Ray cluster at {client.url} has no job {submission_id}") from None
        raise


def _status(job: JobDetails) -> JobStatus:
    return JobStatus(state=_STATES[job.status.value], message=job.message or "", exit_code=job.driver_exit_code)


def _follow(job: JobHandle) -> Iterator[str]:
    """Yield the growing log; continue at the same place after an outage."""
    num_seen, answered_s = 0, time.monotonic()
    while True:
        skipped = 0
        try:
            with _connected(job.url) as client, contextlib.closing(_tail(client, job.submission_id)) as pieces:
                for piece in pieces:
                    answered_s = time.monotonic()
                    new = piece[max(0, num_seen - skipped) :]
                    skipped += len(piece)
                    num_seen += len(new)
                    if new:
                        yield new
            if job_status(job).is_over:
                return
        except ClusterError:
            if time.monotonic() - answered_s > FOLLOW_OUTAGE_S:
                raise
            logger.warning(
                "no response from %s; the job continues, and its log follows when the dashboard responds", job.url
            )
        time.sleep(1.0)


def _tail(client: _Client, submission_id: str) -> Generator[str, None, None]:
    """Yield the growing log from Ray's asynchronous iterator, for callers without an event loop."""
    _details(client, submission_id)
    pieces: AsyncIterator[str] = client.tail_job_logs(submission_id)
    with asyncio.Runner() as runner:
        while True:
            try:
                yield runner.run(_next(pieces))
            except StopAsyncIteration:
                return
            except aiohttp.ClientError as error:
                raise ConnectionError(first_line(error)) from None


async def _next(pieces: AsyncIterator[str]) -> str:
    return await anext(pieces)
