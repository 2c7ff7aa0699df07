"""Activations of a step: what tensors take at their peak, counted by storages."""

import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trials.script.command import HOOK_FOLDER

sys.path.append(str(HOOK_FOLDER))
from tune_cluster_hook.memory_parts import MemoryParts
from tune_cluster_hook.operator_inspector import OperatorCounts, _mode

WIDTH = 64


class Deep(nn.Module):
    def __init__(self, recompute):
        super().__init__()
        self.layers, self.recompute = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8)), recompute

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(self.block, layer, x, use_reentrant=False) if self.recompute else self.block(layer, x)
        return x

    def block(self, layer, x):
        return torch.sin(torch.exp(layer(x).view(-1, WIDTH)))


def parts(batch, *, recompute=False, closure=False, accumulation=1):
    """Bytes of a second step, in which all states are there."""
    model, memory = Deep(recompute), MemoryParts()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda one, *_: memory.optimizer_begins(one))
    optimizer.register_step_post_hook(lambda *_: memory.optimizer_ended())

    def compute():
        optimizer.zero_grad()
        for _ in range(accumulation):
            model(torch.ones(batch, WIDTH)).sum().backward()

    def step():
        if closure:
            optimizer.step(memory.within(optimizer, compute))
        else:
            compute()
            optimizer.step()

    step()
    memory.read(model)
    operators = OperatorCounts()
    memory.live = operators.live
    with _mode(operators):
        step()
    return memory.read(model), operators.live.peak_bytes()


def test_activations_are_proportional_to_the_micro_batch_and_recompute_keeps_fewer():
    held, small = parts(16)
    weights = 4 * 8 * (WIDTH * WIDTH + WIDTH)
    assert held == {"gradient_bytes": weights, "optimizer_bytes": 2 * weights + 4 * 16}
    _, large = parts(64)
    kept = 4 * 64 * WIDTH * 3 * 8  # what exp, sin and the next layer need of it, per layer
    assert large == pytest.approx(4 * small, rel=0.01) and kept * 0.6 < large < kept * 1.2
    assert parts(64, recompute=True)[1] < 0.65 * large
    assert parts(64, accumulation=3)[1] == pytest.approx(large, rel=0.01), "gradients are no activations"
    assert parts(64, closure=True) == (held, large)
