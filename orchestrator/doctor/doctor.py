"""Looks at a host, a sweep file or a Ray cluster: which checks there are, in the order in which people read them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.base import ClusterError
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.doctor import devices, host, services
from orchestrator.doctor.check import Check, Finding, TroubleError, run_checks
from orchestrator.errors import ConfigError
from orchestrator.planning.hardware.request import known_topology
from orchestrator.sweep.home import Home

ADDRESS_VARIABLE = "RAY_ADDRESS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patient:
    """What is to be looked at besides this host."""

    home: Home
    file: Path | None = None
    address: str | None = None
    spec: SweepSpec | None = None
    """The sweep of the file; None where there is none, or it cannot be read."""

    @property
    def ray_address(self) -> str | None:
        """The Ray cluster's: as given, else ``RAY_ADDRESS``, else as in the file; None: none."""
        if self.address is None and self.spec is not None and self.spec.cluster.kind != "ray":
            return None
        in_file = self.spec.cluster.address if self.spec is not None else None
        address = self.address or os.environ.get(ADDRESS_VARIABLE) or in_file
        return None if address in (None, "", "local") else address

    @property
    def needs_ray(self) -> bool:
        return self.ray_address is not None or (self.spec is not None and self.spec.cluster.kind == "ray")

    @property
    def tracking_uri(self) -> str:
        """The MLflow store's: as in the file, else the home's own."""
        in_file = self.spec.tracking.uri if self.spec is not None else None
        return in_file or self.home.default_tracking_uri


def make_patient(home: Home, file: Path | None, address: str | None) -> Patient:
    """What is to be looked at; a file that cannot be read is a finding, no error."""
    try:
        spec = load_sweep(file) if file is not None else None
    except ConfigError:
        spec = None
    return Patient(home=home, file=file, address=address, spec=spec)


QUIET = Check(subject="load", look=host.load, level="warn")
"""The check that comes before all others, because it would take them for somebody else."""


def checks(patient: Patient) -> list[Check]:
    """All others. A sweep that runs nowhere real needs neither torch nor devices."""
    is_virtual = patient.spec is not None and patient.spec.cluster.kind in ("simulated", "replay")
    needs_here = not is_virtual and patient.ray_address is None
    address, torch_s = patient.ray_address, devices.TORCH_S
    of_trials = {"torch": devices.torch, "devices": devices.devices, "collectives": devices.collectives}
    return [
        *([Check(subject="file", look=functools.partial(_file, patient))] if patient.file is not None else []),
        Check(subject="Python", look=host.python),
        Check(subject="PYTHONPATH", look=host.search_path),
        *(
            Check(subject=name, look=functools.partial(_elsewhere, look, needs_here), deadline_s=torch_s)
            for name, look in of_trials.items()
        ),
        Check(subject="driver", look=devices.driver, level="warn", deadline_s=torch_s),
        Check(subject="environment", look=devices.environment, level="warn", deadline_s=torch_s),
        Check(subject="Ray", look=functools.partial(services.ray_package, patient.needs_ray)),
        Check(subject="Ray cluster", look=functools.partial(services.ray_cluster, address), deadline_s=services.RAY_S),
        Check(
            subject="Ray jobs",
            look=functools.partial(services.ray_jobs, address),
            deadline_s=services.RAY_S,
        ),
        Check(
            subject="MLflow", look=functools.partial(services.store, patient.tracking_uri), deadline_s=services.STORE_S
        ),
        Check(subject="home", look=functools.partial(host.home_disk, patient.home.path)),
        Check(subject="shared memory", look=host.shared_memory, level="warn"),
        Check(subject="memory", look=host.memory, level="warn"),
        Check(subject="limits", look=host.file_limits, level="warn"),
        Check(subject="ports", look=host.ports),
        Check(subject="clock", look=host.clock, level="warn"),
    ]


def _elsewhere(look: Callable[[], str], needed: bool) -> str:
    """A check of what trials need: where they run on other hosts, what fails here is worth a warning only."""
    try:
        return look()
    except TroubleError as trouble:
        level = trouble.level if needed else "warn"
        raise TroubleError(trouble.words, trouble.remedy, level) from None


def _file(patient: Patient) -> str:
    """Whether the sweep file can be read, and the hardware that it asks for is there."""
    assert patient.file is not None
    try:
        spec = patient.spec or load_sweep(patient.file)
        topology = known_topology(spec, patient.home) if patient.ray_address is None else None
    except (ConfigError, ClusterError) as error:
        raise TroubleError(str(error), "tune-cluster plan FILE tells the same, and the plan.", "fail") from None
    where = f" on {topology.label}" if topology is not None else ""
    return f"{spec.name}, {spec.cluster.kind}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """All findings, in the order in which they are shown."""

    findings: tuple[Finding, ...]

    @property
    def num_failed(self) -> int:
        return sum(finding.level == "fail" for finding in self.findings)

    @property
    def num_warned(self) -> int:
        return sum(finding.level == "warn" for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The last line: whether sweeps can run."""
        if self.num_failed:
            return f"{self.num_failed} to be mended before a sweep can run"
        return f"usable; {self.num_warned} to look at" if self.num_warned else "all is well"

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form of ``doctor --json``."""
        return {"usable": not self.num_failed, "checks": [finding.to_json() for finding in self.findings]}


def examine(home: Home, *, file: Path | None = None, address: str | None = None) -> Diagnosed:
    """Run all checks; takes some seconds, and two minutes where nothing answers."""
    quiet = run_checks([QUIET])
    return Diagnosed(findings=(*run_checks(checks(make_patient(home, file, address))), *quiet))
