"""States of the optimiser in host memory: nothing of theirs on the device, and the same training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.dryrun.cases import FAMILIES
from benchmarks.dryrun.gang import measured_peaks
from tests.trials.gang import differences, run_gang
from tests.trials.offload.test_activations import simulated
from tests.trials.tiny import tiny_spec
from trials import offload as host
from trials.parallel.mesh import HeldParameter
from trials.spec import Layout, LossScale, Offload, Precision
from trials.training import optimizer as adamw
from trials.training.optimizer import HostAdamW, LocalAdamW

CPU = torch.device("cpu")
ON = Offload(optimizer=True)
O2 = Precision(level="O2", dtype="bfloat16")
O2_FP16 = Precision(level="O2", dtype="float16", loss_scale=LossScale())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_those_of_the_device_also_of_tensors_cut_into_groups(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("trials.training.optimizer", "trials.training.optimizer"):
        monkeypatch.setattr(f"{module}.WORKSPACE_BYTES", 4 * 100)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(30, 7, generator=generator, dtype=dtype), torch.randn(8, generator=generator, dtype=dtype)]
    trained = []
    for make in (lambda held: LocalAdamW(held, lr=1e-2), lambda held: HostAdamW(held, CPU, lr=1e-2)):
        parameters = [torch.nn.Parameter(one.clone()) for one in weights]
        optimizer = make([HeldParameter(parameter) for parameter in parameters])
        for step in range(3):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, step - 1.0).mul_(parameter.detach())
            optimizer.step()
        trained.append(parameters)
    assert [state.master.numel() for state in optimizer.states] == [100, 100, 10, 8][: len(optimizer.states)]
    for one, other in zip(*trained, strict=True):
        assert torch.equal(one, other)


def test_states_are_made_in_host_memory_and_so_is_what_updates_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices apart, as a CPU has only one: whatever is allocated beyond what the model has asks for host memory."""
    asked = []
    monkeypatch.setattr(host, "allocating", lambda: asked.append(1) or torch.no_grad())
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = HostAdamW([HeldParameter(parameter)], CPU, lr=1e-2)
    parameter.grad = torch.ones(4)
    optimizer.step()
    (state,) = optimizer.states
    assert state.is_copy and state.master.data_ptr() != parameter.data_ptr() and asked


def test_counts_of_steps_are_in_host_memory_where_no_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fused kernel they are read on the host, which would wait for the device once per tensor and step."""
    for is_fused, where in ((True, "meta"), (False, "cpu")):
        monkeypatch.setattr(adamw, "has_fused_adamw", lambda _device, fused=is_fused: fused)
        assert adamw.UpdateState(torch.empty(3, device="meta")).num_steps.device.type == where


def test_steps_after_the_first_need_no_new_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that are new to a process cost more than what is computed in them."""
    monkeypatch.setattr("trials.training.optimizer.WORKSPACE_BYTES", 4 * 100)
    parameter = torch.nn.Parameter(torch.ones(30, 7, dtype=torch.bfloat16))
    optimizer = HostAdamW([HeldParameter(parameter)], CPU, lr=1e-2)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    made = []
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, _told(getattr(torch, name), made))
    optimizer.step()
    assert made and {tensor.device.type for tensor in made} == {"meta"}


def _told(make: Callable[..., torch.Tensor], made: list[torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(*args: Any, **options: Any) -> torch.Tensor:
        made.append(make(*args, **options))
        return made[-1]

    return run


@pytest.mark.representative("ZeRO-1 x2-precision2-6-6")
@pytest.mark.parametrize(
    ("name", "precision", "device_bytes", "host_bytes"),
    [("single, fp32", Precision(), 8, 12), ("single, O2 bf16", O2, 12, 12), ("ZeRO-1 x2", O2, 6, 6)],
)
def test_the_device_holds_no_states(name: str, precision: Precision, device_bytes: int, host_bytes: int) -> None:
    """Per parameter: AdamW's two states and, beside 16-bit weights, fp32 ones; on the host always fp32 ones."""
    base = FAMILIES[name]
    kept, moved = (
        simulated(dataclasses.replace(base, candidate=dataclasses.replace(base.candidate, **knobs)))
        for knobs in ({"precision": precision}, {"precision": precision, "offload": ON})
    )
    place = "forward/1/0.0 last-0"
    fallen = kept.peaks[place].total_bytes - moved.peaks[place].total_bytes
    assert fallen == pytest.approx(device_bytes * kept.num_parameters, rel=0.02)
    # Beside the states there are two groups of gradients on the way, and new weights in 16 bits.
    least = host_bytes * kept.num_parameters
    assert least <= moved.host_bytes <= least + 10 * kept.num_parameters


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.representative("True")
def test_what_device_and_host_hold_is_what_a_real_rank_holds(activations: bool) -> None:
    """On a CPU both are one; also with activations in host memory."""
    base = FAMILIES["single, O2 bf16"]
    offload = Offload(optimizer=True, activations=activations)
    spec = dataclasses.replace(base, candidate=dataclasses.replace(base.candidate, offload=offload))
    run = simulated(spec)
    assert measured_peaks(spec)[0] == pytest.approx(run.peak_bytes + run.host_bytes, rel=0.01)


@pytest.mark.slow
@pytest.mark.parity
def test_layouts_train_bit_for_bit_the_same(tmp_path: Path) -> None:
    specs = []
    for layout, precision in (
        (Layout(dp_replicate=2), Precision()),
        (Layout(dp_shard=2, zero_stage=1), O2_FP16),
        (Layout(dp_shard=2, zero_stage=3), O2),
        (Layout(tp=2), O2),
    ):
        specs += [tiny_spec(layout, precision=precision, offload=ON), tiny_spec(layout, precision=precision)]
    results = run_gang(specs, tmp_path)
    for moved, kept in zip(results[::2], results[1::2], strict=True):
        assert differences(moved, kept) == (0.0, 0.0)
