"""Prior knowledge of a sweep: the hardware of a cluster, and dry runs of candidates."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path

from cluster.base import ClusterRequest, Excluded, Simulation
from cluster.connect import describe
from cluster.hardware.topology import Topology
from cluster.probing import Profile
from cluster.processes import python_module
from cluster.queue import Claim, QueuePolicy
from orchestrator import process_support
from orchestrator.config.queue_policy import load_policy
from orchestrator.config.sweep import SweepSpec
from orchestrator.errors import ConfigError
from orchestrator.frameworks.shell import VARIABLES, assignments
from orchestrator.process_support import user_name
from orchestrator.space.rules import Case, Rule
from orchestrator.sweep.snapshot import Home
from orchestrator.units import num_bytes
from trials.accelerator.kinds import DeviceKind, without_devices
from trials.dryrun.estimate import (
    COMMUNICATOR_BYTES,
    CUDA_CONTEXT_BYTES,
    FRAGMENTATION,
    HOST_FRAGMENTATION,
    VERSION,
    DryRunEstimate,
    DryRunRequest,
    Mode,
    RankRun,
    Reply,
    RunFailure,
    StageEstimate,
    num_communicators,
)
from trials.dryrun.small import StagePlan, UnknownOrderError, plan_small_runs
from trials.files import CodecError, digest, from_json, make_private_folder, to_json, write_atomically
from trials.spec import Candidate, TrialSpec, Workload

# ---- Hardware for planning: the cluster request of a sweep file, and profiles of probes
#
# Reads sweep files and the home, and describes clusters without starting one.

logger = logging.getLogger(__name__)

MACHINE = ("accelerator", "deviation", "slow_nodes", "seed")
"""Keys of section ``simulation`` that identify a simulated machine."""


def profile_key(spec: SweepSpec, topology: Topology) -> str:
    """Return the key of a hardware's profile; all nodes of a cluster have the same key."""
    first, versions, simulation = topology.nodes[0], fingerprint(topology), spec.cluster.simulation
    return digest(
        {
            "address": spec.cluster.address,
            "simulation": {name: getattr(simulation, name) for name in MACHINE} if simulation else None,
            "device": [first.device_kind, first.device_name, first.num_devices, first.threads_per_device],
            "software": [versions["torch"], versions["driver"], *map(list, sorted(spec.cluster.env.items()))],
        }
    )[:32]


@dataclass(frozen=True, slots=True)
class HardwareProfileStore:
    """Profiles of clusters, one JSON file per key in ``folder``."""

    folder: Path

    @classmethod
    def of(cls, home: Home) -> HardwareProfileStore:
        return cls(home.profiles)

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def get(self, key: str) -> Profile | None:
        """Return the profile, or None; an unreadable file counts as missing."""
        path = self.path(key)
        try:
            return from_json(Profile, json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, CodecError, OSError) as error:
            logger.warning("ignored the profile %s: %s; probe again", path, error)
            return None

    def add(self, key: str, measured: Profile) -> Profile:
        """Save new measurements with other nodes' earlier rates, atomically."""
        known = self.get(key)
        profile = measured if known is None else known.updated(measured)
        make_private_folder(self.folder)
        write_atomically(self.path(key), [json.dumps(to_json(profile), indent=1).encode()])
        return profile


def load_profile(spec: SweepSpec, topology: Topology | None, home: Home) -> Profile | None:
    """Return the probe's measurements of the nodes of ``topology``; None if none of them was probed."""
    if topology is None:
        return None
    known = HardwareProfileStore.of(home).get(profile_key(spec, topology))
    found = known.only({node.name for node in topology.nodes}) if known is not None else None
    return found if found is not None and found.measured else None


_PACKAGES = ("torch", "ray", "optuna", "mlflow", "tune-cluster")


def fingerprint(topology: Topology, virtual: str = "", env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return names and versions of hardware and software. Measurements are comparable only if these are equal.

    Args:
        virtual: distinguishes simulated clusters; empty for a real one.
        env: environment variables from the sweep file for all ranks.
    """
    first = topology.nodes[0]
    versions = {package: _version(package) for package in _PACKAGES}
    return {
        **versions,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "driver": _driver_version(),
        "hardware": topology.label,
        "device_memory_bytes": str(first.device_memory_bytes),
        "threads_per_device": str(first.threads_per_device),
        **({"virtual": virtual} if virtual else {}),
        **({VARIABLES: assignments(env)} if env else {}),
    }


def _version(package: str) -> str:
    """Return the installed version, if any: plans and reports do not require all packages."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _driver_version() -> str:
    path = Path("/sys/module/nvidia/version")
    return path.read_text(encoding="ascii").strip() if path.exists() else "none"


# The cluster request of a sweep file, and its hardware, if known without starting anything

logger = logging.getLogger(__name__)


def cluster_request(spec: SweepSpec, home: Home | None = None, *, address: str | None = None) -> ClusterRequest:
    """Return the cluster request of a sweep file.

    Args:
        home: has the profiles with slow nodes, and the rules of the queue; None: without both.
        address: the Ray cluster's, instead of the one in the file.

    Raises:
        ConfigError: the home's ``queue.yaml`` cannot be used.
    """
    cluster = spec.cluster
    simulation = cluster.simulation
    least, most = cluster.nodes
    shared_by = home if cluster.kind in ("ray", "local") else None
    return ClusterRequest(
        kind=cluster.kind,
        address=(address or cluster.address) if cluster.kind == "ray" else None,
        min_nodes=least,
        max_nodes=most,
        devices_per_node=cluster.devices_per_node,
        device=cluster.device,
        device_memory_bytes=cluster.device_memory_bytes,
        env=cluster.env,
        simulation=Simulation(**simulation.model_dump()) if simulation else None,
        excluded=_excluded(spec, home),
        claim=_claim(spec, shared_by) if shared_by is not None else None,
        policy=load_policy(shared_by) if shared_by is not None else QueuePolicy(),
        queue_folder=process_support.host_queue(shared_by.path) if shared_by is not None else None,
        max_wait_s=cluster.max_wait_s,
    )


def _claim(spec: SweepSpec, home: Home) -> Claim:
    least, most = spec.cluster.nodes
    return Claim(
        sweep=spec.name,
        user=user_name(),
        queue=spec.cluster.queue,
        priority=spec.cluster.priority,
        min_nodes=least,
        max_nodes=most,
        devices_per_node=spec.cluster.devices_per_node or 1,
        submitted_at_s=time.time(),
        home=f"{socket.gethostname()}:{home.path.resolve()}",
    )


def _excluded(spec: SweepSpec, home: Home | None) -> Excluded | None:
    """Return a function from a lease to its nodes that the file excludes; None if it excludes none."""
    cluster = spec.cluster
    if not cluster.exclude_nodes and not cluster.exclude_slow_nodes:
        return None

    def names(topology: Topology) -> frozenset[str]:
        leased = {node.name for node in topology.nodes}
        holds_others = cluster.kind == "ray" and cluster.address is not None
        if (unknown := sorted(set(cluster.exclude_nodes) - leased)) and not holds_others:
            logger.warning("cluster.exclude_nodes contains %s, which is not among the leased nodes", ", ".join(unknown))
        slow = _slow_nodes(spec, topology, home) if cluster.exclude_slow_nodes and home is not None else ()
        return frozenset(leased & {*cluster.exclude_nodes, *slow})

    return names


def _slow_nodes(spec: SweepSpec, topology: Topology, home: Home) -> tuple[str, ...]:
    profile = HardwareProfileStore.of(home).get(profile_key(spec, topology))
    if profile is None:
        logger.warning("cluster.exclude_slow_nodes: no profile of this cluster; run `tune-cluster probe` to create one")
        return ()
    return profile.unfit


def known_topology(spec: SweepSpec, home: Home | None = None, *, address: str | None = None) -> Topology | None:
    """Return the most nodes of the sweep; None if only the cluster knows them.

    Args:
        address: the Ray cluster's, instead of the one in the file.

    Raises:
        ConfigError: as :func:`cluster_request`.
        ClusterError: this host does not have the requested resources.
    """
    return describe(cluster_request(spec, home, address=address))


def device_kind(spec: SweepSpec, topology: Topology | None) -> DeviceKind:
    """Return the trials' kind of device: from the file, else the existing one, else GPUs."""
    if spec.cluster.device != "auto":
        return spec.cluster.device
    return "cuda" if topology is None else topology.nodes[0].device_kind


def memory_limit_bytes(spec: SweepSpec, topology: Topology | None) -> int | None:
    """Return the device memory of a rank: from the file, else that of the smallest GPU; None if unknown. Ranks on CPUs
    share the host's memory, so they have no limit."""
    if spec.cluster.device_memory_bytes is not None or topology is None:
        return spec.cluster.device_memory_bytes
    return min((node.device_memory_bytes for node in topology.nodes if node.device_kind != "cpu"), default=None)


# ---- Dry runs of candidates: simulated without hardware, cached, and the rule based on them
#
# Decides which ranks to simulate, with how few layers, and what is already cached. Torch runs only in a separate
# process.

# Dry runs cached on disk, by their inputs


def cache_key(workload: Workload, candidate: Candidate, *, mode: Mode, exact: bool) -> str:
    """Return the key of an estimate, from all its inputs: those shared by a sweep's trials, and the candidate."""
    return f"{_shared_key(workload, mode=mode, exact=exact)}.{candidate.config_key}"


def _shared_key(workload: Workload, *, mode: Mode, exact: bool) -> str:
    """Return the digest of a sweep's shared inputs, including the versions of torch and of the simulation."""
    shared = {"workload": workload, "mode": mode, "exact": exact, "torch": _torch_version(), "dryrun": VERSION}
    return digest(shared)[:32]


def _torch_version() -> str:
    """Return the installed version of torch; empty if not installed."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class DryRunCache:
    """One JSON file per estimate in ``folder``, with its candidate; several processes may share it."""

    folder: Path

    def get(self, key: str) -> DryRunEstimate | None:
        """Return the estimate, or None; an unreadable file counts as missing."""
        found = self._read(self._path(key))
        return found[1] if found is not None else None

    def of_workload(self, workload: Workload, *, mode: Mode, exact: bool) -> Iterator[tuple[Candidate, DryRunEstimate]]:
        """Yield all estimates of a workload, with one listing of the folder, and one read per estimate."""
        for path in sorted(self.folder.glob(f"{_shared_key(workload, mode=mode, exact=exact)}.*.json")):
            if (found := self._read(path)) is not None:
                yield found

    def put(self, key: str, candidate: Candidate, estimate: DryRunEstimate) -> None:
        """Save it atomically."""
        make_private_folder(self.folder)
        body = {"candidate": to_json(candidate), "estimate": to_json(estimate)}
        write_atomically(self._path(key), [json.dumps(body).encode()])

    @staticmethod
    def _read(path: Path) -> tuple[Candidate, DryRunEstimate] | None:
        try:
            body = json.loads(path.read_text())
            return from_json(Candidate, body["candidate"]), from_json(DryRunEstimate, body["estimate"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, CodecError, OSError) as error:
            logger.warning("ignored %s: %s", path, error)
            return None

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json"


# Cached estimates of dry runs, and the rule that rejects candidates that do not fit into memory

RULE_ID = "dryrun-memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunEstimates:
    """Estimates of a sweep's candidates, with the device memory to compare with."""

    by_candidate: Mapping[Candidate, DryRunEstimate] = field(default_factory=dict)
    limit_bytes: int | None = None
    """Device memory; None if unknown."""
    context_bytes: int = 0
    """Device memory of an idle process."""
    communicator_bytes: int = 0
    """Additional device memory of each communicator."""

    host_limit_bytes: int | None = None
    """Host memory of the smallest node; None if unknown, or if the devices are CPUs."""
    ranks_per_node: int = 1
    """Most ranks that share it."""
    devices_are_host: bool = False
    """Whether ranks compute on CPUs, where offloading saves no memory."""

    def needed_bytes(self, candidate: Candidate) -> int:
        """Return a candidate's estimated peak, with a margin for fragmentation and non-tensor memory."""
        others = self.context_bytes + self.communicator_bytes * num_communicators(candidate.layout)
        estimate = self.by_candidate[candidate]
        return estimate.needed_bytes(FRAGMENTATION, others) + estimate.host_bytes * self.devices_are_host

    def to_json(self, candidate: Candidate) -> dict[str, int]:
        """Return peak and need of the candidate; empty without a dry run."""
        estimate = self.by_candidate.get(candidate)
        if estimate is None:
            return {}
        predicted = {
            "predicted_peak_bytes": estimate.peak_bytes,
            "predicted_needed_bytes": self.needed_bytes(candidate),
        }
        return predicted | ({"predicted_host_bytes": estimate.host_bytes} if estimate.host_bytes else {})

    def rule(self, baseline: Candidate) -> Rule:
        """Return a rule that rejects candidates that do not fit, but never the baseline, which is known to run."""

        def check(case: Case) -> str | None:
            return None if case.candidate == baseline else self._problem(case.candidate)

        return Rule(id=RULE_ID, check=check, concerns=self.by_candidate.keys())

    def _problem(self, candidate: Candidate) -> str | None:
        estimate = self.by_candidate.get(candidate)
        if estimate is None:
            return None
        return self._device_problem(candidate, estimate) or self._host_problem(candidate, estimate)

    def _host_problem(self, candidate: Candidate, estimate: DryRunEstimate) -> str | None:
        num_ranks = min(self.ranks_per_node, candidate.layout.world_size)
        needed = round(estimate.host_bytes * (1.0 + HOST_FRAGMENTATION))
        if self.host_limit_bytes is None or needed * num_ranks <= self.host_limit_bytes:
            return None
        each, limit = num_bytes(needed), num_bytes(self.host_limit_bytes)
        return (
            f"predicted {each} of host memory, with margin, on each of {num_ranks} ranks of a node exceeds its {limit}"
        )

    def _device_problem(self, candidate: Candidate, estimate: DryRunEstimate) -> str | None:
        needed = self.needed_bytes(candidate)
        if self.limit_bytes is None or estimate.is_upper_bound or needed <= self.limit_bytes:
            return None
        peak, margin = num_bytes(estimate.peak_bytes), num_bytes(needed - estimate.peak_bytes)
        return f"predicted peak {peak} with margin {margin} exceeds device memory {num_bytes(self.limit_bytes)}"


def load_estimates(spec: SweepSpec, topology: Topology | None, cache: DryRunCache) -> DryRunEstimates:
    """Return cached estimates for the workload on its trials' kind of device; exact simulations take precedence."""
    if spec.script is not None:  # programs cannot be simulated
        return DryRunEstimates()
    kind = device_kind(spec, topology)
    nodes = () if topology is None or kind == "cpu" else topology.nodes
    mode: Mode = "cpu" if kind == "cpu" else "accelerator"
    workload = spec.to_workload()
    found = {
        candidate: estimate
        for exact in (False, True)
        for candidate, estimate in cache.of_workload(workload, mode=mode, exact=exact)
    }
    return DryRunEstimates(
        by_candidate=found,
        limit_bytes=memory_limit_bytes(spec, topology),
        host_limit_bytes=min((node.host_memory_bytes for node in nodes if node.host_memory_bytes), default=None),
        ranks_per_node=max((node.num_devices for node in nodes), default=1),
        devices_are_host=mode == "cpu",
        context_bytes=0 if mode == "cpu" else CUDA_CONTEXT_BYTES,
        communicator_bytes=0 if mode == "cpu" else COMMUNICATOR_BYTES,
    )


# Dry runs: estimate the memory of candidates without hardware, from one simulated rank per pipeline stage

TIMEOUT_S = 600.0
"""Time limit of one simulation, in seconds; the largest take a minute."""

Progress = Callable[[int, int], None]
"""Called with the number of simulations done and their total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stage:
    """A pipeline stage's simulations, by their numbers in the batch."""

    stage: int
    rank: int
    plan: StagePlan | None
    numbers: tuple[int, ...]


class _Batch:
    """Unique requests: stages and candidates share small trials."""

    def __init__(self, mode: Mode, *, crowded: bool) -> None:
        self._mode: Mode = mode
        self._crowded = crowded
        self._numbers: dict[tuple[TrialSpec, int], int] = {}

    @property
    def requests(self) -> list[DryRunRequest]:
        return [
            DryRunRequest(spec=spec, rank=rank, mode=self._mode, crowded=self._crowded) for spec, rank in self._numbers
        ]

    def plan(self, spec: TrialSpec, *, exact: bool) -> list[_Stage]:
        """Add the simulations that the trial needs."""
        plans = None if exact else plan_small_runs(spec)
        stages = []
        for stage in range(spec.candidate.layout.pp):
            plan = None if plans is None else plans[stage]
            small, at = ((spec,), stage) if plan is None else (plan.specs, plan.small.stage)
            numbers = tuple(self._number(one, representative_rank(one.candidate, at)) for one in small)
            rank = representative_rank(spec.candidate, stage)
            stages.append(_Stage(stage=stage, rank=rank, plan=plan, numbers=numbers))
        return stages

    def _number(self, spec: TrialSpec, rank: int) -> int:
        return self._numbers.setdefault((spec, rank), len(self._numbers))


def estimate_all(
    workload: Workload,
    candidates: Sequence[Candidate],
    *,
    mode: Mode = "accelerator",
    exact: bool = False,
    crowded: bool = False,
    cache: DryRunCache | None = None,
    progress: Progress | None = None,
) -> list[DryRunEstimate | RunFailure]:
    """Simulate every candidate, one rank per pipeline stage; a failure does not affect others. Results go to ``cache``
    at once, so that an interruption loses little.

    ``exact`` simulates all layers, micro-batches and stages instead of extrapolating from a few. ``crowded`` is the
    worst case of expert parallelism, see :class:`~trials.dryrun.estimate.DryRunRequest`; it is not cached.

    Raises:
        ConfigError: when nothing can be simulated on this machine.
    """
    cache = None if crowded else cache
    keys = [cache_key(workload, candidate, mode=mode, exact=exact) for candidate in candidates]
    known = {key: found for key in keys if cache is not None and (found := cache.get(key)) is not None}
    by_key = dict(zip(keys, candidates, strict=True))
    results: dict[str, DryRunEstimate | RunFailure] = dict(known)
    missing = {key: candidate for key, candidate in by_key.items() if key not in known}
    strange: dict[str, Candidate] = {}
    for key, made in _estimates(workload, missing, mode=mode, exact=exact, crowded=crowded, progress=progress):
        if made is None:
            strange[key] = by_key[key]
            continue
        results[key] = made
        if cache is not None and isinstance(made, DryRunEstimate):
            cache.put(key, by_key[key], made)
    if strange:  # this version of torch runs the schedule in a different order
        made_exactly = estimate_all(workload, [*strange.values()], mode=mode, exact=True, crowded=crowded)
        results |= zip(strange, made_exactly, strict=True)
    return [results[key] for key in keys]


def _estimates(
    workload: Workload,
    candidates: Mapping[str, Candidate],
    *,
    mode: Mode,
    exact: bool,
    crowded: bool,
    progress: Progress | None,
) -> Iterator[tuple[str, DryRunEstimate | RunFailure | None]]:
    """Yield each candidate's estimate once it is available; None if extrapolation is impossible."""
    batch = _Batch(mode, crowded=crowded)
    missing = {
        key: batch.plan(TrialSpec(workload=workload, candidate=candidate), exact=exact)
        for key, candidate in candidates.items()
    }
    for replies in _simulate(batch.requests, progress):
        for key in [key for key, stages in missing.items() if _is_complete(stages, replies)]:
            yield key, _combine(missing.pop(key), replies)


def representative_rank(candidate: Candidate, stage: int) -> int:
    """Return the rank to simulate for a stage: the first on every other axis, whose ranks are equivalent."""
    return stage * (candidate.layout.world_size // candidate.layout.pp)


def _is_complete(stages: list[_Stage], replies: dict[int, Reply]) -> bool:
    return all(number in replies for stage in stages for number in stage.numbers)


def _combine(stages: list[_Stage], replies: dict[int, Reply]) -> DryRunEstimate | RunFailure | None:
    runs: dict[int, RankRun] = {}
    for number in sorted({number for stage in stages for number in stage.numbers}):
        reply = replies[number]
        if reply.run is None:
            return reply.failure
        runs[number] = reply.run
    try:
        made = [_of_stage(stage, [runs[number] for number in stage.numbers]) for stage in stages]
    except UnknownOrderError:
        return None
    extrapolated = any(stage.plan is not None for stage in stages)
    return DryRunEstimate(stages=tuple(made), extrapolated=extrapolated, cpu_s=sum(run.cpu_s for run in runs.values()))


def _of_stage(stage: _Stage, runs: Sequence[RankRun]) -> StageEstimate:
    run = runs[0] if stage.plan is None else stage.plan.extrapolate(runs)
    return StageEstimate.of_run(stage.stage, replace(run, rank=stage.rank))


def _simulate(requests: list[DryRunRequest], progress: Progress | None) -> Iterator[dict[int, Reply]]:
    """Yield the replies by request number, after each new one."""
    replies: dict[int, Reply] = {}
    if not requests:
        return
    report_progress = progress or _ignore_progress
    report_progress(0, len(requests))
    for index, reply in _batch(requests):
        replies[index] = reply
        report_progress(len(replies), len(requests))
        yield replies


def _batch(requests: list[DryRunRequest]) -> Iterator[tuple[int, Reply]]:
    """Run the batch in a separate interpreter.

    Raises:
        ConfigError: it exited before all replies arrived; the message has its last output.
    """
    body = {
        "requests": [to_json(request) for request in requests],
        "timeout_s": TIMEOUT_S,
        "max_children": os.cpu_count() or 1,
    }
    num_replies = 0
    with tempfile.TemporaryFile("w+") as words, tempfile.TemporaryFile("w+") as requested:
        json.dump(body, requested)
        requested.seek(0)
        command = python_module("trials.dryrun")
        environment = without_devices(os.environ)
        with subprocess.Popen(
            command, stdin=requested, stdout=subprocess.PIPE, stderr=words, text=True, env=environment
        ) as process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    answer = json.loads(line)
                    num_replies += 1
                    yield answer["index"], from_json(Reply, answer["reply"])
            finally:
                if num_replies < len(requests):
                    process.terminate()  # it ends its children first
        if num_replies < len(requests):
            words.seek(0)
            raise ConfigError(
                f"the dry run exited early with status {process.returncode}: {_last(words.read())}",
                remedy="Check that torch is installed and that there is enough memory.",
            )


def _ignore_progress(_done: int, _total: int) -> None:
    pass


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"
