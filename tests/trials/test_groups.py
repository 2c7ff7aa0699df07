"""All process groups of a gang are connected before its first step."""

import pytest
import torch
import torch.distributed as dist

from tests.trials.ranks import run_ranks
from trials.parallel.mesh import build_mesh, connect
from trials.spec import Layout

LAYOUTS = {
    "zero1": Layout(dp_shard=2, tp=2, zero_stage=1, tp_engine="local"),
    "hsdp-cp": Layout(dp_replicate=2, cp=2, replicate_with="fsdp2", shard_embedding=True),
    "zero3-cp": Layout(dp_shard=2, cp=2, zero_stage=3),
    "pipeline": Layout(pp=2, dp_replicate=2),
    "experts": Layout(dp_shard=2, cp=2, zero_stage=3, ep=2),
    "experts-tp": Layout(dp_replicate=2, tp=2, ep=2, tp_engine="local"),
}


def connected(layouts):
    """Names of the connected groups, of all groups that this rank is in, and how often progress was reported."""
    found = []
    for layout in layouts:
        before = set(dist.distributed_c10d._world.pg_names.values()) - {dist.group.WORLD.group_name}
        calls = []
        mesh = build_mesh(layout, torch.device("cpu"))
        names = connect(mesh, layout, torch.device("cpu"), lambda calls=calls: calls.append(1))
        members = {name for group, name in dist.distributed_c10d._world.pg_names.items() if group.size() > 1}
        found.append((set(names), members - before, len(calls)))
    return found


@pytest.mark.slow
def test_every_mesh_group_is_connected_and_reports_progress(tmp_path):
    for of_rank in run_ranks(connected, 4, tmp_path, list(LAYOUTS.values())):
        for name, (names, created, num_calls) in zip(LAYOUTS, of_rank, strict=True):
            assert created <= names, name
            assert num_calls == len(names) >= 3, name
