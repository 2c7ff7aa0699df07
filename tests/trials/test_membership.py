"""Joining and leaving the gang, and the groups within it."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.trials.ranks import run_ranks
from trials.parallel import mesh
from trials.spec import Layout

CPU = torch.device("cpu")
ALONE = mesh.RankIdentity()


def test_leaving_has_a_separate_deadline(monkeypatch, capfd):
    """A destruction that hangs, as NCCL's sometimes does, costs no finished result."""
    go_on = threading.Event()
    destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", lambda: go_on.wait() and destroy())
    monkeypatch.setattr(mesh, "LEAVE_S", 0.2)
    begin_s = time.monotonic()
    with mesh.process_group(ALONE, CPU):
        pass
    assert time.monotonic() - begin_s < 5.0
    assert "could not be destroyed within 0.2 s" in capfd.readouterr().err
    go_on.set()
    while dist.is_initialized():
        time.sleep(0.01)


def test_the_reporting_rank_leaves_last(monkeypatch):
    monkeypatch.setenv(mesh.LEAVES_LAST_VARIABLE, "1")
    monkeypatch.setenv(mesh.COLLECTIVE_TIMEOUT_VARIABLE, "3000")
    with mesh.process_group(ALONE, CPU):
        pass
    assert dist.is_initialized(), "the report is not sent yet"
    assert mesh.leave_gang(ends_process=True)
    assert not dist.is_initialized()
    assert mesh.leave_gang(), "there is nothing to leave any more"


def test_an_ending_process_destroys_only_gloo_groups():
    """NCCL's destruction waits for all ranks, and the driver frees what the process had. torch's own stand-in for a
    backend is no gloo either."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert not mesh.leave_gang(ends_process=True)
    assert dist.is_initialized(), "left to the end of the process"
    assert mesh.leave_gang(), "where the process goes on, the group must not"
    assert not dist.is_initialized()


class Options(dist.ProcessGroupGloo._Options):
    """Stands in for NCCL's, which only builds of torch for CUDA have: gloo takes them as its own."""

    made: list = []

    def __init__(self, *, is_high_priority_stream=False):
        super().__init__()
        self.is_hurried = is_high_priority_stream
        self.made.append(self)


def groups_of(layout, backend):
    """Timeouts in s of the hurried options made, which axes have a separate group, and what they sum up."""
    os.environ[mesh.COLLECTIVE_TIMEOUT_VARIABLE] = "77"
    dist.get_backend = lambda *_: backend
    dist.ProcessGroupNCCL = SimpleNamespace(Options=Options)
    made = mesh.build_mesh(layout, CPU)
    number = torch.ones(())
    for axis in made.mesh_dim_names:
        dist.all_reduce(number, group=made.get_group(axis))
    given = [options._timeout.total_seconds() for options in Options.made if options.is_hurried]
    own = [axis for axis in made.mesh_dim_names if made.get_group(axis) is not dist.group.WORLD]
    return given, own, number.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "backend", "num_hurried"),
    [(Layout(tp=2), "nccl", 1), (Layout(dp_replicate=2), "nccl", 0), (Layout(cp=2, tp=2), "nccl", 2)],
)
def test_collectives_hidden_by_matmuls_have_priority(layout, backend, num_hurried, tmp_path):
    """The groups of tp and cp are NCCL's with streams of high priority, and wait as long as the gang."""
    for given, own, total in run_ranks(groups_of, layout.world_size, tmp_path, layout, backend):
        assert given == [77.0] * num_hurried
        assert len(own) == (num_hurried if layout.world_size == 2 else 2)
        assert total == layout.world_size


def test_a_torch_without_group_priorities_makes_plain_groups(monkeypatch):
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(mesh, "init_device_mesh", lambda device_type, mesh_shape, *, mesh_dim_names: mesh_dim_names)
    assert mesh.build_mesh(Layout(tp=2), CPU) == ("tp",)
