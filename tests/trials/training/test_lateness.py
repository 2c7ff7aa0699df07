"""The host runs ahead of an accelerator: shown on a device that has a clock but no circuits, and in a real gang."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trials.gang import run_gang
from tests.trials.tiny import tiny_spec
from trials.datasets import Batch
from trials.outcome import RankReport, ignore_progress
from trials.parallel.mesh import RankIdentity, process_group
from trials.spec import Layout, Protocol
from trials.training import loop as steps
from trials.training import measure as clock
from trials.training import measure as feed
from trials.training.measure import Measurer, Recording

THREE_AND_FOUR = Protocol(min_warmup_steps=3, max_warmup_steps=3, num_steps=4, max_steps=4)


class Device:
    """An accelerator's queues as the host sees them: work is given at once and done in its time."""

    def __init__(self) -> None:
        self.host_s = 0.0
        self.current = Queue(self)
        self.waits: list[bool] = []
        """Of every time the host waited: whether the device had something to do when it went on."""


class Queue:
    """One stream."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.free_at_s = 0.0

    def work(self, seconds: float) -> None:
        self.free_at_s = max(self.free_at_s, self.device.host_s) + seconds

    def wait_stream(self, other: Queue) -> None:
        self.free_at_s = max(self.free_at_s, other.free_at_s)


class LateMark:
    """An event: nobody can read it before the device has come to it."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_s = max(device.current.free_at_s, device.host_s)

    def synchronize(self) -> None:
        device = self.device
        if self.at_s > device.host_s:
            device.host_s = self.at_s
            device.waits.append(device.current.free_at_s > device.host_s)

    def elapsed_time(self, end: LateMark) -> float:
        assert end.at_s <= self.device.host_s, "read before the device has come there"
        return (end.at_s - self.at_s) * 1e3


@contextmanager
def stand_in(device: Device, monkeypatch: pytest.MonkeyPatch, copy_s: float) -> Iterator[None]:
    """Let marks and streams be those of ``device``; a batch takes ``copy_s`` to be copied to it."""

    @contextmanager
    def on_stream(stream: Queue) -> Iterator[None]:
        yield
        stream.work(copy_s)

    for module in (clock, steps):
        monkeypatch.setattr(module, "mark", lambda _: LateMark(device))
    monkeypatch.setattr(clock, "is_host", lambda _: False)
    monkeypatch.setattr(feed, "new_stream", lambda _: Queue(device))
    monkeypatch.setattr(feed, "current_stream", lambda _: device.current)
    monkeypatch.setattr(feed, "on_stream", on_stream)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    with process_group(RankIdentity(), torch.device("cpu")):
        yield


class Training:
    """A trainer whose steps take their time on the device, and the host a tenth of it to launch."""

    def __init__(self, device: Device, steps_s: Iterator[float], losses: Iterator[float]) -> None:
        self.device = torch.device("cpu")
        self.reads_inputs = self.reads_targets = True
        self.parts: list[Any] = [SimpleNamespace(recompute_meter=Meter(), cast_meter=Meter())]
        self.scaler = None
        self.num_steps = 0
        self._on, self._steps_s, self._losses = device, steps_s, losses

    def step(self, _inputs: Tensor, _targets: Tensor, marker: clock.StepClock) -> Tensor:
        seconds = next(self._steps_s)
        self.num_steps += 1
        self._on.host_s += 0.1 * seconds
        self._on.current.work(seconds)
        marker.mark("forward")
        return torch.tensor([next(self._losses), 1.0], dtype=torch.float64)

    result = steps.Trainer.result


class Meter:
    def reset(self) -> None:
        pass


def measure(
    monkeypatch: pytest.MonkeyPatch,
    *,
    load_s: float,
    copy_s: float = 0.3,
    protocol: Protocol = THREE_AND_FOUR,
    losses: tuple[float, ...] = (),
) -> tuple[Recording, Device, Training]:
    """Measure steps of 1 s for which the loader takes ``load_s`` and the copy to the device ``copy_s``."""
    device = Device()

    def batches() -> Iterator[Batch]:
        while True:
            device.host_s += load_s
            yield torch.zeros(1), torch.zeros(1)

    def loss() -> Iterator[float]:
        yield from losses
        while True:
            yield 2.0

    def seconds() -> Iterator[float]:
        while True:
            yield 1.0

    training = Training(device, seconds(), loss())
    with stand_in(device, monkeypatch, copy_s):
        recording = Measurer(training, batches(), ignore_progress).run(protocol)  # type: ignore[arg-type]
    return recording, device, training


def test_a_loader_that_keeps_up_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read before the device goes on, steps took 1.9 s: nothing was loaded or copied while it worked."""
    recording, device, training = measure(monkeypatch, load_s=0.5)
    assert recording.step_times_s == pytest.approx([1.0] * 4)
    assert recording.breakdown().data_s == pytest.approx(0.0)
    assert recording.breakdown().forward_s == pytest.approx(1.0)
    assert training.num_steps == len(recording.results) == 7
    # The host waits for each step, with the next one under way except after the last.
    assert device.waits == [True] * 6 + [False]


def test_what_a_slow_loader_makes_the_device_wait_is_time_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    recording, _, _ = measure(monkeypatch, load_s=1.2)
    # The host takes 1.2 s to load and 0.1 s to launch; so often there is a step of 1.0 s, and the copy before it.
    assert recording.step_times_s == pytest.approx([1.3] * 4)
    assert recording.breakdown().data_s == pytest.approx(0.3)


def test_steps_end_where_the_gang_has_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps take as long. That so many did is known when two more are under way, which count as well; and with one
    step of warm-up more the device is at work when measuring begins."""
    protocol = Protocol(min_warmup_steps=2, max_warmup_steps=9, num_steps=5, max_steps=50, max_relative_spread=0.1)
    recording, _, training = measure(monkeypatch, load_s=0.1, copy_s=0.0, protocol=protocol)
    assert len(recording.warmup_times_s) == 2 + 2 + 1
    assert len(recording.step_times_s) == 5 + 2
    assert training.num_steps == len(recording.results) == 12


def test_a_loss_that_is_no_number_is_found_a_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(steps.NonFiniteLoss, match="step 3: loss is nan"):
        measure(monkeypatch, load_s=0.1, losses=(2.0, 2.0, float("nan"), 2.0))
    torch.distributed.destroy_process_group()  # after an error the runner leaves it to the end of the process


def _read_late() -> None:
    """Have the host's own clock read a step late, as an accelerator's is."""
    made = clock.StepClock.__init__

    def late(self: Any, device: torch.device) -> None:
        made(self, device)
        self.late = 1

    clock.StepClock.__init__ = late  # type: ignore[method-assign]


@pytest.mark.slow
def test_ranks_that_read_late_agree_on_the_steps(tmp_path: Path) -> None:
    uneven = Protocol(min_warmup_steps=1, max_warmup_steps=6, num_steps=3, max_steps=30, max_relative_spread=0.02)
    spec = dataclasses.replace(tiny_spec(Layout(dp_replicate=2)), protocol=uneven)
    (late,) = run_gang([spec], tmp_path / "late", before=_read_late)
    assert isinstance(late, RankReport), late
    num_steps = late.num_warmup_steps + len(late.step_times_s)
    assert len(late.losses) == num_steps
    exact = dataclasses.replace(
        uneven,
        min_warmup_steps=late.num_warmup_steps,
        max_warmup_steps=late.num_warmup_steps,
        num_steps=len(late.step_times_s),
        max_steps=len(late.step_times_s),
    )
    (prompt,) = run_gang([dataclasses.replace(spec, protocol=exact)], tmp_path / "prompt")
    assert isinstance(prompt, RankReport), prompt
    assert late.losses == prompt.losses
