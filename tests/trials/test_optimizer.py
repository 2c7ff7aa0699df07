"""The update of weights: by one fused kernel, and of 16-bit ones in a workspace of bounded size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trials.parallel.mesh import HeldParameter
from trials.training import optimizer as adamw
from trials.training.optimizer import LocalAdamW

WORKSPACE_BYTES = 4 * 100


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, dict[str, Any]]]:
    """Bytes of fp32 gradients and the options of every call of torch's update from now on."""
    calls: list[tuple[int, dict[str, Any]]] = []
    update = adamw.adamw

    def noted(params: list[torch.Tensor], grads: list[torch.Tensor], *states: Any, **options: Any) -> None:
        calls.append((sum(grad.nbytes for grad in grads), options))
        update(params, grads, *states, **options)

    monkeypatch.setattr(adamw, "adamw", noted)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_are_torchs_own_by_the_fused_kernel_in_bounded_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "WORKSPACE_BYTES", WORKSPACE_BYTES)
    calls = spied(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (250, 60, 30)]
    wide = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = LocalAdamW([HeldParameter(parameter) for parameter in parameters], lr=1e-2)
    reference = torch.optim.AdamW(wide, lr=1e-2, fused=False, foreach=False)
    for _ in range(3):
        for parameter, copy in zip(parameters, wide, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            copy.grad = parameter.grad.float()
        optimizer.step()
        reference.step()
    for parameter, copy in zip(parameters, wide, strict=True):
        torch.testing.assert_close(
            parameter.detach(), copy.detach().to(dtype), rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5
        )
    assert all(options["fused"] and not options["foreach"] for _, options in calls)
    if dtype != torch.float32:
        assert len(calls) > 3 and max(num_bytes for num_bytes, _ in calls) <= WORKSPACE_BYTES
