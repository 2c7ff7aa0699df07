from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trials.tiny import tiny_spec
from trials.failure import InfeasibleSpec
from trials.files import from_json, to_json
from trials.outcome import RankReport
from trials.spec import ImageFolderData, Kernels, Protocol, ResNetModel, TrialSpec, Workload
from trials.training.measure import PHASES, PeakMemory, StepClock, is_enough, is_stable, relative_spread
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
def test_warmup_ends_when_stable_or_at_its_limit(times_s: list[float], stable: bool) -> None:
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
def test_measuring_goes_on_while_times_spread(times_s: list[float], enough: bool) -> None:
    assert is_enough(times_s, PROTOCOL) == enough


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=30), st.floats(0.1, 10.0))
def test_spread_does_not_depend_on_the_unit(times_s: list[float], unit: float) -> None:
    spread = relative_spread(times_s)
    assert spread >= 0.0
    assert relative_spread([time * unit for time in times_s]) == pytest.approx(spread, rel=1e-6, abs=1e-9)


def test_phases_add_up_to_the_step() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.start()
    for phase in ("data", "forward", "backward", "bubble", "forward", "backward", "other", "optimizer"):
        sum(range(2000))
        clock.mark(phase)
    step_time_s, phases_s = clock.stop().read()
    assert set(phases_s) == set(PHASES)
    assert all(seconds > 0.0 for seconds in phases_s.values())
    assert sum(phases_s.values()) == pytest.approx(step_time_s)


def run_alone(spec: TrialSpec, monkeypatch: pytest.MonkeyPatch) -> tuple[RankReport, list[tuple[Any, ...]]]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "TUNE_CLUSTER_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    calls: list[tuple[Any, ...]] = []
    report = run_rank(
        to_json(spec), lambda phase, *, step=0, step_time_s=None, **_: calls.append((phase, step, step_time_s))
    )
    return from_json(RankReport, report), calls


def test_a_run_reports_progress_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_compile_time_is_reported_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = run_alone(tiny_spec(), monkeypatch)
    with warnings.catch_warnings(action="ignore"):  # dynamo warns of what it does to itself
        graph, _ = run_alone(tiny_spec(kernels=Kernels(compile="block", backend="eager")), monkeypatch)
    assert graph.compile_s > max(graph.step_times_s)
    assert graph.losses == pytest.approx(plain.losses, abs=1e-5)


def test_steps_that_tune_kernels_are_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_peak_can_be_forgotten_but_not_what_is_in_use() -> None:
    memory = PeakMemory(torch.device("cpu"))
    kept, passing = torch.ones(16 << 20), torch.ones(64 << 20)
    assert memory.allocated_bytes() > 0.9 * (kept.nbytes + passing.nbytes)
    del passing
    memory.restart()
    assert 0.5 * kept.nbytes < memory.allocated_bytes() < 2 * kept.nbytes


def test_memory_freed_before_is_no_gift_to_the_candidate() -> None:
    """Freed pieces that the C library keeps as one whole would take a tensor without any growth."""
    pieces = [torch.ones(16 << 10) for _ in range(1 << 10)]  # 64 KiB each: of the heap, not mapped one by one
    fence = torch.ones(1 << 10)  # the heap's end cannot be given back by itself
    del pieces
    memory = PeakMemory(torch.device("cpu"))
    kept = torch.ones(8 << 20)
    assert memory.allocated_bytes() > 0.9 * kept.nbytes
    del fence


def test_pages_of_files_are_no_memory_of_the_model(tmp_path: Path) -> None:
    """Code that is touched first and data that is mapped are the same whatever the candidate."""
    file = tmp_path / "data"
    file.write_bytes(bytes(64 << 20))
    memory = PeakMemory(torch.device("cpu"))
    kept = torch.ones(24 << 20)
    mapped = torch.from_file(str(file), size=64 << 20, dtype=torch.uint8)
    assert int(mapped.view(torch.int64).sum()) == 0
    assert 0.9 * kept.nbytes < memory.allocated_bytes() < 1.5 * kept.nbytes


def test_the_runner_refuses_an_attention_backend_the_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InfeasibleSpec, match="use one of: auto, flash, math"):
        run_alone(tiny_spec(kernels=Kernels(attention="cudnn")), monkeypatch)
    torch.distributed.destroy_process_group()  # after an error the runner leaves it to the end of the process
