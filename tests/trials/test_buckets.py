"""Buckets of ZeRO-1: their content, and which queue accesses them when."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.streams import StreamRaceError, StreamWatch
from trials import offload
from trials.parallel import data_parallel
from trials.parallel.data_parallel import Bucket, BucketedReplica, Kind, Peers, _dealt_out
from trials.parallel.mesh import HeldParameter
from trials.training.optimizer import HostAdamW, LocalAdamW

HELD_BY_ALL, HELD_BY_HALF = Kind(torch.float32, 2, False, None), Kind(torch.float32, 1, False, None)


def test_buckets_fill_from_the_last_parameter_and_are_ordered_by_completion():
    """Sizes of 40 bytes: the norms' bucket is open until the first parameter, so all others come before it."""
    norms, weights = ([nn.Parameter(torch.zeros(10)) for _ in range(3)] for _ in range(2))
    kinds = {}
    for norm, weight in zip(norms, weights, strict=True):
        kinds |= {norm: HELD_BY_ALL, weight: HELD_BY_HALF}
    found = _dealt_out(kinds, 80)
    expected = [(weights[:0:-1], HELD_BY_HALF), (norms[:0:-1], HELD_BY_ALL), (weights[:1], HELD_BY_HALF)]
    assert [([id(one) for one in some], kind) for some, kind in found] == [
        ([id(one) for one in some], kind) for some, kind in [*expected, (norms[:1], HELD_BY_ALL)]
    ]


@pytest.fixture
def peers():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Peers(dist.group.WORLD, None)
    dist.destroy_process_group()


class Picture(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(5, 7)

    def forward(self, x):
        return self.head(self.conv(x).mean(dim=(2, 3)))


def test_trains_as_without_buckets_for_any_memory_format_and_unused_parameters(peers):
    torch.manual_seed(0)
    plain, model = Picture(), Picture()
    model.load_state_dict(plain.state_dict())
    kinds = {parameter: Kind(torch.float32, 1, False, peers) for parameter in model.parameters()}
    replica = BucketedReplica(model, kinds, torch.device("cpu"))
    model.conv.weight.data = model.conv.weight.data.contiguous(memory_format=torch.channels_last)
    ours = LocalAdamW(replica.buckets, lr=1e-2)
    theirs = LocalAdamW([HeldParameter(parameter) for parameter in plain.parameters()], lr=1e-2)
    for _ in range(3):
        for i in (0, 1):
            batch = torch.randn(2, 3, 8, 8)
            replica.reduces = i == 1
            for one in (replica, plain):
                one(batch).square().mean().backward()
        replica.finish()
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    for name, parameter in plain.named_parameters():
        if "unused" not in name:
            torch.testing.assert_close(model.get_parameter(name), parameter, msg=name)
    (bucket,) = replica.buckets
    assert bucket.values().numel() >= sum(parameter.numel() for parameter in plain.parameters())


def test_gradients_are_reduced_while_the_backward_pass_runs(peers, monkeypatch):
    monkeypatch.setattr("trials.parallel.data_parallel.BUCKET_BYTES", 1)
    monkeypatch.setattr("trials.parallel.data_parallel.SLICE_BYTES", 1)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    kinds = {parameter: Kind(torch.float32, 1, False, peers) for parameter in model.parameters()}
    replica = BucketedReplica(model, kinds, torch.device("cpu"))
    begun = []
    x = torch.randn(2, 4)
    hidden = model[0](x)
    hidden.register_hook(lambda _: begun.append(replica._num_reduced))
    replica.bind()
    model[1](hidden).sum().backward()
    assert begun == [1] and replica._num_reduced == 2


CPU = torch.device("cpu")
UPDATE, GATHER = "_fused_adamw_.default", "_allgather_base_.default"
SCATTER, REDUCE = "_reduce_scatter_base_.default", "allreduce_.default"


class Training:
    """Four layers with a bucket each, whose states have replicas, on a device with streams."""

    def __init__(self, monkeypatch, group, dtype, *, on_host):
        monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 1)
        monkeypatch.setattr(data_parallel, "SLICE_BYTES", 1)
        monkeypatch.setattr("trials.training.optimizer.WORKSPACE_BYTES", 4 * 64)
        monkeypatch.setattr("trials.training.optimizer.WORKSPACE_BYTES", 4 * 64)
        self.watch = StreamWatch().installed(monkeypatch, data_parallel, offload)
        monkeypatch.setattr(offload, "allocating", self.watch.on_host)
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8, bias=False, dtype=dtype) for _ in range(4)]
        model = nn.Sequential(*layers)
        kinds = {parameter: Kind(dtype, 1, False, Peers(group, group)) for parameter in model.parameters()}
        with self.watch:
            self.replica = BucketedReplica(model, kinds, CPU, layers)
        held = self.replica.buckets[::-1]
        self.optimizer = HostAdamW(held, CPU) if on_host else LocalAdamW(held)
        self._dtype = dtype

    def run(self, num_steps):
        with self.watch:
            for _ in range(num_steps):
                for i in range(2):
                    self.replica.reduces = i == 1
                    self.replica(torch.ones(2, 8, dtype=self._dtype)).square().mean().backward()
                self.replica.finish()
                self.optimizer.step()
                self.optimizer.zero_grad()


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_bucket_is_accessed_too_early(monkeypatch, group, dtype, on_host):
    training = Training(monkeypatch, group, dtype, on_host=on_host)
    training.run(3)
    launches = training.watch.communication.launches
    assert (
        launches.count("_reduce_scatter_base_.default")
        == launches.count(GATHER)
        == launches.count("allreduce_.default")
        == 12
    )


def test_weights_are_sent_as_soon_as_they_are_updated_and_awaited_layer_by_layer(monkeypatch, group):
    training = Training(monkeypatch, group, torch.float32, on_host=False)
    training.run(1)
    log = training.watch.log
    assert [name for name in log if name in (UPDATE, GATHER, f"wait {GATHER}")] == [UPDATE, GATHER] * 4
    log.clear()
    training.run(1)
    forward = log[: log.index("mean.default")]
    assert [name for name in forward if name in ("mm.default", f"wait {GATHER}")] == [
        f"wait {GATHER}",
        "mm.default",
    ] * 4


def _none(*_):
    pass


REMOVED = {
    "weights are there": lambda patch, _: patch.setattr(Bucket, "wait_for_values", _none),
    "gradients are reduced": lambda patch, _: patch.setattr(Bucket, "wait", _none),
    "gradients are made": lambda patch, one: patch.setattr(one.replica._stream, "wait_stream", _none),
    "all is reduced": lambda patch, one: patch.setattr(one.watch.compute, "wait_stream", _none),
}


@pytest.mark.parametrize("wait", REMOVED)
def test_a_missing_wait_is_detected(monkeypatch, group, wait):
    training = Training(monkeypatch, group, torch.float32, on_host=False)
    REMOVED[wait](monkeypatch, training)
    with pytest.raises(StreamRaceError):
        training.run(2)
