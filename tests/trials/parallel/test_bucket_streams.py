"""Buckets on a device with several queues: nobody reads or overwrites what another queue is still at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.streams import StreamRaceError, StreamWatch
from trials import offload
from trials.parallel import data_parallel
from trials.parallel.data_parallel import Bucket, BucketedReplica, Kind, Peers
from trials.training.optimizer import HostAdamW, LocalAdamW

CPU = torch.device("cpu")
UPDATE, GATHER = "_fused_adamw_.default", "_allgather_base_.default"
SCATTER, REDUCE = "_reduce_scatter_base_.default", "allreduce_.default"


class Training:
    """Four layers with a bucket each, whose states have replicas, on a device with streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group: Any, dtype: torch.dtype, *, on_host: bool) -> None:
        monkeypatch.setattr(data_parallel, "BUCKET_BYTES", 1)
        monkeypatch.setattr(data_parallel, "SLICE_BYTES", 1)
        monkeypatch.setattr("trials.training.optimizer.WORKSPACE_BYTES", 4 * 64)
        monkeypatch.setattr("trials.training.optimizer.WORKSPACE_BYTES", 4 * 64)
        self.watch = StreamWatch().installed(monkeypatch, data_parallel, offload)
        monkeypatch.setattr(offload, "allocating", self.watch.on_host)
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8, bias=False, dtype=dtype) for _ in range(4)]
        model = nn.Sequential(*layers)
        kinds = {parameter: Kind(dtype, 1, False) for parameter in model.parameters()}
        with self.watch:
            self.replica = BucketedReplica(model, kinds, Peers(group, group), CPU, layers)
        held = self.replica.buckets[::-1]
        self.optimizer = HostAdamW(held, CPU) if on_host else LocalAdamW(held)
        self._dtype = dtype

    def run(self, num_steps: int) -> None:
        with self.watch:
            for _ in range(num_steps):
                for i in range(2):
                    self.replica.reduces = i == 1
                    self.replica(torch.ones(2, 8, dtype=self._dtype)).square().mean().backward()
                self.replica.finish()
                self.optimizer.step()
                self.optimizer.zero_grad()


@pytest.fixture
def group() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_bucket_is_touched_before_its_time(
    monkeypatch: pytest.MonkeyPatch, group: Any, dtype: torch.dtype, on_host: bool
) -> None:
    training = Training(monkeypatch, group, dtype, on_host=on_host)
    training.run(3)
    launches = training.watch.communication.launches
    assert (
        launches.count("_reduce_scatter_base_.default")
        == launches.count(GATHER)
        == launches.count("allreduce_.default")
        == 12
    )


def test_weights_are_sent_as_soon_as_they_are_updated_and_awaited_layer_by_layer(
    monkeypatch: pytest.MonkeyPatch, group: Any
) -> None:
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


def _none(*_: Any) -> None:
    pass


REMOVED: dict[str, Callable[[pytest.MonkeyPatch, Training], None]] = {
    "weights are there": lambda patch, _: patch.setattr(Bucket, "settle", _none),
    "gradients are reduced": lambda patch, _: patch.setattr(Bucket, "wait", _none),
    "gradients are made": lambda patch, one: patch.setattr(one.replica._stream, "wait_stream", _none),
    "all is reduced": lambda patch, one: patch.setattr(one.watch.compute, "wait_stream", _none),
}


@pytest.mark.parametrize("wait", REMOVED)
def test_a_wait_that_is_lacking_is_seen(monkeypatch: pytest.MonkeyPatch, group: Any, wait: str) -> None:
    training = Training(monkeypatch, group, torch.float32, on_host=False)
    REMOVED[wait](monkeypatch, training)
    with pytest.raises(StreamRaceError):
        training.run(2)
