"""Before a sweep: its plan, dry runs of its candidates, a probe of its cluster."""

from __future__ import annotations

import functools
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from cluster.base import ClusterError
from cluster.connect import connect
from cluster.hardware.topology import CatalogueError, Topology, load_cluster, uniform_topology
from cluster.probing import NodeRates, Profile, probe
from cluster.probing import Progress as probing_Progress
from orchestrator.config.settings import ByteSize
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.config.yaml_source import YamlSource, parse_yaml, to_config_error
from orchestrator.errors import ConfigError
from orchestrator.planning.dry_runs import (
    DryRunCache,
    DryRunEstimates,
    HardwareProfileStore,
    Progress,
    cluster_request,
    device_kind,
    estimate_all,
    known_topology,
    load_estimates,
    load_profile,
    memory_limit_bytes,
    profile_key,
)
from orchestrator.planning.planner import BalanceProgress, Plan, make_plan
from orchestrator.planning.predictions import (
    CandidateExplanation,
    PlanPredictions,
    UsualRanking,
    explain,
    predict_plan,
    rank_usual,
)
from orchestrator.search.predictor import MAX_CANDIDATES, UnpredictableError
from orchestrator.space.knobs import roles_of
from orchestrator.space.notation import describe, short_name
from orchestrator.sweep.snapshot import Home
from orchestrator.units import count
from trials.accelerator.kinds import DeviceKind
from trials.dryrun.estimate import FRAGMENTATION, DryRunEstimate, Mode, RunFailure, context_bytes
from trials.files import fields_json, to_json
from trials.reports import Link
from trials.spec import Candidate, Workload

# ``tune-cluster plan``: the plan of a file with its predictions, and the explanation of one candidate.


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """The plan of a sweep file, with its predictions."""

    plan: Plan
    predictions: PlanPredictions | None
    """Predictions of the cost model; None if there are none."""
    unpredicted: str
    """Why there are no predictions; empty if there are."""
    usual: UsualRanking | None
    """Typical effects of the candidates' knobs, if there are no predictions."""
    explanation: CandidateExplanation | None
    """The explanation of the requested candidate."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``plan --json``."""
        body = {
            **self.plan.to_json(),
            "forecast": self.predictions.to_json() if self.predictions else None,
            "unpredicted": self.unpredicted,
            "usual": self.usual.to_json() if self.usual else None,
        }
        return body if self.explanation is None else {**body, "explanation": self.explanation.to_json()}


def plan_file(
    file: Path,
    home: Home,
    *,
    why: str | None = None,
    cluster: str | None = None,
    progress: BalanceProgress | None = None,
) -> PlannedFile:
    """The candidates of the file, for hardware that can be determined without starting anything.

    Args:
        why: the candidate to explain, see :func:`orchestrator.planning.predictions.find`.
        cluster: name or file of a cluster description to plan for instead of the file's own cluster.
        progress: receives how many layouts have been balanced, and of how many.

    Raises:
        ConfigError: the file, the candidate, or a cluster that is not described.
    """
    spec = load_sweep(file)
    topology = known_topology(spec, home) if cluster is None else described_topology(cluster)
    profile = load_profile(spec, topology, home) if cluster is None else None
    plan = make_plan(spec, topology, load_estimates(spec, topology, DryRunCache(home.dry_runs)), progress)
    explained = None if why is None else explain(why, plan, spec, topology, profile)
    predictions, unpredicted, usual = None, "", None
    try:
        predictions = predict_plan(plan, spec, topology, profile)
    except UnpredictableError as error:
        unpredicted = str(error)
        if len(plan.candidates) <= MAX_CANDIDATES:
            usual = rank_usual(
                plan, spec.to_workload(), topology, spec.to_objective(topology), roles_of(spec.custom_knobs)
            )
    return PlannedFile(plan=plan, predictions=predictions, unpredicted=unpredicted, usual=usual, explanation=explained)


def described_topology(name: str) -> Topology:
    """The nodes of a cluster in ``configs/clusters``, or in a file like those.

    Raises:
        ConfigError: the description does not exist.
    """
    try:
        described = load_cluster(name)
    except CatalogueError as error:
        raise ConfigError(
            str(error),
            key="--cluster",
            remedy="To use a file, pass its path, such as ./mine.yaml.",
        ) from None
    return uniform_topology(
        described.num_nodes,
        described.devices_per_node,
        device_name=described.accelerator.name,
        memory_bytes=int(described.accelerator.usable_memory_bytes),
    )


# ``tune-cluster dryrun``: chooses trials, estimates their memory, and compares it with the device's.


BASELINE = "baseline"
OPTION = "--trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunVerdict:
    """A trial's estimate, compared with the available memory."""

    name: str
    """The name given by the user, or its short name."""
    candidate: Candidate
    workload: Workload
    result: DryRunEstimate | RunFailure
    limit_bytes: int | None
    """Device memory; None if unknown."""
    fragmentation: float
    """Memory that the allocator reserves on top of live memory, as a fraction of it."""
    context_bytes: int
    """Memory of context and communicators on every device; 0 on CPUs."""
    crowded: DryRunEstimate | RunFailure | None = None
    """With ``ep``, the estimate if a rank's experts got all tokens of its peers; ``result`` assumes equal shares."""
    on_cpu: bool = False
    """Whether ranks compute on CPUs. A trial on CPUs measures the growth of its resident set, which is more than the
    tensors counted here."""

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None if the limit or the estimate is missing."""
        if self.limit_bytes is None or isinstance(self.result, RunFailure):
            return None
        return self.result.fits(self.limit_bytes, self.fragmentation, self.context_bytes)

    @property
    def failed(self) -> bool:
        """Whether there is no estimate."""
        return isinstance(self.result, RunFailure)

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``dryrun --json``."""
        body = {
            "trial": self.name,
            **describe(self.candidate),
            "world_size": self.candidate.layout.world_size,
            **fields_json(self, "limit_bytes", "fragmentation", "context_bytes"),
            "counts": "tensors" if self.on_cpu else "device memory",
            "fits": self.fits,
        }
        if isinstance(self.result, RunFailure):
            return {**body, "failure": to_json(self.result)}
        estimate = to_json(self.result)
        for stage, encoded in zip(self.result.stages, estimate["stages"], strict=True):
            encoded["needed_bytes"] = stage.needed_bytes(self.fragmentation, self.context_bytes)
        worst = {"crowded_bytes": self.crowded_bytes} if self.crowded_bytes is not None else {}
        return {**body, "estimate": estimate, **worst}

    @property
    def crowded_bytes(self) -> int | None:
        """Device memory needed if a rank's experts got all tokens of its peers; None without ``ep``."""
        if not isinstance(self.crowded, DryRunEstimate):
            return None
        return self.crowded.needed_bytes(self.fragmentation, self.context_bytes)


def refuse_programs(spec: SweepSpec) -> None:
    """Refuse to simulate a custom training program.

    Raises:
        ConfigError: the workload is one; the remedy names the alternative.
    """
    if spec.script is not None:
        message = "a custom training program cannot be simulated"
        raise spec.error(("workload",), message, "`tune-cluster check FILE` runs it for a few steps.")


def dry_run(
    file: Path,
    home: Home,
    *,
    trials: Sequence[str] = (),
    num_legal: int | None = None,
    max_device_memory: str | None = None,
    fragmentation: float = FRAGMENTATION,
    device: DeviceKind | None = None,
    exact: bool = False,
    progress: Progress | None = None,
) -> list[DryRunVerdict]:
    """Estimate trials of the sweep in ``file``: those named and the first ``num_legal`` candidates of its plan; the
    baseline when neither is given.

    Raises:
        ConfigError: for the file, an unknown or illegal trial, or a size without a unit.
    """
    spec = load_sweep(file)
    refuse_programs(spec)
    choices = TrialChoices(spec, home)
    topology = choices.topology
    chosen = [(name, choices.find(name)) for name in trials or (() if num_legal else (BASELINE,))]
    if num_legal:
        chosen += [(short_name(candidate), candidate) for candidate in choices.unfiltered[:num_legal]]
    kind = device or device_kind(spec, topology)
    limit_bytes = _limit_bytes(spec, topology, kind) if max_device_memory is None else _size(max_device_memory)
    mode: Mode = "cpu" if kind == "cpu" else "accelerator"
    workload = spec.to_workload()
    results = estimate_all(
        workload,
        [candidate for _, candidate in chosen],
        mode=mode,
        exact=exact,
        cache=DryRunCache(home.dry_runs),
        progress=progress,
    )
    split = list(dict.fromkeys(candidate for _, candidate in chosen if candidate.layout.ep > 1))
    made = estimate_all(workload, split, mode=mode, exact=exact, crowded=True, progress=progress)
    crowded = dict(zip(split, made, strict=True))
    return [
        DryRunVerdict(
            name=name,
            candidate=candidate,
            workload=workload,
            result=result,
            limit_bytes=limit_bytes,
            fragmentation=fragmentation,
            context_bytes=0 if mode == "cpu" else context_bytes(candidate.layout),
            crowded=crowded.get(candidate),
            on_cpu=mode == "cpu",
        )
        for (name, candidate), result in zip(chosen, results, strict=True)
    ]


def _limit_bytes(spec: SweepSpec, topology: Topology | None, kind: DeviceKind) -> int | None:
    """Device memory to compare with; this host's GPUs do not count for a dry run on another kind of device."""
    return memory_limit_bytes(spec, topology if kind == device_kind(spec, topology) else None)


class TrialChoices:
    """The trials of a sweep file that a user may name. Planning happens once, and only if needed.

    A dry run needs no hardware: if this host does not match the file, plans are made without hardware.
    """

    def __init__(self, spec: SweepSpec, home: Home) -> None:
        self._spec = spec
        self._home = home

    @functools.cached_property
    def topology(self) -> Topology | None:
        """Hardware of the sweep; None if it is unknown before the cluster is reached, or this host does not match."""
        try:
            return known_topology(self._spec, self._home)
        except ClusterError:
            return None

    @functools.cached_property
    def numbered(self) -> Sequence[Candidate]:
        """Candidates as ``tune-cluster plan`` numbers them from 1: without those that earlier dry runs rule out."""
        return self._plan(load_estimates(self._spec, self.topology, DryRunCache(self._home.dry_runs))).candidates

    @functools.cached_property
    def unfiltered(self) -> Sequence[Candidate]:
        """Candidates whose layouts fit on this hardware, regardless of earlier dry runs."""
        return self._plan().candidates

    @functools.cached_property
    def _by_name(self) -> dict[str, Candidate]:
        """Candidates by their short names, those too large for this hardware included."""
        return {short_name(candidate): candidate for candidate in make_plan(self._spec).candidates}

    def find(self, name: str) -> Candidate:
        """The candidate that ``name`` means: ``baseline``, a number or short name of the plan, or knobs to change in
        the baseline, like ``{tp: 8, pp: 4}``. A name may also be that of a candidate too large for this hardware.

        Raises:
            ConfigError: it means none, or one that breaks a rule.
        """
        if name == BASELINE:
            return self._spec.baseline_candidate
        if name.lstrip().startswith("{"):
            return changed_baseline(self._spec, name)
        found = self._numbered(name) if name.isdecimal() else self._by_name.get(name)
        if found is None:
            raise ConfigError(
                f"no candidate {_shown(name)} in the plan ({count(len(self.numbered), 'candidate')})",
                key=OPTION,
                remedy="Pass 'baseline', a number or name listed by `tune-cluster plan`, or knobs such as '{tp: 2}'.",
            )
        return found

    def _numbered(self, name: str) -> Candidate | None:
        is_there = len(name) < 10 and 1 <= int(name) <= len(self.numbered)
        return self.numbered[int(name) - 1] if is_there else None

    def _plan(self, known: DryRunEstimates | None = None) -> Plan:
        """The plan for this hardware; without hardware if nothing could run on it."""
        try:
            return make_plan(self._spec, self.topology, known)
        except ConfigError:
            return make_plan(self._spec)


def changed_baseline(spec: SweepSpec, text: str) -> Candidate:
    """The baseline with the knobs of a YAML mapping, read as strictly as a sweep file.

    Raises:
        ConfigError: naming the knob, or the rule broken.
    """
    knobs = _read_knobs(text)
    data = spec.to_json()
    data["baseline"] = {**data["baseline"], **knobs}
    source = YamlSource(file=Path(OPTION), data={"baseline": knobs}, lines={})
    try:
        return SweepSpec.from_json(data).baseline_candidate
    except ValidationError as error:
        found = to_config_error(error, source, SweepSpec)
        key = (found.key or "").removeprefix("baseline").removeprefix(".")
        remedy = found.remedy if key else "Change the values."
        raise ConfigError(found.message, file=f"{OPTION} {_shown(text)}", key=key, remedy=remedy) from None


def _read_knobs(text: str) -> dict[str, Any]:
    try:
        knobs = parse_yaml(text, Path(OPTION)).data
    except ConfigError as error:
        message = f"invalid YAML: {error.message.removeprefix('invalid YAML: ')}"
        remedy = "Pass a mapping such as '{tp: 2}'."
        raise ConfigError(message, file=f"{OPTION} {_shown(text)}", key=error.key, remedy=remedy) from None
    assert isinstance(knobs, dict), "YAML that starts with a brace and parses is a mapping"
    return knobs


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:57]!r}..."


def _size(text: str) -> int:
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        raise ConfigError(
            f"expected a size with a unit, got {text!r}",
            key="--max-device-memory",
            remedy="Use a value such as 512MiB or 80GB.",
        ) from None


# ``tune-cluster probe``: leases the cluster of a sweep file, measures it, and saves its profile.


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The measurements of this probe, for the nodes of its lease."""

    profile: Profile
    file: Path
    """File of the profile, which includes the nodes of earlier probes of the same hardware."""
    excluded: frozenset[str]
    """Nodes that the sweep file excludes now."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``probe --json``."""
        profile = self.profile
        return {
            **fields_json(profile, "hardware", "measured_at_s"),
            "profile": str(self.file),
            "nodes": [{**_node_json(node), "excluded": node.node in self.excluded} for node in profile.nodes],
            "networks": [
                {"nodes": list(network.nodes), "all_reduce": _link_json(network.all_reduce, bus=True)}
                for network in profile.networks
            ],
            "slow": [
                fields_json(one, "node", "figure", "per_s", "usual_per_s", "ratio") for one in profile.slow_figures
            ],
        }


def probe_file(file: Path, home: Home, progress: probing_Progress) -> Probed:
    """Measure all nodes the file would lease, including excluded ones: they may have been repaired.

    Raises:
        ConfigError: the file is wrong.
        ClusterError: no cluster, no lease, or no node could be measured.
    """
    spec = load_sweep(file)
    request = cluster_request(spec, home)
    logs = home.profiles / "logs" / uuid4().hex[:8]
    with connect(replace(request, excluded=None, claim=None), workdir=logs) as cluster:
        measured = probe(cluster, at_s=time.time(), progress=progress)
        topology = cluster.topology
    if not measured.failed:
        shutil.rmtree(logs, ignore_errors=True)
    if not measured.measured:
        first = measured.failed[0]
        raise ClusterError(f"no node could be measured; {first.node}: {first.failure}; logs: {logs}")
    store, key = HardwareProfileStore.of(home), profile_key(spec, topology)
    store.add(key, measured)
    names = frozenset(request.excluded(topology)) if request.excluded is not None else frozenset()
    return Probed(profile=measured, file=store.path(key), excluded=names)


def _node_json(node: NodeRates) -> dict[str, Any]:
    return {
        **fields_json(node, "node", "num_devices"),
        "matmul_flops_per_s": {name: rate.per_s for name, rate in node.matmul_flops_per_s.items()},
        "copy_bytes_per_s": {name: rate.per_s for name, rate in node.copy_bytes_per_s.items()},
        "all_reduce": _link_json(node.all_reduce, bus=True),
        "transfer": _link_json(node.transfer, bus=False),
        "failure": node.failure or None,
    }


def _link_json(link: Link | None, *, bus: bool) -> dict[str, Any] | None:
    if link is None:
        return None
    return {
        **fields_json(link, "world_size", "latency_s"),
        "bytes_per_s": link.bus_bytes_per_s if bus else link.bytes_per_s,
        "times_s": {str(point.num_bytes): point.time_s for point in link.times},
    }
