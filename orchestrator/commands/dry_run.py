"""What ``tune-cluster dryrun`` does: chooses trials, estimates their memory, judges it against that of a device."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cluster.base import ClusterError
from cluster.hardware.topology import Topology
from orchestrator.config.scalars import ByteSize
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.config.validation import to_config_error
from orchestrator.config.yaml_source import YamlSource, parse_yaml
from orchestrator.errors import ConfigError
from orchestrator.planning.dryrun.cache import DryRunCache
from orchestrator.planning.dryrun.estimates import DryRunEstimates, load_estimates
from orchestrator.planning.dryrun.simulation import Progress, estimate_all
from orchestrator.planning.hardware.request import device_kind, known_topology, memory_limit_bytes
from orchestrator.planning.plan import Plan, make_plan
from orchestrator.space.naming import describe, short_name
from orchestrator.sweep.home import Home
from trials.accelerator.kinds import DeviceKind
from trials.codec import to_json
from trials.dryrun.estimate import FRAGMENTATION, DryRunEstimate, context_bytes
from trials.dryrun.records import Mode, RunFailure
from trials.spec import Candidate, OwnModel, Workload

BASELINE = "baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunVerdict:
    """A trial's estimate against the memory there is."""

    name: str
    """What the user called it, or its short name."""
    candidate: Candidate
    workload: Workload
    result: DryRunEstimate | RunFailure
    limit_bytes: int | None
    """Device memory; None where nobody said."""
    fragmentation: float
    """Share of its live memory that the allocator holds beyond it."""
    context_bytes: int
    """What context and communicators take on every device; 0 on CPUs."""

    @property
    def fits(self) -> bool | None:
        """Whether it fits; None where the limit or the estimate is missing."""
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
            "limit_bytes": self.limit_bytes,
            "fragmentation": self.fragmentation,
            "context_bytes": self.context_bytes,
            "fits": self.fits,
        }
        if isinstance(self.result, RunFailure):
            return {**body, "failure": to_json(self.result)}
        estimate = to_json(self.result)
        for stage, encoded in zip(self.result.stages, estimate["stages"], strict=True):
            encoded["needed_bytes"] = stage.needed_bytes(self.fragmentation, self.context_bytes)
        return {**body, "estimate": estimate}


def refuse_own_code(spec: SweepSpec) -> None:
    """Refuse to simulate code that is not ours.

    Raises:
        ConfigError: the workload has such code; names the way that there is.
    """
    if spec.script is not None:
        message = "nobody can simulate a training program of your own"
        raise spec.error(("workload",), message, "`tune-cluster check FILE` runs it for some steps.")
    model = spec.to_workload().model
    if isinstance(model, OwnModel):
        message = f"dry runs know built-in models only, not kind {model.kind}"
        raise spec.error(("workload",), message, "Trials find out what fits: what runs out of memory rules others out.")


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
        ConfigError: for the file, a trial nobody knows or that breaks a rule, or a size without its unit.
    """
    spec = load_sweep(file)
    refuse_own_code(spec)
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
    return [
        DryRunVerdict(
            name=name,
            candidate=candidate,
            workload=workload,
            result=result,
            limit_bytes=limit_bytes,
            fragmentation=fragmentation,
            context_bytes=0 if mode == "cpu" else context_bytes(candidate.layout),
        )
        for (name, candidate), result in zip(chosen, results, strict=True)
    ]


def _limit_bytes(spec: SweepSpec, topology: Topology | None, kind: DeviceKind) -> int | None:
    """Device memory to judge by; what this host's GPUs have does not count for a dry run on another kind of device."""
    return memory_limit_bytes(spec, topology if kind == device_kind(spec, topology) else None)


class TrialChoices:
    """Trials of one sweep file that a user may name. What naming them needs is planned once, and only if it is needed.

    A dry run needs no hardware: where this host is not what the file asks for, plans are made without.
    """

    def __init__(self, spec: SweepSpec, home: Home) -> None:
        self._spec = spec
        self._home = home

    @functools.cached_property
    def topology(self) -> Topology | None:
        """What the sweep would run on; None where only its cluster knows, or this host is another one."""
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
        """Candidates whose layouts this hardware has room for, whatever earlier dry runs said."""
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
                f"no trial {_shown(name)} in the plan of {len(self.numbered)} candidates",
                key="--trial",
                remedy="Give baseline, a number or name as `tune-cluster plan` shows it, or knobs like '{tp: 2}'.",
            )
        return found

    def _numbered(self, name: str) -> Candidate | None:
        is_there = len(name) < 10 and 1 <= int(name) <= len(self.numbered)
        return self.numbered[int(name) - 1] if is_there else None

    def _plan(self, known: DryRunEstimates | None = None) -> Plan:
        """The plan for this hardware; without hardware where nothing could run on it."""
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
    source = YamlSource(file=Path("--trial"), data={"baseline": knobs}, lines={})
    try:
        return SweepSpec.from_json(data).baseline_candidate
    except ValidationError as error:
        found = to_config_error(error, source, SweepSpec)
        key = (found.key or "").removeprefix("baseline").removeprefix(".")
        message = f"{_shown(text)}: {found.message}"
        raise ConfigError(message, file="--trial", key=key, remedy=found.remedy) from None


def _read_knobs(text: str) -> dict[str, Any]:
    try:
        knobs = parse_yaml(text, Path("--trial")).data
    except ConfigError as error:
        message = f"{_shown(text)} is not a YAML mapping of knobs: {error.message}"
        raise ConfigError(message, file="--trial", key=error.key, remedy="Write it like '{tp: 2}'.") from None
    assert isinstance(knobs, dict), "YAML that begins with a brace and can be read is a mapping"
    return knobs


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 60 else f"{text[:57]!r}..."


def _size(text: str) -> int:
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        raise ConfigError(
            f"expected a size with its unit, got {text!r}",
            key="--max-device-memory",
            remedy='Write it like "512MiB" or "80GB".',
        ) from None
