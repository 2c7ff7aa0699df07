"""What is known of a hardware: profiles kept in the home, one per kind with the nodes probed so far, and fingerprints
that tell whether two measurements compare."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from cluster.hardware.topology import Topology
from cluster.probe.profile import Profile
from orchestrator.config.sweep import SweepSpec
from orchestrator.recipes.variables import VARIABLES, assignments
from orchestrator.sweep.home import Home
from trials.codec import CodecError, digest, from_json, to_json
from trials.files import make_private_folder, write_atomically

logger = logging.getLogger(__name__)

MACHINE = ("accelerator", "deviation", "slow_nodes", "seed")
"""Keys of section ``simulation`` that make a simulated machine another one."""


def profile_key(spec: SweepSpec, topology: Topology) -> str:
    """The key under which the profile of a hardware is kept; other nodes of the same cluster have the same key."""
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
class ProfileStore:
    """Profiles of clusters, one JSON file per key in ``folder``."""

    folder: Path

    @classmethod
    def of(cls, home: Home) -> ProfileStore:
        return cls(home.profiles)

    def path(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def get(self, key: str) -> Profile | None:
        """The profile, or None; a file that cannot be read counts as missing."""
        path = self.path(key)
        try:
            return from_json(Profile, json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, CodecError, OSError) as error:
            logger.warning("the profile %s is not used: %s; probe again", path, error)
            return None

    def add(self, key: str, measured: Profile) -> Profile:
        """Keep what was measured beside other nodes' earlier rates; readers see the whole file or none."""
        known = self.get(key)
        profile = measured if known is None else known.updated(measured)
        make_private_folder(self.folder)
        write_atomically(self.path(key), [json.dumps(to_json(profile), indent=1).encode()])
        return profile


def load_profile(spec: SweepSpec, topology: Topology | None, home: Home) -> Profile | None:
    """What probes measured of the nodes of ``topology``; None where none of them was probed."""
    if topology is None:
        return None
    known = ProfileStore.of(home).get(profile_key(spec, topology))
    found = known.only({node.name for node in topology.nodes}) if known is not None else None
    return found if found is not None and found.measured else None


_PACKAGES = ("torch", "ray", "optuna", "mlflow", "tune-cluster")


def fingerprint(topology: Topology, virtual: str = "", env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Names and versions of hardware and software, flat. Two measurements compare only where these are equal.

    Args:
        virtual: tells clusters that do not exist apart; empty for one that does.
        env: environment variables that the sweep file gives all ranks.
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
    """The version that is installed here; plans and reports are made where some packages are not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _driver_version() -> str:
    path = Path("/sys/module/nvidia/version")
    return path.read_text(encoding="ascii").strip() if path.exists() else "none"
