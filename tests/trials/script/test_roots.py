"""The search for root modules: what is found before its first call, what is left of it, and what copies hold."""

import copy
import io
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trials.script.command import HOOK_FOLDER

sys.path.append(str(HOOK_FOLDER))
from tune_cluster_hook.facts import is_compiled
from tune_cluster_hook.roots import SLOT, Roots, repeated_block

CALL = nn.Module.__call__


class Unit(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.line = nn.Linear(size, size)

    def forward(self, x):
        return x + torch.relu(self.line(x))


class Net(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.units, self.recompute = nn.ModuleList(Unit() for _ in range(3)), recompute

    def forward(self, x):
        for unit in self.units:
            x = checkpoint(unit, x, use_reentrant=False) if self.recompute else unit(x)
        return x


class Watch:
    """A search that notes what it finds, and every call of it."""

    def __init__(self):
        self.roots, self.found, self.calls, self.is_over = Roots(), [], [], False
        self.roots.before_first_call(lambda root, args, kwargs: self.found.append(type(root.model).__name__))
        self.roots.after_first_steps(lambda: setattr(self, "is_over", True))
        self.stop_observing = self.roots.observe(
            lambda root, args, kwargs: self.calls.append("before"), lambda root, output: self.calls.append("after")
        )
        self.roots.arm(sys.modules["torch.nn.modules.module"])
        self.roots.count_steps(sys.modules["torch.optim.optimizer"])


@pytest.fixture
def watch():
    watch = Watch()
    yield watch
    watch.roots.disarm()
    assert nn.Module.__call__ is CALL


def train(call, model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        call(torch.randn(4, 16)).sum().backward()
        optimizer.step()


def test_the_outermost_training_module_is_found_once_and_unchanged(watch):
    net, teacher = Net(recompute=True), Net().requires_grad_(False)
    net.eval()(torch.randn(4, 16))  # evaluation, no gradients and frozen parameters make no root
    with torch.no_grad():
        net.train()(torch.randn(4, 16))
    teacher.eval()(torch.randn(4, 16))
    assert watch.found == []
    assert watch.calls == ["before", "after"]  # of the frozen model as a whole
    train(net, net)
    assert (watch.found, watch.is_over) == (["Net"], True)  # blocks that are recomputed are called without the root
    assert watch.calls == ["before", "after"] * 4
    teacher(torch.randn(4, 16))
    assert watch.calls == ["before", "after"] * 5
    assert nn.Module.__call__ is CALL
    watch.stop_observing()
    assert SLOT not in net.__dict__
    assert SLOT not in teacher.__dict__


def test_several_roots_and_a_model_that_the_program_drops(watch):
    pairs = [nn.Sequential(Net(), nn.Linear(16, 16))]
    train(lambda x: pairs[0][1](pairs[0][0](x)), pairs[0], steps=1)
    assert watch.found == ["Net", "Linear"]
    pairs.clear()
    assert watch.roots.found[1].module is None  # no reference of ours keeps it


def test_copies_and_files_contain_no_hook(watch):
    net = Net()
    train(net, net, steps=1)
    assert not is_compiled(net)
    for other in (copy.deepcopy(net), copy.deepcopy(torch.compile(net, backend="eager"))._orig_mod):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        assert other.__dict__.get(SLOT) is None
        x = torch.randn(2, 16)
        assert not torch.equal(other(x), net(x))
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    assert list(torch.load(file, weights_only=False).state_dict()) == list(net.state_dict())


def test_a_replica_for_another_device_runs_itself(watch):
    net = Net()
    train(net, net, steps=1)
    replica = net._replicate_for_data_parallel()
    replica._modules = dict(Net().named_children())
    x = torch.randn(2, 16)
    assert not torch.equal(replica(x), net(x))


@pytest.mark.slow
@pytest.mark.representative("in place")
@pytest.mark.parametrize("how", ["in place", "wrapped", "function"])
def test_compiled_models_stay_one_graph(watch, how):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    net = Net()
    call = net
    if how == "in place":
        net.compile(backend="aot_eager")
    else:
        call = torch.compile(net if how == "wrapped" else lambda x: net(x), backend="aot_eager")
    train(call, net)
    # A function that calls the model may be compiled again when the class's own call is put back.
    assert counters["stats"]["unique_graphs"] in ((1, 2) if how == "function" else (1,))
    assert not counters["graph_break"]
    assert watch.found == ([] if how == "function" else ["Net"])
    assert watch.calls == ([] if how == "function" else ["before", "after"] * 3)
    assert is_compiled(net) == (how == "in place")
    watch.stop_observing()
    assert is_compiled(net) == (how == "in place")


def encoder_layer():
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


def units(size, count):
    return [nn.Sequential(nn.Conv2d(size, size, 3), nn.ReLU()) for _ in range(count)]


@pytest.mark.parametrize(
    ("model", "name", "count"),
    [
        (Net(), "Unit", 3),
        (
            nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3),
            "TransformerEncoderLayer",
            3,
        ),
        (nn.Sequential(nn.Conv2d(3, 8, 3), *units(8, 4), nn.Flatten()), "Sequential", 4),
        (nn.Sequential(*[nn.Sequential(Unit(), Unit()) for _ in range(2)]), "Sequential", 2),
        (nn.Sequential(Unit(8), Unit(8), nn.Linear(99, 99)), None, 0),  # two small ones and a large rest
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), None, 0),
    ],
)
def test_the_repeated_block(model, name, count):
    block = repeated_block(model)
    assert (block.name if block else None, len(block.members) if block else 0) == (name, count)
