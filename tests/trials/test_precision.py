from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trials.precision import LossScaler, MasterAdamW
from trials.spec import LossScale

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
    optimizer = MasterAdamW([parameter], grad_scale=lambda: 1.0, lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        parameter.grad = torch.ones(4, dtype=dtype)
        optimizer.step()
    assert torch.allclose(parameter.float(), torch.full((4,), 0.99), atol=4e-3)
    assert bool((parameter < 1.0).all())


def test_masters_divide_by_the_scale_in_fp32() -> None:
    """1e-3 / 2**15 is below float16's smallest number, yet the second moment must see it."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = MasterAdamW([parameter], grad_scale=lambda: 2.0**15, lr=1e-2, eps=0.0, weight_decay=0.0)
    parameter.grad = torch.full((1,), 1e-3, dtype=torch.float16)
    optimizer.step()
    assert parameter.item() == pytest.approx(0.99, abs=1e-3)
