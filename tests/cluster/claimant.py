"""Another sweep on a shared Ray cluster: ``claimant.py <address> <folder> <min_nodes> <priority>``.

Prints what it waits for, then "holds N"; gives all back at the first line of standard input.
"""

import sys
from pathlib import Path

from cluster.base import ClusterRequest
from cluster.connect import connect
from cluster.queue import Claim
from tests.cluster.gangs import PRELOAD


def main(address, folder, min_nodes, priority):
    claim = Claim(sweep="urgent", user="bob", min_nodes=min_nodes, max_nodes=min_nodes, priority=priority)
    request = ClusterRequest(address=address, min_nodes=min_nodes, max_nodes=min_nodes, device="cpu", claim=claim)
    with connect(request, workdir=folder, on_wait=lambda reason: print(reason, flush=True), preload=PRELOAD) as cluster:
        print("holds", len(cluster.topology.nodes), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
