"""What ``tune-cluster dryrun`` does: choose trials, estimate them, judge them against the device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError

from orchestrator.dryrun import Progress, estimate_all
from orchestrator.dryrun_cache import DryRunCache
from orchestrator.errors import ConfigError
from orchestrator.home import Home
from orchestrator.plan import describe, make_plan
from orchestrator.space import short_name
from orchestrator.sweep import SweepSpec, load_sweep
from orchestrator.sweep_errors import to_config_error
from orchestrator.sweep_types import ByteSize
from orchestrator.yaml_source import YamlSource
from trials.codec import to_json
from trials.dryrun.records import Mode, RunFailure
from trials.estimate import CUDA_CONTEXT_BYTES, FRAGMENTATION, Estimate
from trials.spec import Candidate, Workload

BASELINE = "baseline"
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A trial's estimate against the memory there is."""

    name: str
    candidate: Candidate
    workload: Workload
    result: Estimate | RunFailure
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
    max_device_memory: str | None = None,
    fragmentation: float = FRAGMENTATION,
    device: Device | None = None,
    exact: bool = False,
    progress: Progress | None = None,
) -> list[Verdict]:
    """Estimate trials of the sweep in ``file``; the baseline when none is named.

    Raises:
        ConfigError: for the file, a trial nobody knows or that breaks a rule, or a size without its unit.
    """
    spec = load_sweep(file)
    names = list(trials) or [BASELINE]
    candidates = [choose(spec, name) for name in names]
    limit_bytes = spec.cluster.device_memory_bytes if max_device_memory is None else _size(max_device_memory)
    on_cpu = (device or spec.cluster.device) == "cpu"
    mode: Mode = "cpu" if on_cpu else "accelerator"
    workload = spec.to_workload()
    cache = DryRunCache(home.path / "dryrun")
    results = estimate_all(workload, candidates, mode=mode, exact=exact, cache=cache, progress=progress)
    return [
        Verdict(
            name=name,
            candidate=candidate,
            workload=workload,
            result=result,
            limit_bytes=limit_bytes,
            fragmentation=fragmentation,
            context_bytes=0 if on_cpu else CUDA_CONTEXT_BYTES,
        )
        for name, candidate, result in zip(names, candidates, results, strict=True)
    ]


def choose(spec: SweepSpec, name: str) -> Candidate:
    """The candidate that ``name`` means: ``baseline``, a number or short name of the plan, or knobs to change in the
    baseline, like ``{tp: 8, pp: 4}``.

    Raises:
        ConfigError: it means none, or one that breaks a rule.
    """
    if name == BASELINE:
        return spec.baseline_candidate
    if name.lstrip().startswith("{"):
        return changed_baseline(spec, name)
    candidates = make_plan(spec).candidates
    if name.isdecimal() and 1 <= int(name) <= len(candidates):
        return candidates[int(name) - 1]
    found = next((candidate for candidate in candidates if short_name(candidate) == name), None)
    if found is None:
        raise ConfigError(
            f"no trial {name!r} in the plan of {len(candidates)} candidates",
            key="--trial",
            remedy="Give baseline, a number or name as `tune-cluster plan` shows it, or knobs like '{tp: 2}'.",
        )
    return found


def changed_baseline(spec: SweepSpec, text: str) -> Candidate:
    """The baseline with the knobs of a YAML mapping.

    Raises:
        ConfigError: naming the knob, or the rule broken.
    """
    try:
        knobs = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not a YAML mapping: {text!r}", key="--trial", remedy="Write it like '{tp: 2}'.") from error
    data = spec.to_json()
    data["baseline"] = {**data["baseline"], **knobs}
    source = YamlSource(file=Path("--trial"), data={"baseline": knobs}, lines={})
    try:
        return SweepSpec.from_json(data).baseline_candidate
    except ValidationError as error:
        found = to_config_error(error, source, SweepSpec)
        key = (found.key or "").removeprefix("baseline").removeprefix(".")
        raise ConfigError(f"{text}: {found.message}", file="--trial", key=key, remedy=found.remedy) from None


def _size(text: str) -> int:
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        raise ConfigError(
            f"expected a size with its unit, got {text!r}",
            key="--max-device-memory",
            remedy='Write it like "512MiB" or "80GB".',
        ) from None
