"""Measuring: when warm-up and measuring end, what a step consists of, and a host that runs ahead of its device."""

from __future__ import annotations

import dataclasses
import gc
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.trials.gang import run_gang
from tests.trials.tiny import tiny_spec
from trials.failure import InfeasibleSpec
from trials.files import from_json, to_json
from trials.outcome import RankReport, ignore_progress
from trials.parallel.mesh import RankIdentity, process_group
from trials.spec import ImageFolderData, Kernels, Layout, Protocol, ResNetModel, Workload
from trials.training import loop as steps
from trials.training import measure as clock
from trials.training import measure as feed
from trials.training.measure import PHASES, Measurer, PeakMemory, StepClock, is_enough, is_stable, relative_spread
from trials.worker import run_rank

PROTOCOL = Protocol(min_warmup_steps=2, max_warmup_steps=5, warmup_tolerance=0.2, num_steps=4, max_steps=6)


@pytest.mark.parametrize(
    ("times_s", "stable"),
    [
        ([], False),
        ([1.0], False),
        ([9.0, 1.0], False),
        ([1.0, 1.2], True),
        ([1.0, 0.7], False),
        ([9.0, 1.0, 1.1], True),
        ([1.0, 2.0, 4.0, 8.0], False),
        ([1.0, 2.0, 4.0, 8.0, 16.0], True),
    ],
)
def test_warmup_ends_when_stable_or_at_its_limit(times_s, stable):
    assert is_stable(times_s, PROTOCOL) == stable


@pytest.mark.parametrize(
    ("times_s", "enough"),
    [
        ([1.0] * 3, False),
        ([1.0] * 4, True),
        ([1.0, 2.0, 1.0, 2.0], False),
        ([1.0, 1.0, 1.0, 9.0], False),
        ([1.0, 1.0, 1.0, 1.0, 9.0], True),
        ([1.0, 2.0, 1.0, 2.0, 1.0, 2.0], True),
    ],
)
def test_measuring_goes_on_while_times_spread(times_s, enough):
    assert is_enough(times_s, PROTOCOL) == enough


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=30), st.floats(0.1, 10.0))
def test_spread_does_not_depend_on_the_unit(times_s, unit):
    spread = relative_spread(times_s)
    assert spread >= 0.0
    assert relative_spread([time * unit for time in times_s]) == pytest.approx(spread, rel=1e-6, abs=1e-9)


def test_phases_add_up_to_the_step():
    clock = StepClock(torch.device("cpu"))
    clock.start()
    for phase in ("data", "forward", "backward", "bubble", "forward", "backward", "other", "optimizer"):
        sum(range(2000))
        clock.mark(phase)
    step_time_s, phases_s = clock.stop().read()
    assert set(phases_s) == set(PHASES)
    assert all(seconds > 0.0 for seconds in phases_s.values())
    assert sum(phases_s.values()) == pytest.approx(step_time_s)


def run_alone(spec, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TUNE_CLUSTER_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    calls = []
    report = run_rank(
        to_json(spec), lambda phase, *, step=0, step_time_s=None, **_: calls.append((phase, step, step_time_s))
    )
    return from_json(RankReport, report), calls


def test_a_run_reports_progress_and_figures(monkeypatch):
    spec = tiny_spec()
    report, calls = run_alone(spec, monkeypatch)
    warmup = [("warmup", step) for step in range(3)]
    measuring = [("measuring", step) for step in range(4)]
    assert [call[:2] for call in calls] == [("starting", 0), *warmup, *measuring]
    assert [call[2] for call in calls if call[0] == "measuring" and call[1]] == list(report.step_times_s)
    assert (report.num_warmup_steps, len(report.step_times_s), len(report.losses)) == (2, 3, 5)
    assert report.tokens_per_step == 8 * 16
    assert report.compile_s == 0.0 and report.num_skipped_steps == 0
    assert (report.device_name, report.matmul_format) == ("", "float32")
    assert report.peak_allocated_bytes > 0
    assert 5.0 < report.losses[-1] < report.losses[0] < 6.0
    parts = report.breakdown
    total_s = parts.data_s + parts.forward_s + parts.backward_s + parts.optimizer_s + parts.other_s
    assert total_s == pytest.approx(sum(report.step_times_s) / 3)
    assert gc.isenabled()


def test_compile_time_is_reported_apart(monkeypatch):
    plain, _ = run_alone(tiny_spec(), monkeypatch)
    with warnings.catch_warnings(action="ignore"):  # dynamo warns of what it does to itself
        graph, _ = run_alone(tiny_spec(kernels=Kernels(compile="block", backend="eager")), monkeypatch)
    assert graph.compile_s > max(graph.step_times_s)
    assert graph.losses == pytest.approx(plain.losses, abs=1e-5)


def test_steps_that_tune_kernels_are_warm_up(monkeypatch):
    images = Workload(
        # Four channels in NHWC: oneDNN writes past its buffers on CPUs without AVX-512.
        model=ResNetModel(depth=18, num_classes=10, image_size=32, width=8),
        data=ImageFolderData(),
        seq_length=1,
        global_batch_size=4,
    )
    kernels = Kernels(cudnn_tuning_range=(1, 4))
    report, _ = run_alone(tiny_spec(workload=images, kernels=kernels), monkeypatch)
    found = report.findings.kernel_tuning
    assert report.num_warmup_steps == 4 and found is not None
    # Twenty convolutions a step, nine of them like another one; all met again in the three measured steps.
    assert (found.num_configurations, found.num_lookups, found.num_hits) == (11, 3 * 20, 3 * 20)
    # Comparing memory formats runs them all before the first step.
    kernels = Kernels(cudnn_tuning_range=(2, 4), memory_format="auto")
    report, _ = run_alone(tiny_spec(workload=images, kernels=kernels), monkeypatch)
    found = report.findings.kernel_tuning
    assert found is not None and found.num_hits == found.num_lookups == 3 * 20
    assert found.num_configurations > 11 and "before step" not in found.note


def test_a_peak_can_be_reset_but_not_the_memory_in_use():
    memory = PeakMemory(torch.device("cpu"))
    kept, passing = torch.ones(16 << 20), torch.ones(64 << 20)
    assert memory.peaks().allocated > 0.9 * (kept.nbytes + passing.nbytes)
    del passing
    memory.restart()
    assert 0.5 * kept.nbytes < memory.peaks().allocated < 2 * kept.nbytes


def test_memory_freed_earlier_does_not_reduce_the_peak():
    """Freed pieces that the C library keeps as one whole would take a tensor without any growth."""
    pieces = [torch.ones(16 << 10) for _ in range(1 << 10)]  # 64 KiB each: of the heap, not mapped one by one
    fence = torch.ones(1 << 10)  # the heap's end cannot be given back by itself
    del pieces
    memory = PeakMemory(torch.device("cpu"))
    kept = torch.ones(8 << 20)
    assert memory.peaks().allocated > 0.9 * kept.nbytes
    del fence


def test_file_pages_do_not_count_as_model_memory(tmp_path):
    """Code that is touched first and data that is mapped are the same whatever the candidate."""
    file = tmp_path / "data"
    file.write_bytes(bytes(64 << 20))
    memory = PeakMemory(torch.device("cpu"))
    kept = torch.ones(24 << 20)
    mapped = torch.from_file(str(file), size=64 << 20, dtype=torch.uint8)
    assert int(mapped.view(torch.int64).sum()) == 0
    assert 0.9 * kept.nbytes < memory.peaks().allocated < 1.5 * kept.nbytes


def test_the_runner_refuses_an_attention_backend_the_cpu_lacks(monkeypatch):
    with pytest.raises(InfeasibleSpec, match="use one of: auto, flash, math"):
        run_alone(tiny_spec(kernels=Kernels(attention="cudnn")), monkeypatch)
    torch.distributed.destroy_process_group()  # after an error the runner leaves it to the end of the process


THREE_AND_FOUR = Protocol(min_warmup_steps=3, max_warmup_steps=3, num_steps=4, max_steps=4)


class Device:
    """An accelerator's queues as the host sees them: work is given at once and done in its time."""

    def __init__(self):
        self.host_s = 0.0
        self.current = Queue(self)
        self.waits = []
        """Of every time the host waited: whether the device had something to do when it went on."""


class Queue:
    """One stream."""

    def __init__(self, device):
        self.device = device
        self.free_at_s = 0.0

    def work(self, seconds):
        self.free_at_s = max(self.free_at_s, self.device.host_s) + seconds

    def wait_stream(self, other):
        self.free_at_s = max(self.free_at_s, other.free_at_s)


class LateMark:
    """An event: it cannot be read before the device has reached it."""

    def __init__(self, device):
        self.device = device
        self.at_s = max(device.current.free_at_s, device.host_s)

    def synchronize(self):
        device = self.device
        if self.at_s > device.host_s:
            device.host_s = self.at_s
            device.waits.append(device.current.free_at_s > device.host_s)

    def elapsed_time(self, end):
        assert end.at_s <= self.device.host_s, "read before the device has come there"
        return (end.at_s - self.at_s) * 1e3


@contextmanager
def stand_in(device, monkeypatch, copy_s):
    """Let marks and streams be those of ``device``; a batch takes ``copy_s`` to be copied to it."""

    @contextmanager
    def on_stream(stream):
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

    def __init__(self, device, steps_s, losses):
        self.device = torch.device("cpu")
        self.reads_inputs = self.reads_targets = True
        self.parts = [SimpleNamespace(recompute_meter=Meter(), cast_meter=Meter(), fused_meter=Meter())]
        self.scaler = self.balance = None
        self.num_steps = 0
        self._on, self._steps_s, self._losses = device, steps_s, losses

    def step(self, _inputs, _targets, marker):
        seconds = next(self._steps_s)
        self.num_steps += 1
        self._on.host_s += 0.1 * seconds
        self._on.current.work(seconds)
        marker.mark("forward")
        return torch.tensor([next(self._losses), 1.0], dtype=torch.float64)

    result = steps.Trainer.result


class Meter:
    def reset(self):
        pass


def measure(monkeypatch, *, load_s, copy_s=0.3, protocol=THREE_AND_FOUR, losses=()):
    """Measure steps of 1 s for which the loader takes ``load_s`` and the copy to the device ``copy_s``."""
    device = Device()

    def batches():
        while True:
            device.host_s += load_s
            yield torch.zeros(1), torch.zeros(1)

    def loss():
        yield from losses
        while True:
            yield 2.0

    def seconds():
        while True:
            yield 1.0

    training = Training(device, seconds(), loss())
    with stand_in(device, monkeypatch, copy_s):
        recording = Measurer(training, batches(), ignore_progress).run(protocol)
    return recording, device, training


def test_a_loader_that_keeps_up_costs_nothing(monkeypatch):
    """Read before the device goes on, steps took 1.9 s: nothing was loaded or copied while it worked."""
    recording, device, training = measure(monkeypatch, load_s=0.5)
    assert recording.step_times_s == pytest.approx([1.0] * 4)
    assert recording.breakdown().data_s == pytest.approx(0.0)
    assert recording.breakdown().forward_s == pytest.approx(1.0)
    assert training.num_steps == len(recording.results) == 7
    # The host waits for each step, with the next one under way except after the last.
    assert device.waits == [True] * 6 + [False]


def test_time_that_the_device_waits_for_a_slow_loader_is_data_time(monkeypatch):
    recording, _, _ = measure(monkeypatch, load_s=1.2)
    # The host takes 1.2 s to load and 0.1 s to launch; so often there is a step of 1.0 s, and the copy before it.
    assert recording.step_times_s == pytest.approx([1.3] * 4)
    assert recording.breakdown().data_s == pytest.approx(0.3)


def test_steps_end_where_the_gang_has_agreed(monkeypatch):
    """All steps take as long. That so many did is known when two more are under way, which count as well; and with one
    step of warm-up more the device is at work when measuring begins."""
    protocol = Protocol(min_warmup_steps=2, max_warmup_steps=9, num_steps=5, max_steps=50, max_relative_spread=0.1)
    recording, _, training = measure(monkeypatch, load_s=0.1, copy_s=0.0, protocol=protocol)
    assert len(recording.warmup_times_s) == 2 + 2 + 1
    assert len(recording.step_times_s) == 5 + 2
    assert training.num_steps == len(recording.results) == 12


def test_a_nan_loss_is_found_one_step_late(monkeypatch):
    with pytest.raises(steps.NonFiniteLoss, match="step 3: loss is nan"):
        measure(monkeypatch, load_s=0.1, losses=(2.0, 2.0, float("nan"), 2.0))
    torch.distributed.destroy_process_group()  # after an error the runner leaves it to the end of the process


def _read_late():
    """Have the host's own clock read a step late, as an accelerator's is."""
    made = clock.StepClock.__init__

    def late(self, device):
        made(self, device)
        self.late = 1

    clock.StepClock.__init__ = late


@pytest.mark.slow
def test_ranks_that_read_late_agree_on_the_steps(tmp_path):
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
