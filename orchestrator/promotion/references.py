"""References such as ``llama@production``, ``llama@3`` and ``sweep:trial``: what they mean, read and checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import check_tracking_uri
from orchestrator.promotion.history import PRODUCTION
from orchestrator.promotion.manifest import (
    AGAIN,
    SWEEP_WRITTEN_OUT,
    check_content,
    check_files,
    check_origin,
    check_record,
    label_of,
    parsed,
    script_said,
    verdict_of,
)
from orchestrator.report.summary import result
from orchestrator.scripts.script import Script
from orchestrator.sweep.home import Home, check_name
from orchestrator.sweep.state import find_trial
from orchestrator.tracking.registry import Registered, Registry
from orchestrator.tracking.tracker import Tracker
from orchestrator.units import trial_id
from trials.codec import from_json
from trials.spec import Candidate, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version with its manifest, checked against the key it was registered with."""

    registered: Registered
    manifest: Mapping[str, Any]
    candidate: Candidate
    spec: Mapping[str, Any] | None
    """The sweep file written out; None where the sweep was not submitted from one."""

    @property
    def label(self) -> str:
        return label_of(self.registered)

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``show --json``."""
        version = self.registered
        verified = {key: version.tags.get(f"verified_{key}") for key in ("at", "result", "run")}
        return {
            "name": version.name,
            "version": version.version,
            "aliases": list(version.aliases),
            "promoted_by": version.tags.get("promoted_by"),
            "recipe_sha256": version.tags.get("recipe_sha256"),
            "verified": verified if verified["at"] else None,
            **self.manifest,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionDescription:
    """A configuration as ``diff`` compares it: a registered version, or a trial of a sweep."""

    label: str
    candidate: Candidate
    workload: Workload
    hardware: str
    fingerprint: Mapping[str, str]
    speed: float | None
    unit: str
    verdict: str
    script: Script | None = None
    """The user's own training program; None where ours trains."""


def store(home: Home, tracking_uri: str | None) -> Tracker:
    """The MLflow store to look in: that of the home unless another is named.

    Raises:
        ConfigError: nothing was ever recorded there, or the address is no tracking URI.
    """
    if tracking_uri is not None:
        return Tracker(check_tracking_uri(tracking_uri))
    if not home.has_store:
        raise ConfigError(
            f"there is no MLflow store in {home.path}", remedy="Submit a sweep first, or use --home for another folder."
        )
    return Tracker(home.default_tracking_uri)


def read(tracker: Tracker, reference: str) -> Version:
    """The version ``name@alias``, ``name@number`` or ``name``, which means ``name@production``.

    Raises:
        ConfigError: there is no such version, or its manifest was altered.
    """
    name, _, which = reference.partition("@")
    check_name(name, "registered name")
    which = which or PRODUCTION
    with tracker.reached():
        registry = Registry(tracker.client())
        found = registry.find(name, version=which) if which.isdigit() else registry.find(name, alias=which)
        if found is None:
            raise ConfigError(f"the registry has no {name}@{which}", remedy="Promote a sweep first, or name a version.")
        return checked(registry, found)


def checked(registry: Registry, found: Registered) -> Version:
    """The version with its files, after checking that they are those it was registered with, and of the right form.

    Raises:
        ConfigError: they are not, or cannot be read.
    """
    try:
        files = registry.read_files(found)
        record_tags = registry.run_tags(found.run_id)
    except LookupError as error:
        raise ConfigError(f"{label_of(found)} cannot be read: {error}", remedy=AGAIN) from None
    check_origin(found, files)
    check_files(found, files)
    manifest = parsed(found, files)
    candidate = check_content(manifest, found)
    check_record(found, record_tags)
    spec = json.loads(files[SWEEP_WRITTEN_OUT]) if SWEEP_WRITTEN_OUT in files else None
    return Version(registered=found, manifest=manifest, candidate=candidate, spec=spec)


def describe(reference: str, home: Home, tracking_uri: str | None) -> VersionDescription:
    """What ``reference`` means: a registered version, or ``SWEEP:TRIAL``.

    Raises:
        ConfigError: there is none.
    """
    sweep, colon, trial = reference.partition(":")
    if colon:
        return _of_trial(sweep, trial, home)
    promoted = read(store(home, tracking_uri), reference)
    facts = promoted.manifest["evidence"]
    return VersionDescription(
        label=promoted.label,
        candidate=promoted.candidate,
        workload=from_json(Workload, promoted.manifest["workload"]),
        hardware=facts["hardware"],
        fingerprint=facts["fingerprint"],
        speed=facts["tokens_per_s_per_device"],
        unit=facts["unit"],
        verdict=verdict_of(facts)[0],
        script=script_said(promoted.spec),
    )


def _of_trial(sweep: str, trial: str, home: Home) -> VersionDescription:
    snapshot = home.read(sweep, begun=True)
    state = snapshot.state
    found = find_trial(state, trial, sweep)
    measured, verdict = result(found, state.objective), state.verdict
    return VersionDescription(
        label=f"{sweep}:{trial_id(found.number)}",
        candidate=found.candidate,
        workload=state.sweep.workload,
        hardware=state.sweep.hardware,
        fingerprint=state.sweep.fingerprint,
        speed=measured.figures.tokens_per_s_per_device if measured else None,
        unit=state.sweep.workload.speed_unit,
        script=script_said(snapshot.spec),
        verdict=state.virtual or ("confirmed" if verdict and verdict.winner == found.number else "not confirmed"),
    )
