"""Joining and leaving the gang."""

import threading
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from trials.parallel import mesh

CPU = torch.device("cpu")
ALONE = mesh.RankIdentity()


def test_leaving_has_a_deadline_of_its_own(monkeypatch, capfd):
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


def test_whoever_has_the_result_told_first_leaves_last(monkeypatch):
    monkeypatch.setenv(mesh.LEAVES_LAST_VARIABLE, "1")
    monkeypatch.setenv(mesh.COLLECTIVE_TIMEOUT_VARIABLE, "3000")
    with mesh.process_group(ALONE, CPU):
        pass
    assert dist.is_initialized(), "the report is still to be told"
    assert mesh.leave_gang(ends_process=True)
    assert not dist.is_initialized()
    assert mesh.leave_gang(), "there is nothing to leave any more"


def test_a_process_that_ends_leaves_all_backends_but_gloo_to_that():
    """NCCL's destruction waits for all ranks, and the driver frees what the process had. torch's own stand-in for a
    backend is no gloo either."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    assert not mesh.leave_gang(ends_process=True)
    assert dist.is_initialized(), "left to the end of the process"
    assert mesh.leave_gang(), "where the process goes on, the group must not"
    assert not dist.is_initialized()
