"""Offloading on a device with several queues: no copy is read before it is there, no memory used again before it is
free, and what goes out does not wait for what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.streams import StreamRaceError, StreamWatch, WatchedEvent
from tests.trials.offload.test_activations import DEEP, O1, ON
from tests.trials.tiny import tiny_spec
from trials import offload
from trials.dryrun.estimate import HOST_FRAGMENTATION
from trials.models.built_in import next_token_loss
from trials.offload import CopyStream, HostMemory, Region
from trials.parallel.mesh import HeldParameter
from trials.spec import Precision
from trials.training.loop import parallelize
from trials.training.optimizer import HostAdamW

CPU = torch.device("cpu")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> StreamWatch:
    """A device with queues, and memory of its own for copies on the host, of which regions serve again."""
    made = StreamWatch().installed(monkeypatch, offload)
    monkeypatch.setattr(offload, "allocating", made.on_host)
    memory = HostMemory(CPU)
    memory._locks_pages = True

    def cut(size: int) -> Tensor:
        with offload.allocating():
            return torch.empty(size, dtype=torch.uint8)  # races are told apart by storage

    monkeypatch.setattr(memory, "_cut", cut)
    for module in ("trials.offload", "trials.training.optimizer"):
        monkeypatch.setattr(f"{module}.memory_beside", lambda _device: memory)
    return made


class Layers:
    """Five layers whose activations move, two micro-batches at a time as in a pipeline."""

    def __init__(self, precision: Precision) -> None:
        spec = tiny_spec(workload=DEEP, offload=ON, precision=precision)
        (self.part,) = parallelize(spec, None, CPU, stage=0)
        self._autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision.level == "O1")

    def run(self, watch: StreamWatch) -> None:
        tokens = torch.arange(64).view(4, 16)
        with watch:
            waiting: list[Tensor] = []
            for number in range(4):
                with self._autocast:
                    waiting.append(next_token_loss(self.part.module(tokens), tokens))
                if number:
                    waiting.pop(0).backward()
            waiting.pop().backward()


@pytest.mark.parametrize("precision", [Precision(), O1], ids=["O0", "O1"])
def test_activations_are_touched_by_one_queue_at_a_time(watch: StreamWatch, precision: Precision) -> None:
    layers = Layers(precision)
    layers.run(watch)
    _, out, back = watch.streams
    assert len(out.launches) == len(back.launches) > 4 * 4 * 10


def _none(*_: Any) -> None:
    pass


def without(way: str, name: str) -> Callable[[pytest.MonkeyPatch, Any], None]:
    """Leave out one kind of wait of one way's queue."""

    def patch(monkeypatch: pytest.MonkeyPatch, ways: Any) -> None:
        monkeypatch.setattr(getattr(ways, way), name, _none)

    return patch


LAYER_WAITS = {
    "activations are made": without("out", "follow"),
    "the device may write where they were": without("out", "wait_for"),
    "the device may write where they come": without("back", "follow"),
    "they are back": without("back", "wait_for"),
}


@pytest.mark.parametrize("wait", LAYER_WAITS)
def test_a_wait_that_activations_lack_is_seen(watch: StreamWatch, monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    layers = Layers(Precision())
    call: Any = next(iter(layers.part.model.layers.values()))._compiled_call_impl
    LAYER_WAITS[wait](monkeypatch, next(one for one in call.args if hasattr(one, "out")))
    with pytest.raises(StreamRaceError):
        layers.run(watch)


def test_host_memory_serves_again_once_nobody_is_at_it(watch: StreamWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    here = torch.ones(4)

    def use_twice() -> None:
        memory: HostMemory = offload.HostMemory(CPU)
        memory._locks_pages = True
        monkeypatch.setattr(memory, "_cut", lambda size: torch.empty(size, dtype=torch.uint8))
        for stream in (CopyStream(CPU), CopyStream(CPU)):
            region = memory.take(here.nbytes)
            stream.follow()
            stream.follow_mark(region.busy_until)
            stream.copy(region.like(here), here)
            memory.give_back(region, stream.mark())

    with watch, watch.on_host():
        use_twice()
    monkeypatch.setattr(CopyStream, "follow_mark", _none)
    with pytest.raises(StreamRaceError, match="copy_"), watch, watch.on_host():
        use_twice()


class Update:
    """Five groups of one parameter each, in steps whose gradients the device makes from the weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
        monkeypatch.setattr("trials.training.optimizer.WORKSPACE_BYTES", 4 * 100)
        self.parameters = [nn.Parameter(torch.ones(10, 10, dtype=dtype)) for _ in range(5)]
        self.optimizer = HostAdamW([HeldParameter(one) for one in self.parameters], CPU)

    def run(self, watch: StreamWatch) -> None:
        with watch:
            for _ in range(3):
                for one in self.parameters:
                    one.grad = one.detach().t() * 2  # laid out otherwise: cut from a copy of its own
                self.optimizer.step()
                self.optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_touched_by_one_queue_at_a_time(
    watch: StreamWatch, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    update = Update(monkeypatch, dtype)
    update.run(watch)
    _, out, back = watch.streams
    assert out.launches.count("copy_.default") == back.launches.count("copy_.default") == 15


def test_gradients_go_out_while_weights_come_back(watch: StreamWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step of five groups what goes out knows of one that came back: the host needed its buffer again."""
    update = Update(monkeypatch, torch.bfloat16)
    update.run(watch)
    _, out, back = watch.streams
    assert len(back.launches) == 3 * 5
    assert out.clock[back.name] == 2 * 5 + 1


UPDATE_WAITS: dict[str, Callable[[pytest.MonkeyPatch, HostAdamW], None]] = {
    "gradients are made": lambda patch, one: patch.setattr(one._out, "follow", _none),
    "gradients are out": lambda patch, _: patch.setattr(WatchedEvent, "synchronize", _none),
    "weights are back": lambda patch, one: patch.setattr(one._back, "wait_for", _none),
    "weights have left the buffer": lambda patch, _: patch.setattr(
        "trials.training.optimizer._Buffers.begin_weights", _restart_only
    ),
}


def _restart_only(buffers: Any) -> None:
    buffers._used["weights"] = 0


@pytest.mark.parametrize("wait", UPDATE_WAITS)
def test_a_wait_that_the_update_lacks_is_seen(watch: StreamWatch, monkeypatch: pytest.MonkeyPatch, wait: str) -> None:
    update = Update(monkeypatch, torch.bfloat16)
    UPDATE_WAITS[wait](monkeypatch, update.optimizer)
    with pytest.raises(StreamRaceError):
        update.run(watch)


def test_page_locked_memory_is_little_more_than_what_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """What layers of Llama-2-7B keep of 4096 tokens, in kilobytes for megabytes: torch alone would round each piece up
    to a power of two, here 28 % more."""
    monkeypatch.setattr(offload, "locked_slab", lambda size: torch.empty(size, dtype=torch.uint8))
    memory = HostMemory(CPU)
    memory._locks_pages = True
    sizes = [one << 10 for one in (32, 32, 32, 32, 32, 32, 86, 86, 86)]
    for _ in range(3):
        regions: list[Region] = [memory.take(size) for _ in range(32) for size in sizes]
        for region in reversed(regions):
            memory.give_back(region, None)
    in_use = 32 * sum(sizes)
    rounded = 32 * sum(1 << (size - 1).bit_length() for size in sizes)
    assert in_use <= memory.num_bytes < (1 + HOST_FRAGMENTATION) * in_use < rounded
