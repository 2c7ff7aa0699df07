"""The local tensor-parallel engine and its two interleaved halves: the numbers of one process, communication that
computation hides, and what other parts rely on."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trials.overlap import LAYERS, orders
from tests.trials.ranks import planted, run_ranks
from tests.trials.split_models import CPU, SEQ_LENGTH, WHOLE, build, differences, many, tokens
from tests.trials.tiny import SHAPE
from trials.models.built_in import Llama
from trials.parallel.mesh import LocalShard, ShardMap, group_of
from trials.parallel.tensor import apply_tensor_parallel, gather_sequence, scatter_sequence, start_gather
from trials.sizes import Chunk
from trials.spec import Layout, gather_pattern

pytestmark = pytest.mark.slow


TP = Layout(tp=2, tp_engine="local")
SP = Layout(tp=2, tp_engine="local", sequence_parallel=True)
CASES = {"tp": (TP, {}), "sp": (SP, {}), "sp-expanded": (SP, {"expands": True})}


@functools.cache
def reference():
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(many, 1, Path(folder), [(Layout(), {})])[0][0]


@functools.cache
def results():
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(CASES, run_ranks(many, 2, Path(folder), list(CASES.values()))[0], strict=True))


@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_one_process(name):
    loss, grads = differences(results()[name], reference())
    assert loss <= 1e-6 and grads <= 1e-5, (loss, grads)


class Calls(TorchFunctionMode):
    """Notes the boundaries crossed and keeps the gathers, to call them again."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.gathers = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__module__", None) == gather_sequence.__module__:
            self.names.append(func.__name__)
        if func is gather_sequence:
            self.gathers.append((args, kwargs or {}, out))
        return out


def _calls(layout):
    (model, _), (inputs, _) = build(layout), tokens()
    with Calls() as calls:
        model(inputs)
    with torch.no_grad():
        again = [gather_sequence(*args, **kwargs) for args, kwargs, _ in calls.gathers]
    same = [torch.equal(one, other) for one, (_, _, other) in zip(again, calls.gathers, strict=True)]
    return calls.names, all(same)


@pytest.mark.parametrize("num_copies", [1, 2])
def test_modes_see_the_boundaries_and_can_gather_again(num_copies, tmp_path):
    layout = Layout(tp=2, tp_engine="local", sequence_parallel=True, num_copies=num_copies)
    names, same = run_ranks(_calls, 2, tmp_path, layout)[0]
    per_layer = 2 * num_copies
    assert names.count("gather_sequence") == per_layer * SHAPE.num_layers + 1
    assert names.count("scatter_sequence") == per_layer * SHAPE.num_layers + 1
    assert same


def _unfinished_gather():
    group = group_of(init_device_mesh("cpu", (2,)))
    x = torch.full((2, 3, 4), float(group.rank), requires_grad=True)
    pending = start_gather(x, group)
    first = gather_sequence(x, group, pending)
    # The used-up start must not keep what it gathered.
    assert pending.take() is None
    again = gather_sequence(x, group, pending)
    scatter_sequence(first + again, group).sum().backward()
    wanted = torch.arange(2.0).repeat_interleave(3)[None, :, None].expand(2, 6, 4)
    assert x.grad is not None
    # Every rank's output counts both of every rank's copies.
    return torch.equal(first, wanted) and torch.equal(again, wanted) and torch.equal(x.grad, torch.full_like(x, 4.0))


def test_an_exhausted_start_starts_over(tmp_path):
    assert run_ranks(_unfinished_gather, 2, tmp_path) == [True, True]


@pytest.mark.parametrize("layout", [TP, SP], ids=["tp", "sp"])
def test_gradients_of_weights_hide_the_sums_of_gradients_of_inputs(layout, tmp_path):
    """In the backward pass each sum of a projection's input gradient is awaited after another matmul has begun; under
    sequence parallelism the gathers that leave sub-layers have nothing to hide behind. The output of a projection is
    summed in place."""
    sums_only = [True] * (2 * len(LAYERS.layer_ids))
    expected = sums_only if layout is TP else [hidden for _ in sums_only for hidden in (False, True)]
    for forward, backward, in_place in run_ranks(orders, 2, tmp_path, [layout])[0]:
        assert backward == expected and not any(forward) and in_place


def test_a_layer_runs_four_matmuls():
    """One for queries, keys and values together, one for the gate and what it gates, one out of each sub-layer."""
    model, _ = build(Layout())
    with Matmuls() as matmuls:
        model.layers["0"](torch.ones(1, SEQ_LENGTH, SHAPE.hidden_size), model.rope)
    assert matmuls.number == 4


class Matmuls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.number += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake_gang():
    """The group of rank 3 of 4, alone."""
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


def _on_meta(chunk, mesh, *, sequence_parallel):
    shape = SHAPE.__class__(
        hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4, ffn_hidden_size=64, vocab_size=256
    )
    with torch.device("meta"):
        model = Llama(shape, SEQ_LENGTH, chunk)
    layout = Layout(tp=4, tp_engine="local", sequence_parallel=sequence_parallel)
    return model, apply_tensor_parallel(model, mesh, layout)


class Gathers(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        self.number += func.overloadpacket == torch.ops._c10d_functional.all_gather_into_tensor
        return func(*args, **(kwargs or {}))


def _gathers_in_backward(**options):
    shape = dataclasses.replace(SHAPE, num_kv_heads=4, ffn_hidden_size=64)
    model, _ = build(Layout(tp=4, tp_engine="local", sequence_parallel=True), shape=shape, **options)
    loss = model(*tokens())
    with Gathers() as gathers:
        loss.backward()
    return gathers.number


def test_gathers_repeat_in_the_backward_pass_by_pattern(fake_gang):
    kept = _gathers_in_backward()
    more = {
        pattern: _gathers_in_backward(selective=pattern) - kept
        for pattern in (gather_pattern("attention"), gather_pattern("feed_forward"), r".*\.gather_sequence", "nothing")
    }
    assert list(more.values()) == [SHAPE.num_layers, SHAPE.num_layers, 2 * SHAPE.num_layers, 0]


def test_the_map_names_every_split_and_partial_parameter(fake_gang):
    model, shard_map = _on_meta(WHOLE, fake_gang, sequence_parallel=True)
    names = {name for name, _ in model.named_parameters()}
    assert shard_map.partial == {name for name in names if name.endswith("norm.weight")}
    assert shard_map.shards.keys() == names - shard_map.partial
    assert shard_map.shards["layers.1.attention.wo.weight"] == LocalShard(dim=1, index=3, num_shards=4)
    assert shard_map.shards["output.weight"] == LocalShard(dim=0, index=3, num_shards=4)
    assert model.layers["0"].feed_forward.w2.weight.shape == (32, 16)
    assert model.tok_embeddings is not None and model.tok_embeddings.weight.shape == (64, 32)
    assert _on_meta(WHOLE, fake_gang, sequence_parallel=False)[1].partial == frozenset()


def test_stages_without_ends_or_layers(fake_gang):
    middle = Chunk(chunk=0, stage=1, virtual_stage=1, layer_ids=(1,), is_first=False, is_last=False)
    empty = Chunk(chunk=0, stage=1, virtual_stage=1, layer_ids=(), is_first=False, is_last=False)
    _, shard_map = _on_meta(middle, fake_gang, sequence_parallel=True)
    assert {name.split(".")[1] for name in shard_map.shards} == {"1"} and len(shard_map.shards) == 4
    assert _on_meta(empty, fake_gang, sequence_parallel=True)[1] == ShardMap()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_runs_on_fake_tensors(fake_gang, sequence_parallel):
    model, _ = _on_meta(WHOLE, fake_gang, sequence_parallel=sequence_parallel)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device=CPU)
        model.materialize(CPU)
        rows = torch.zeros(2, SEQ_LENGTH, dtype=torch.long)
        model(rows, rows).backward()
    assert model(rows).shape == (2, SEQ_LENGTH, 256 // 4)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.shape == parameter.shape, name


def copied(layout):
    return dataclasses.replace(layout, num_copies=2)


@pytest.mark.parity
def test_loss_and_gradients_are_those_of_one_copy(tmp_path):
    cases = []
    for layout in (TP, SP):
        for options in ({}, {"num_sequences": 1}, {"num_sequences": 3, "recompute": True}, {"recompute": True}):
            cases += [(layout, options), (copied(layout), options)]
    for options in ({}, {"num_sequences": 1}):
        cases += [(SP, options), (copied(SP), {**options, "compiled": True})]
    for options in ({"num_sequences": 1, "expands": True}, {"num_sequences": 1, "attention": "math"}):
        cases += [(SP, {"num_sequences": 1}), (copied(SP), options)]
    results = run_ranks(many, 2, tmp_path, cases)[0]
    for case, one, two in zip(cases[::2], results[::2], results[1::2], strict=True):
        loss, grads = differences(two, one)
        assert loss <= 1e-6 and grads <= 1e-5, (case, loss, grads)


def without_earlier_keys(original):
    return lambda q, k, v, *_, **how: original(q, k, v, **how)


def in_plain_order(_original):
    return lambda tensor, _tp: tensor


FAULTS = {
    "earlier keys are forgotten": ("trials.parallel.copies.half_attention", without_earlier_keys),
    "ranks hold parts of one half": ("tests.trials.split_models.interleave_positions", in_plain_order),
}


def faulty(cases):
    results = []
    for name, replacement in cases:
        owner, _, attribute = name.rpartition(".")
        with planted(owner, attribute, replacement):
            results.append(many([(copied(SP), {"num_sequences": 1})]))
    return [*results, many([(SP, {"num_sequences": 1})])]


def test_faults_in_copies_of_positions_show(tmp_path):
    found, _ = run_ranks(faulty, 2, tmp_path, list(FAULTS.values()))
    (one,) = found.pop()
    for name, (result,) in zip(FAULTS, found, strict=True):
        assert max(differences(result, one)) > 1e-3, name


@pytest.mark.parametrize("num_sequences", [4, 1], ids=["sequences", "positions"])
@pytest.mark.parametrize("layout", [TP, SP], ids=["tp", "sp"])
def test_one_half_computes_while_the_other_communicates(layout, num_sequences, tmp_path):
    """Collectives return at once, so what is computed before their result is awaited hides them."""
    for alone, both in run_ranks(orders, 2, tmp_path, [layout, copied(layout)], num_sequences):
        for without, hidden in zip(alone[:2], both[:2], strict=True):
            assert len(without) >= 6 and len(hidden) == 2 * len(without)
            assert sum(hidden) > max(len(hidden) / 2, 2 * sum(without) - 1)
