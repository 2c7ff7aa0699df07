"""What ``tune-cluster dryrun`` does: choose trials, estimate them, judge them against the device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
from trials.codec import to_json
from trials.dryrun.estimate import CUDA_CONTEXT_BYTES, FRAGMENTATION, DryRunEstimate
from trials.dryrun.records import Mode, RunFailure
from trials.spec import Candidate, Workload

BASELINE = "baseline"
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunVerdict:
    """A trial's estimate against the memory there is."""

    name: str
    candidate: Candidate
    workload: Workload
    result: DryRunEstimate | RunFailure
    limit_bytes: int | None
    """Device memory; None where nobody said."""
    fragmentation: float
    context_bytes: int

    @property
    def fits(self) -> bool | None:
        """None where the limit or the estimate is missing."""
        if self.limit_bytes is None or isinstance(self.result, RunFailure):
            return None
        return self.result.fits(self.limit_bytes, self.fragmentation, self.context_bytes)

    @property
    def failed(self) -> bool:
        """Whether there is no estimate."""
        return isinstance(self.result, RunFailure)

    def to_json(self) -> dict[str, Any]:
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


def dry_run(
    file: Path,
    home: Home,
    *,
    trials: Sequence[str] = (),
    num_legal: int | None = None,
    max_device_memory: str | None = None,
    fragmentation: float = FRAGMENTATION,
    device: Device | None = None,
    exact: bool = False,
    progress: Progress | None = None,
) -> list[DryRunVerdict]:
    """Estimate trials of the sweep in ``file``: those named and the first ``num_legal`` candidates of its plan; the
    baseline when neither is given.

    Raises:
        ConfigError: for the file, a trial nobody knows or that breaks a rule, or a size without its unit.
    """
    spec = load_sweep(file)
    topology = _known_topology(spec, home)
    chosen = [(name, choose(spec, name, home)) for name in trials or (() if num_legal else (BASELINE,))]
    if num_legal:
        candidates = _plan_here(spec, topology).candidates[:num_legal]
        chosen += [(short_name(candidate), candidate) for candidate in candidates]
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
            context_bytes=0 if mode == "cpu" else CUDA_CONTEXT_BYTES,
        )
        for (name, candidate), result in zip(chosen, results, strict=True)
    ]


def _known_topology(spec: SweepSpec, home: Home) -> Topology | None:
    """None too where this host is not the hardware asked for: a dry run needs none."""
    try:
        return known_topology(spec, home)
    except ClusterError:
        return None


def _limit_bytes(spec: SweepSpec, topology: Topology | None, kind: Device) -> int | None:
    """What this host's GPUs have does not count for a dry run on another kind of device."""
    return memory_limit_bytes(spec, topology if kind == device_kind(spec, topology) else None)


def _plan_here(spec: SweepSpec, topology: Topology | None, known: DryRunEstimates | None = None) -> Plan:
    """The plan as ``tune-cluster plan`` makes it; without hardware where that refuses."""
    try:
        return make_plan(spec, topology, known)
    except ConfigError:
        return make_plan(spec)


def choose(spec: SweepSpec, name: str, home: Home) -> Candidate:
    """The candidate that ``name`` means: ``baseline``, a number or short name of the plan, or knobs to change in the
    baseline, like ``{tp: 8, pp: 4}``. A name may also be that of a candidate too large for this hardware.

    Raises:
        ConfigError: it means none, or one that breaks a rule.
    """
    if name == BASELINE:
        return spec.baseline_candidate
    if name.lstrip().startswith("{"):
        return changed_baseline(spec, name)
    topology = _known_topology(spec, home)
    candidates = _plan_here(spec, topology, load_estimates(spec, topology, DryRunCache(home.dry_runs))).candidates
    if name.isdecimal():
        found = candidates[int(name) - 1] if len(name) < 10 and 1 <= int(name) <= len(candidates) else None
    else:
        found = next((one for one in make_plan(spec).candidates if short_name(one) == name), None)
    if found is None:
        raise ConfigError(
            f"no trial {_shown(name)} in the plan of {len(candidates)} candidates",
            key="--trial",
            remedy="Give baseline, a number or name as `tune-cluster plan` shows it, or knobs like '{tp: 2}'.",
        )
    return found


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
