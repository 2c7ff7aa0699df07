"""What the tracker of memory counts, and each place where torch is patched for a simulated world."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trials.dryrun import tracker as fake
from trials.dryrun.simulate import held_sends, static_shapes
from trials.dryrun.tracker import MemoryTracker

KIB = 1024


@pytest.fixture
def tracker():
    made = MemoryTracker()
    with FakeTensorMode(allow_non_fake_inputs=True), made:
        yield made


@pytest.fixture
def world():
    with fake.fake_process_group(3, 8):
        yield


def test_storages_count_once_until_freed(tracker):
    tracker.place = "a"
    first = torch.empty(KIB, dtype=torch.uint8)
    view = first.view(2, -1)[1]
    second = torch.empty(2 * KIB, dtype=torch.uint8)
    assert tracker.total_bytes == 3 * KIB
    del first
    gc.collect()
    assert tracker.total_bytes == 3 * KIB, "a view keeps the whole storage"
    tracker.place = "b"
    del view
    third = torch.empty(512, dtype=torch.uint8)
    assert tracker.total_bytes == second.nbytes + third.nbytes
    peaks = {key: peak.total_bytes for key, peak in tracker.peaks().items()}
    assert peaks == {"forward/0/a": 3 * KIB, "forward/0/b": 2 * KIB + 512}


def test_sizes_are_rounded_up_as_the_allocator_does():
    tracker = MemoryTracker(granule_bytes=512)
    with FakeTensorMode(), tracker:
        kept = [torch.empty(1), torch.empty(129)]
        assert tracker.total_bytes == 512 + 1024
    del kept


def test_categories_of_a_training_step(tracker):
    weight = nn.Parameter(torch.empty(256, 256))
    tracker.assign([weight], "param")
    x = torch.empty(4, 256)
    tracker.assign([x], "input")
    loss = (x @ weight).relu().sum()
    assert tracker.live_bytes["param"] == 256 * KIB
    assert tracker.live_bytes["input"] == 4 * KIB
    assert tracker.live_bytes["activation"] == 4 * KIB + 4
    claim = lambda parameter: tracker.assign([parameter.grad], "grad")  # noqa: E731
    weight.register_post_accumulate_grad_hook(claim)
    torch.autograd.backward(loss)
    assert tracker.live_bytes["grad"] == 256 * KIB
    assert tracker.live_bytes["temporary"] == 0
    peak = max(tracker.peaks().values(), key=lambda peak: peak.total_bytes)
    assert sum(peak.by_category.values()) == peak.total_bytes
    tracker.reclassify(("grad",), "optimizer")
    assert tracker.live_bytes["optimizer"] == 256 * KIB


def test_flops_by_what_they_are_for(tracker):
    weight = torch.empty(64, 32, requires_grad=True)
    x = torch.empty(8, 64, requires_grad=True)
    matmul_flops = 2 * 8 * 64 * 32

    torch.utils.checkpoint.checkpoint(lambda x: (x @ weight).relu(), x, use_reentrant=False).sum().backward()
    assert tracker.flops == {"forward": matmul_flops, "backward": 2 * matmul_flops, "recompute": matmul_flops}


def test_collectives_are_counted_by_their_larger_side(world, tracker):
    part, whole = torch.empty(KIB), torch.empty(8 * KIB)
    dist.all_gather_single(whole, part)
    dist.reduce_scatter_single(part, whole)
    dist.all_reduce(part)
    traffic = {name: (one.num_calls, one.num_bytes) for name, one in tracker.collectives().items()}
    assert traffic == {"all_gather": (1, 32 * KIB), "reduce_scatter": (1, 32 * KIB), "all_reduce": (1, 4 * KIB)}
    assert tracker.live_bytes["communication"] == 36 * KIB


def test_resizing_a_storage_is_tracked(tracker):
    before = torch.UntypedStorage.resize_
    with fake.tracked_resizes(tracker):
        gathered = torch.empty(KIB)
        gathered.untyped_storage().resize_(0)
        assert tracker.total_bytes == 0
        gathered.untyped_storage().resize_(4 * KIB)
        assert tracker.live_bytes["communication"] == 4 * KIB
    assert torch.UntypedStorage.resize_ is before


def test_shape_propagation_of_dtensors_does_not_count(world):
    mesh = init_device_mesh("cpu", (8,))
    tracker = MemoryTracker()
    with FakeTensorMode(allow_non_fake_inputs=True), tracker, fake.untracked_propagation(tracker):
        x = distribute_tensor(torch.empty(8, KIB), mesh, [Shard(0)], src_data_rank=None)
        gc.collect()
        before = max(peak.total_bytes for peak in tracker.peaks().values())
        tracker.restart()
        y = x.sin()
        grown = max(peak.total_bytes for peak in tracker.peaks().values())
    assert isinstance(y, DTensor) and y.to_local().shape == (1, KIB)
    assert grown < before + 8 * KIB


def test_replica_behaves_like_ddp_in_memory(tracker):
    model = nn.Linear(256, 256, bias=False)
    tracker.assign(model.parameters(), "param")
    replica = fake.Replica(model, tracker)
    size = 256 * 256 * 4
    assert tracker.live_bytes["grad"] == size, "the buckets"
    replica.require_backward_grad_sync = False
    replica(torch.empty(1, 256)).sum().backward()
    assert tracker.live_bytes["grad"] + tracker.live_bytes["temporary"] == 2 * size, "and a gradient of its own"
    assert not tracker.collectives()
    replica.require_backward_grad_sync = True
    replica(torch.empty(1, 256)).sum().backward()
    gc.collect()
    assert tracker.live_bytes["grad"] + tracker.live_bytes["temporary"] == size
    assert tracker.collectives()["all_reduce"].num_bytes == size


def test_buckets_fill_up_as_those_of_ddp():
    mib = 1 << 20
    assert fake.bucket_sizes([20 * mib, 20 * mib, 2 * mib]) == [2 * mib, 40 * mib]


def test_fused_norm_keeps_its_input_and_one_number_per_row(tracker):
    x = torch.empty(8, 256, requires_grad=True)
    weight = torch.empty(256, requires_grad=True)
    before = tracker.total_bytes
    with fake.fused_rms_norm():
        y = F.rms_norm(x, (256,), weight, 1e-5)
        assert tracker.total_bytes - before == y.nbytes + 8 * 4
        torch.autograd.backward(y.sum())
    assert x.grad is not None and weight.grad is not None and weight.grad.shape == (256,)


def test_patched_functions_are_restored():
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    before = _PipelineSchedule._warmup_p2p, schedules._batch_p2p
    with static_shapes(), held_sends():
        assert _PipelineSchedule._warmup_p2p is not before[0] and schedules._batch_p2p is not before[1]
    assert (_PipelineSchedule._warmup_p2p, schedules._batch_p2p) == before


def test_a_sent_tensor_lives_until_the_wait(world, tracker):
    from torch.distributed.pipelining import schedules

    with held_sends():
        works = schedules._batch_p2p([dist.P2POp(dist.isend, torch.empty(KIB), 2)])
        gc.collect()
        assert tracker.total_bytes == 4 * KIB
        works[0].wait()
        gc.collect()
        assert tracker.total_bytes == 0
    assert tracker.collectives()["send"].num_bytes == 4 * KIB
