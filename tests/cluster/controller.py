"""A controller in a process of its own: ``controller.py local|ray <folder> [runner]``; runs a gang that hangs, or is
started once more with a runner that does.

Prints "ready" when the gang has signed in, then closes the cluster at the first line of standard input.
"""

import sys
from pathlib import Path

from cluster.connect import connect
from cluster.hardware.discovery import discover_node
from cluster.local import LocalCluster
from cluster.request import ClusterRequest
from tests.cluster.gangs import PRELOAD, launch, wait_for_pids


def open_cluster(kind, workdir):
    if kind == "local":
        return LocalCluster(workdir, discover_node(num_devices=2), preload=PRELOAD)
    return connect(ClusterRequest(devices_per_node=2), workdir=workdir, preload=PRELOAD)


def main(kind, folder, again=""):
    pids = folder / "pids"
    pids.mkdir()
    with open_cluster(kind, folder / "work") as cluster:
        if again:
            launch(cluster, "compiles_cold", spec={"pids": str(pids), "again": again, "compile_s": 300.0})
        else:
            launch(cluster, "spawns", spec={"pids": str(pids), "then": "hang"})
        wait_for_pids(pids, 4 if again else 6)
        print("ready", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
