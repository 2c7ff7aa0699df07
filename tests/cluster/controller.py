"""A controller in a separate process: ``controller.py local|ray <folder>``; runs a gang that hangs.

Prints "ready" when the gang has signed in, then closes the cluster at the first line of standard input.
"""

import sys
from pathlib import Path

from cluster.base import ClusterRequest
from cluster.connect import connect
from cluster.hardware.discovery import discover_node
from cluster.local import LocalCluster
from tests.cluster.gangs import PRELOAD, launch, wait_for_pids


def open_cluster(kind, workdir):
    if kind == "local":
        return LocalCluster(workdir, discover_node(num_devices=2), preload=PRELOAD)
    return connect(ClusterRequest(devices_per_node=2), workdir=workdir, preload=PRELOAD)


def main(kind, folder):
    pids = folder / "pids"
    pids.mkdir()
    with open_cluster(kind, folder / "work") as cluster:
        launch(cluster, "spawns", spec={"pids": str(pids), "then": "hang"})
        wait_for_pids(pids, 6)
        print("ready", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
