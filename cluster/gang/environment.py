"""The environment in which ranks start: torchrun's variables, where they meet, and a few of our own.

Programs find each other through ``MASTER_ADDR`` and ``MASTER_PORT`` as under torchrun. Runners of ours meet at
``TUNE_CLUSTER_RENDEZVOUS``, on one node a file: nobody else can take it, as they can a port.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cluster.gang.defaults import NUMA_VARIABLE, default_env
from cluster.gang.messages import NodeLaunch, RankSlot
from trials.accelerator.kinds import FAMILIES
from trials.script.environment import CACHES

LOOPBACK = "127.0.0.1"
RENDEZVOUS = "TUNE_CLUSTER_RENDEZVOUS"
AGAIN = "TUNE_CLUSTER_RENDEZVOUS_AGAIN"
"""Where the ranks meet that are started once more after those of the trial."""
PORTS = range(20000, 32000)
"""Ports for ranks to meet at: below those that Linux gives to outgoing connections, which would take one in between."""
MAX_TRIES = 50
TIMEOUT_MARGIN_S = 120.0
"""How much later than all deadlines together collectives give up."""
MAX_TIMEOUT_S = 7 * 86400.0
"""More than this no deadline needs; in milliseconds it still is a number of 32 bits."""
CACHE_FOLDER = "cache-{node}"
"""Folder for compilers' caches beside those of the attempts, shared by all of a lease on one node."""
_OWNED: Mapping[str, str] = {
    **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "whoever starts the ranks"),
    **dict.fromkeys(("GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "whoever starts the ranks"),
    **dict.fromkeys(("NNODES", "NODE_RANK", "NPROC_PER_NODE"), "whoever starts the ranks"),
    **{family.visible_variable: "the placement of ranks" for family in FAMILIES.values() if family.visible_variable},
    **{name: "the placement of ranks" for family in FAMILIES.values() for name in family.order_variables},
}
_OWNED_PREFIXES = ("ROLE_", "TORCHELASTIC_", "TUNE_CLUSTER_")


def owner_of(name: str) -> str | None:
    """Who sets this variable of every rank, so that nobody else may; None where it is free."""
    if name in _OWNED:
        return _OWNED[name]
    if name == NUMA_VARIABLE:
        return None
    return "tune-cluster or torchrun" if name.startswith(_OWNED_PREFIXES) else None


def single_node_env(directory: str) -> dict[str, str]:
    """Environment of ranks that share a node: they meet at a file."""
    folder = Path(directory)
    return {RENDEZVOUS: (folder / "rendezvous").as_uri(), AGAIN: (folder / "rendezvous-again").as_uri()}


def several_nodes_env(address: str, port: int, port_again: int) -> dict[str, str]:
    """Environment of ranks on several nodes, which meet at a TCP store that rank 0 opens on the first; those that are
    started once more when these are gone, at another one."""
    return {
        RENDEZVOUS: f"tcp://{address}:{port}",
        AGAIN: f"tcp://{address}:{port_again}",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def with_master(launch: NodeLaunch) -> NodeLaunch:
    """The launch with a place for its ranks to meet that is free now, unless it has one already."""
    if "MASTER_PORT" in launch.env:
        return launch
    return replace(launch, env={"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port()), **launch.env})


def free_port() -> int:
    """A TCP port of this host that nobody uses now; somebody may before it is used."""
    chance = random.SystemRandom()  # processes forked from one draw alike from any other
    for port in [*(chance.choice(PORTS) for _ in range(MAX_TRIES)), 0]:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise OSError("no TCP port is free on this host")


def cache_folder(workdir: Path, node: str) -> Path:
    """Where compilers on ``node`` keep what they made for the attempts in ``workdir``."""
    return workdir / CACHE_FOLDER.format(node=node)


def rank_folder(launch: NodeLaunch) -> Path:
    """The attempt's folder for what ranks of one node share: nodes may have one file system, and with it paths."""
    directory = Path(launch.directory)
    return directory if launch.num_nodes == 1 else directory / f"node{launch.node_rank}"


def _patience_s(launch: NodeLaunch) -> int:
    """How long collectives, and NCCL's monitor of its own watchdog, have to wait so as not to give up while the gang is
    within its deadlines: what hangs is found and judged by the warden."""
    deadlines = launch.deadlines
    most_s = deadlines.starting_s + deadlines.warmup_s + deadlines.measuring_s + deadlines.compile_s
    return int(min(most_s, MAX_TIMEOUT_S - TIMEOUT_MARGIN_S) + TIMEOUT_MARGIN_S)


def told_env(launch: NodeLaunch) -> dict[str, str]:
    """What others say of the environment of ranks, to which defaults give way: the node's own, the launch, and what the
    sweep file has for a program of the user's own."""
    pairs = launch.spec.get("env", ()) if launch.is_script else ()
    return {**os.environ, **launch.env, **{pair[0]: pair[1] for pair in pairs if len(pair) == 2}}


def rank_env(launch: NodeLaunch, slot: RankSlot) -> dict[str, str]:
    """What one rank sees beside the node's own environment, which goes over the defaults; what the launch says goes
    over everything."""
    patience_s, host = _patience_s(launch), told_env(launch)
    return {
        **default_env(launch.device_kind, launch.num_nodes, launch.interface, patience_s=patience_s, host=host),
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(len(launch.slots)),
        "GROUP_RANK": str(launch.node_rank),
        "GROUP_WORLD_SIZE": str(launch.num_nodes),
        "OMP_NUM_THREADS": str(launch.num_threads),
        "TUNE_CLUSTER_ATTEMPT_DIR": str(rank_folder(launch)),
        "TUNE_CLUSTER_NUM_DEVICES": str(len(slot.devices)),
        **_caches(launch),
        "TUNE_CLUSTER_COLLECTIVE_TIMEOUT_S": str(patience_s),
        "TUNE_CLUSTER_LEAVES_LAST": "1",  # no result is to be lost for a hang in tear-down
        **launch.env,
    }


def _caches(launch: NodeLaunch) -> dict[str, str]:
    """Where is kept what attempts leave for later ones. Nothing of compilers comes in from the user's own runs, or from
    another sweep; programs of the user's own are given their folders by :mod:`trials.script`."""
    folder = cache_folder(Path(launch.directory).parent, launch.node)
    compilers = {} if launch.is_script else {name: str(folder / beneath) for name, beneath in CACHES.items()}
    return {"TUNE_CLUSTER_CACHE_DIR": str(folder), **compilers}


def started_again(launch: NodeLaunch, runner: str) -> NodeLaunch:
    """The launch of fresh ranks with another runner, after those of ``launch`` are gone: they meet elsewhere and write
    to a folder of their own, and find in the same caches what the others left."""
    environment = {**_caches(launch), **launch.env, RENDEZVOUS: launch.env.get(AGAIN, "")}
    return replace(launch, runner=runner, directory=str(rank_folder(launch) / "again"), env=environment)
