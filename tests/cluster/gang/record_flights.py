"""Records what gloo's Flight Recorder has of ranks that hang: ``python -m tests.cluster.gang.record_flights [CASE]``.

Every case is a gang of processes on loopback that really hangs. After some seconds a thread of each rank dumps the
recorder, as torch gives it, with the members of the rank's groups, and ends the process.
"""

import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from cluster.node import hang

FOLDER = Path(__file__).parent / "flights"
HANGS_S = 4.0
FOREVER_S = 600.0


def missing_rank(rank):
    """Rank 2 of four never begins the second collective; the others wait in it."""
    dist.all_reduce(torch.ones(4))
    if rank != 2:
        dist.all_reduce(torch.ones(4))


def chain(rank):
    """Ranks 2 and 3 wait for 0 in the world, which waits for 1 in their pair's group; 1 is busy elsewhere."""
    pairs = [dist.new_group(pair, group_desc="tp") for pair in ([0, 1], [2, 3])]
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4), group=pairs[rank // 2])
    if rank == 0:
        dist.all_reduce(torch.ones(2), group=pairs[0])
    if rank != 1:
        dist.all_reduce(torch.ones(4))


def crossed(rank):
    """Two ranks begin the same two collectives in different orders."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    dist.all_reduce(torch.ones(4))
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(torch.ones(4), group=group)


def differing(rank):
    """Rank 0 begins an all-reduce, rank 1 a gather to itself; each waits for what the other does not send."""
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        dist.all_reduce(torch.ones(4))
    else:
        dist.gather(torch.ones(4), [torch.ones(4) for _ in range(2)], dst=1)


def silent_peer(rank):
    """Rank 0 of two waits for what rank 1, busy elsewhere, never sends."""
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        dist.recv(torch.ones(4), src=1)


CASES = {
    case.__name__: (case, num_ranks)
    for case, num_ranks in ((missing_rank, 4), (chain, 4), (crossed, 2), (differing, 2), (silent_peer, 2))
}


def _rank(rank, name, folder):
    case, num_ranks = CASES[name]
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks)

    def dump():
        time.sleep(HANGS_S)
        dumped = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
        Path(folder, str(rank)).write_text(json.dumps({"dump": dumped, "members": hang._members()}))
        while len(list(Path(folder).glob("[0-9]"))) < num_ranks:  # a rank that leaves ends what the others wait in
            time.sleep(0.05)
        os._exit(0)

    threading.Thread(target=dump).start()
    case(rank)
    time.sleep(FOREVER_S)


def record(name):
    """The dumps of one case, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, args=(name, folder), nprocs=CASES[name][1], start_method="spawn")
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(CASES[name][1])]


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CASES:
        found = {"torch": torch.__version__, "case": CASES[name][0].__doc__, "ranks": record(name)}
        (FOLDER / f"gloo_{name}.json").write_text(json.dumps(found, indent=1) + "\n")
