"""Does between its steps what few programs do, each of which a hook could break: prints ``unharmed`` if none did."""

import gc
import weakref

import torch
from torch import nn


class Solver:
    """Can be called, and is more than a closure to its optimiser."""

    scale = 0.5

    def __call__(self):
        raise AssertionError("nothing asks for a closure")


class Scaled(torch.optim.SGD):
    def step(self, closure=None):
        assert closure.scale == 0.5
        return super().step()


class NeverFinite(torch.cuda.amp.GradScaler):
    """Skips its steps; on CPU."""

    def __init__(self):
        torch.amp.GradScaler.__init__(self, "cpu", init_scale=float("inf"))


def train(net, optimizer):
    loss = net(torch.randn(4, 8)).sum()
    loss.backward()
    optimizer.step(Solver())
    optimizer.zero_grad()


def first_model():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = Scaled(net.parameters(), 0.01)
    train(net, optimizer)
    # This step is looked at, and hooks are in the model: what is compiled now must be one graph all the same.
    compiled = torch.compile(lambda x: net(x).sum(), fullgraph=True, backend="eager")
    compiled(torch.randn(4, 8))
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())
    for _ in range(4):
        train(net, optimizer)
    torch._dynamo.reset()
    return weakref.ref(net)


def skips():
    net, scaler = nn.Linear(8, 8), NeverFinite()
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    for _ in range(30):
        scaler.scale(net(torch.randn(4, 8)).sum()).backward()
        scaler.step(optimizer)
        scaler._per_optimizer_states.clear()
        optimizer.zero_grad()


dropped = first_model()
gc.collect()
assert dropped() is None, "the model is kept alive"
skips()
print("unharmed")
