from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trials.gang import run_gang
from tests.trials.tiny import tiny_spec
from trials.failure import InfeasibleSpec
from trials.outcome import RankReport
from trials.parallel.mesh import HeldParameter
from trials.precision import LossScaler, check_device
from trials.spec import Layout, LossScale, Precision
from trials.training.optimizer import LocalAdamW

OVERFLOWING = LossScale(initial=2.0**60, backoff_factor=2.0**-24, backoff_interval=1)
O1_FP16 = Precision(level="O1", dtype="float16", loss_scale=OVERFLOWING)
O2_FP16 = Precision(level="O2", dtype="float16", loss_scale=OVERFLOWING)
FLAGS = st.lists(st.booleans(), max_size=60)


def run_lengths_scale(config: LossScale, flags: list[bool]) -> float:
    """The schedule said another way: count complete intervals within runs of equal flags."""
    scale, start = config.initial, 0
    while start < len(flags):
        end = start
        while end < len(flags) and flags[end] == flags[start]:
            end += 1
        interval = config.growth_interval if flags[start] else config.backoff_interval
        factor = config.growth_factor if flags[start] else config.backoff_factor
        scale *= factor ** ((end - start) // interval)
        start = end
    return scale


@given(FLAGS, st.integers(1, 5), st.integers(1, 4))
def test_schedule(flags: list[bool], growth_interval: int, backoff_interval: int) -> None:
    config = LossScale(initial=1.0, growth_interval=growth_interval, backoff_interval=backoff_interval)
    scaler = LossScaler(config)
    for finite in flags:
        scaler.update(finite=finite)
    assert scaler.scale == run_lengths_scale(config, flags)
    assert scaler.num_skipped == flags.count(False)


@given(FLAGS)
def test_fixed_scale_stays(flags: list[bool]) -> None:
    scaler = LossScaler(LossScale(initial=7.0, growth_interval=1, backoff_interval=1, dynamic=False))
    for finite in flags:
        scaler.update(finite=finite)
    assert scaler.scale == 7.0


@pytest.mark.parametrize("finite", [True, False])
def test_the_scale_stays_a_positive_finite_number(finite: bool) -> None:
    scaler = LossScaler(LossScale(growth_interval=1, backoff_interval=1))
    for _ in range(2000):
        scaler.update(finite=finite)
    assert 0.0 < scaler.scale < float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_collect_updates_too_small_for_16_bits(dtype: torch.dtype) -> None:
    """A hundred updates of 1e-4 move a weight of 1; in 16 bits each alone would round to nothing."""
    parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = LocalAdamW([HeldParameter(parameter)], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        parameter.grad = torch.ones(4, dtype=dtype)
        optimizer.step()
    assert torch.allclose(parameter.float(), torch.full((4,), 0.99), atol=4e-3)
    assert bool((parameter < 1.0).all())


def test_masters_divide_by_the_scale_in_fp32() -> None:
    """1e-3 / 2**15 is below float16's smallest number, yet the second moment must see it."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    held = [HeldParameter(parameter)]
    optimizer = LocalAdamW(held, grad_scale=lambda: 2.0**15, lr=1e-2, eps=0.0, weight_decay=0.0)
    parameter.grad = torch.full((1,), 1e-3, dtype=torch.float16)
    optimizer.step()
    assert parameter.item() == pytest.approx(0.99, abs=1e-3)


def test_masters_have_the_memory_format_the_weights_train_in() -> None:
    """The memory format is settled after the optimiser is built; copies in another would miss the multi-tensor path."""
    parameter = torch.nn.Parameter(torch.randn(4, 3, 3, 3, dtype=torch.bfloat16))
    optimizer = LocalAdamW([HeldParameter(parameter)], lr=1e-2)
    parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    (state,) = optimizer.states
    assert {t.stride() for t in (state.master, state.exp_avg, state.exp_avg_sq)} == {parameter.stride()}


@pytest.mark.parametrize(
    ("dtype", "capability", "remedy"),
    [
        ("bfloat16", (7, 0), "use float16 with loss scaling, or level O0"),
        ("bfloat16", (6, 1), "use level O0"),
        ("float16", (6, 1), "use level O0"),
        ("bfloat16", (8, 0), None),
        ("float16", (7, 0), None),
        ("float32", (3, 5), None),
    ],
)
def test_old_devices_are_refused_with_a_remedy(
    dtype, capability: tuple[int, int], remedy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Old Card")
    precision, device = Precision(dtype=dtype), torch.device("cuda", 0)
    if remedy is None:
        check_device(precision, device)
        return
    with pytest.raises(InfeasibleSpec, match=rf"{dtype} .*Old Card.*{capability[0]}\.{capability[1]}; {remedy}"):
        check_device(precision, device)


def test_every_cpu_is_accepted() -> None:
    for dtype in ("bfloat16", "float16"):
        check_device(Precision(dtype=dtype), torch.device("cpu"))


@pytest.mark.slow
def test_a_fixed_scale_changes_nothing_but_the_range(tmp_path: Path) -> None:
    """Gradients are unscaled once per step, however many micro-batches there are."""
    fixed = [
        Precision(level="O1", dtype="float16", loss_scale=LossScale(initial=scale, dynamic=False))
        for scale in (1024.0, 4096.0)
    ]
    specs = [tiny_spec(precision=precision, num_microbatches=num) for precision in fixed for num in (1, 4)]
    fp32, *scaled = run_gang([tiny_spec(), *specs], tmp_path)
    assert isinstance(fp32, RankReport)
    for spec, result in zip(specs, scaled, strict=True):
        assert isinstance(result, RankReport), result
        assert result.losses == pytest.approx(fp32.losses, abs=2e-3)
        assert result.grad_norms == pytest.approx(fp32.grad_norms, rel=1e-2)
        state, scale = result.findings.loss_scale, spec.candidate.precision.loss_scale
        assert state is not None and scale is not None
        assert (state.scale, state.num_skipped) == (scale.initial, 0)


@pytest.mark.representative("O1")
@pytest.mark.slow
@pytest.mark.parametrize("precision", [O1_FP16, O2_FP16], ids=["O1", "O2"])
def test_every_layout_skips_the_same_steps(precision: Precision, tmp_path: Path) -> None:
    """Ranks agree within a gang, or their norms would differ; and gangs agree with a single process."""
    tp2 = Layout(tp=2, sequence_parallel=True)
    layouts = [
        Layout(dp_shard=2, zero_stage=3),
        Layout(dp_shard=2, zero_stage=1),
        tp2,
        dataclasses.replace(tp2, tp_engine="local"),
        Layout(pp=2, stage_layers=((1, 1),)),
        Layout(cp=2),
    ]
    options = {"precision": precision, "num_microbatches": 2}
    (alone,) = run_gang([tiny_spec(**options)], tmp_path / "1")
    assert isinstance(alone, RankReport) and alone.findings.loss_scale is not None
    assert 0 < alone.findings.loss_scale.num_skipped < 5
    skipped = [norm == 0.0 for norm in alone.grad_norms]
    for result in run_gang([tiny_spec(layout, **options) for layout in layouts], tmp_path / "2"):
        assert isinstance(result, RankReport), result
        assert result.findings.loss_scale == alone.findings.loss_scale
        assert [norm == 0.0 for norm in result.grad_norms] == skipped
        assert result.grad_norms == pytest.approx(alone.grad_norms, rel=5e-2)


def test_cut_into_pieces_it_updates_as_adamw_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of 64 elements: one parameter is larger, others share; torch's AdamW over fp32 copies is the reference."""
    monkeypatch.setattr("trials.training.optimizer.WORKSPACE_BYTES", 4 * 64)
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(*size).bfloat16()) for size in ((10, 17), (3, 5), (40,), (30,))]
    copies = [parameter.detach().float().requires_grad_() for parameter in parameters]
    optimizer = LocalAdamW([HeldParameter(parameter) for parameter in parameters], lr=1e-2, betas=(0.9, 0.95))
    reference = torch.optim.AdamW(copies, lr=1e-2, betas=(0.9, 0.95), foreach=False)
    for _ in range(3):
        for parameter, copy in zip(parameters, copies, strict=True):
            parameter.grad = torch.randn(parameter.shape).bfloat16()
            copy.grad = parameter.grad.float()
        optimizer.step()
        reference.step()
    assert max(state.master.numel() for state in optimizer.states) <= 64 < parameters[0].numel()
    for parameter, copy in zip(parameters, copies, strict=True):
        torch.testing.assert_close(parameter.detach(), copy.detach().bfloat16())
