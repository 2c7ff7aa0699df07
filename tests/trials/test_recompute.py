"""Recompute, full and selective: exact, frees what it reports, keeps nothing afterwards."""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trials.gang import run_gang
from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials.kernels import apply_compile, compilations, forget_compilations
from trials.models import build_model
from trials.models.built_in import ResNet
from trials.outcome import RankReport
from trials.parallel.mesh import ShardMap, init_parameters
from trials.recompute import Handle, PatternTally, Rebuild, apply_recompute, recompute_selected, storage_of
from trials.reports import PatternEffect
from trials.sizes import chunks_of_stage
from trials.spec import Kernels, Layout, Precision, Recompute, ResNetModel, SelectiveRecompute, gather_pattern

TOKENS = torch.randint(0, 256, (4, WORKLOAD.seq_length), generator=torch.Generator().manual_seed(0))


def select(*patterns, num_layers=2):
    return Recompute(
        selective=tuple(SelectiveRecompute(pattern=pattern, num_layers=((num_layers,),)) for pattern in patterns)
    )


class Alive(TorchDispatchMode):
    """Finds what is still alive of all memory allocated inside."""

    def __init__(self):
        super().__init__()
        self._storages = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in known:
                self._storages[id(leaf.untyped_storage())] = weakref.ref(leaf.untyped_storage())
        return result

    @property
    def num_bytes(self):
        alive = (reference() for reference in self._storages.values())
        return sum(storage.nbytes() for storage in alive if storage is not None)


@dataclasses.dataclass
class Run:
    values: list[Tensor]
    """Loss and gradients."""
    kept_bytes: int
    """Bytes allocated in the forward pass and alive after it."""
    left_bytes: int
    """Bytes of those that are alive after the backward pass; gradients are no part."""
    effects: tuple[PatternEffect, ...]


class Saved(torch.autograd.graph.saved_tensors_hooks):
    """Counts what autograd keeps for the backward pass, without the weights."""

    def __init__(self, model):
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._kept = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                self._kept[storage.data_ptr()] = (storage.nbytes(), tensor)
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    def num_bytes(self):
        total = sum(num_bytes for num_bytes, _ in self._kept.values())
        self._kept.clear()
        return total


def train_compiled(recompute, backend="aot_eager_decomp_partition", unit="block"):
    """Loss and gradients, bytes kept, effects and the number of compiled forward graphs."""
    forget_compilations()
    (chunk,) = chunks_of_stage(Layout(), 0, WORKLOAD.num_layers)
    with torch.device("meta"):
        model = build_model(WORKLOAD, chunk)
    meter = apply_recompute(model, recompute, chunk, num_graph_passes=1)
    apply_compile(model, Kernels(compile=unit, backend=backend))
    model.to_empty(device="cpu")
    model.materialize(torch.device("cpu"))
    init_parameters(model, 3, ShardMap())
    saved = Saved(model)
    with saved:
        loss = model(TOKENS, TOKENS)
    kept_bytes = saved.num_bytes()
    loss.backward()
    values = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    return values, kept_bytes, meter.effects(1), sum(one.is_forward for one in compilations())


POSITIONS = TOKENS.numel()
FFN_BYTES, HIDDEN_BYTES = (4 * POSITIONS * size for size in (SHAPE.ffn_hidden_size, SHAPE.hidden_size))
GRAPH_PATTERNS = {
    r"feed_forward\.(silu|mul)": (2, FFN_BYTES),
    ".*norm": (2, 2 * (HIDDEN_BYTES + 4 * POSITIONS)),
    "feed_forward": (7, 3 * FFN_BYTES),
}
"""Calls in a layer, and bytes that a compiled layer then no longer keeps: it keeps no SiLU in any case."""


@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it does itself while tracing
def test_compiled_layers_recompute_what_patterns_choose_and_keep_the_rest(caplog):
    plain, plain_bytes, _, num_graphs = train_compiled(Recompute())
    first = select("feed_forward", num_layers=1)
    both = dataclasses.replace(first, selective=(*first.selective, *select("nothing_of_that_name").selective))
    values, kept_bytes, effects, graphs = train_compiled(both)
    assert equal(values, plain)
    assert plain_bytes - kept_bytes == pytest.approx(3 * FFN_BYTES, rel=0.01)
    assert [effect.num_matches for effect in effects] == [7, 0]
    assert graphs == num_graphs + 1  # dynamo itself does not notice that layers have other patterns
    (warned,) = [record.message for record in caplog.records if record.name == "trials.recompute"]
    assert "matches nothing" in warned


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backend", "unit"), [("inductor", "block"), ("aot_eager", "model")])
def test_compiled_patterns_by_bytes(backend, unit):
    plain, plain_bytes, _, num_graphs = train_compiled(Recompute(), backend, unit)
    patterns = list(GRAPH_PATTERNS.items())[: 1 if backend == "inductor" else None]
    for pattern, (num_calls, saved_bytes) in patterns:
        values, kept_bytes, (effect,), graphs = train_compiled(select(pattern), backend, unit)
        assert equal(values, plain)
        assert plain_bytes - kept_bytes == pytest.approx(2 * saved_bytes, rel=0.01)
        assert (effect.num_matches, effect.is_compiled, graphs) == (2 * num_calls, True, num_graphs)


def train(recompute, *, autocast=False):
    """One forward and backward pass of the tiny model, without help from the garbage collector."""
    (chunk,) = chunks_of_stage(Layout(), 0, WORKLOAD.num_layers)
    with torch.device("meta"):
        model = build_model(WORKLOAD, chunk)
    meter = apply_recompute(model, recompute, chunk)
    model.to_empty(device="cpu")
    model.materialize(torch.device("cpu"))
    init_parameters(model, 3, ShardMap())
    gc.collect()
    gc.disable()
    try:
        with Alive() as alive, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(TOKENS, TOKENS)
        kept_bytes = alive.num_bytes
        value = loss.detach().clone()
        loss.backward()
        del loss
        left_bytes = alive.num_bytes
        assert not [thing for thing in gc.get_objects() if type(thing) in (Handle, Rebuild)]
    finally:
        gc.enable()
    return Run([value, *(parameter.grad for parameter in model.parameters())], kept_bytes, left_bytes, meter.effects(1))


@functools.cache
def plain(*, autocast=False):
    """The pass without recompute."""
    return train(Recompute(), autocast=autocast)


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


PATTERNS = [
    (r"feed_forward\.mul",),
    (r"feed_forward\.silu", r"feed_forward\.mul"),
    (r"attention_norm|feed_forward_norm",),
    (r".*\.scaled_dot_product_attention",),
    ("attention",),
    ("feed_forward",),
    (".*",),
]


@pytest.mark.representative("feed_forward")
@pytest.mark.parametrize("patterns", PATTERNS, ids="+".join)
def test_equal_to_the_bit_and_saves_the_reported_memory(patterns):
    selective = train(select(*patterns))
    assert equal(selective.values, plain().values)
    saved_bytes = sum(effect.saved_bytes for effect in selective.effects)
    assert saved_bytes == plain().kept_bytes - selective.kept_bytes > 0
    assert plain().left_bytes == selective.left_bytes == 0
    for effect in selective.effects:
        assert effect.num_matches > 0 and effect.recompute_s > 0.0


@pytest.mark.representative("attention")
@pytest.mark.parametrize("patterns", PATTERNS, ids="+".join)
def test_equal_to_the_bit_under_autocast(patterns):
    selective = train(select(*patterns), autocast=True)
    assert equal(selective.values, plain(autocast=True).values)
    assert selective.kept_bytes < plain(autocast=True).kept_bytes
    assert selective.left_bytes == 0


@pytest.mark.exhaustive
def test_only_the_first_layers_and_none_recomputed_in_full():
    one, two = train(select("feed_forward", num_layers=1)), train(select("feed_forward"))
    assert 2 * one.effects[0].saved_bytes == two.effects[0].saved_bytes
    both = train(dataclasses.replace(select("feed_forward"), full=((1,),)))
    assert both.effects[0].saved_bytes == one.effects[0].saved_bytes
    assert equal(both.values, one.values)


@pytest.mark.representative("add-saves nothing")
@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("nothing_of_that_name", "matches nothing"),
        # Residual sums: keeping one's two operands instead is no gain.
        ("add", "saves nothing"),
        # A view: its storage is the projection's output, which rotation does not keep anyway.
        (r"attention\..*view|attention\.unflatten", "saves nothing"),
    ],
)
def test_patterns_without_effect_are_reported(pattern, words, caplog):
    run = train(select(pattern))
    (effect,) = run.effects
    assert effect.saved_bytes == 0
    assert (effect.num_matches == 0) == ("matches nothing" in words)
    assert train(select(pattern, num_layers=0)).effects[0].num_matches == 0
    warnings_logged = [record.message for record in caplog.records if repr(pattern) in record.message]
    assert len(warnings_logged) == 1 and words in warnings_logged[0]  # nothing of where it applies to no layer


class Layer(nn.Module):
    """Runs a function of its input and one weight."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, generator=torch.Generator().manual_seed(1)))
        self.function = function

    def forward(self, x):
        return self.function(x, self.weight)


def outcome(function, pattern):
    """Output and gradients of a single layer."""
    layer, tally = Layer(function), PatternTally(label="", expression=re.compile(pattern or ""))
    if pattern is not None:
        recompute_selected(layer, [tally])
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    assert x.grad is not None and layer.weight.grad is not None
    return [out.detach(), x.grad, layer.weight.grad], tally


def _writes_over_it(x, weight):
    y = F.silu(x @ weight)
    y.mul_(2.0)
    return y * torch.tanh(x)


def _keeps_it_elsewhere(x, weight):
    y = F.silu(x @ weight)
    kept.append(y.detach())
    return y * torch.tanh(x)


def _several_outputs(x, weight):
    values, order = torch.sort(x @ weight, dim=-1)
    first, second = (2.0 * values).chunk(2, dim=-1)
    return torch.gather(x, 1, order) * torch.cat([second * first, first.exp()], dim=-1)


kept = []


@pytest.mark.parametrize("function", [_writes_over_it, _keeps_it_elsewhere, _several_outputs])
@pytest.mark.parametrize("pattern", [".*", "silu|sort", "sort|mul|chunk", "exp|tanh|cat"])
def test_unusual_functions_stay_exact(function, pattern):
    kept.clear()
    assert equal(outcome(function, pattern)[0], outcome(function, None)[0])


def test_bytes_kept_elsewhere_do_not_count():
    kept.clear()
    assert outcome(_keeps_it_elsewhere, "silu")[1].saved_bytes == 0
    kept.clear()
    assert outcome(lambda x, weight: F.silu(x @ weight) * torch.tanh(x), "silu")[1].saved_bytes == 5 * 6 * 4


def test_an_input_written_over_after_the_call_is_an_error():
    def function(x, weight):
        inner = x + 0.0 * weight[:5]
        y = torch.ones(5, 6) * inner.detach()
        out = F.silu(y) * x
        y.zero_()
        return out

    with pytest.raises(RuntimeError, match="silu was modified in place"):
        outcome(function, "silu")


@pytest.mark.parametrize("pattern", ["silu", "silu|mul", ".*"])
def test_graphs_that_run_twice_are_computed_again(pattern):
    """Retained graphs, and input gradients before weight gradients as zero-bubble schedules do."""

    def function(x, weight):
        return (F.silu(x @ weight) * torch.tanh(x @ weight)) @ weight

    def gradients(pattern):
        layer = Layer(function)
        if pattern is not None:
            recompute_selected(layer, [PatternTally(label="", expression=re.compile(pattern))])
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
        out = layer(x).sum()
        twice = [torch.autograd.grad(out, x, retain_graph=True)[0] for _ in range(2)]
        return [*twice, *torch.autograd.grad(out, layer.weight)]

    assert equal(gradients(pattern), gradients(None))


def test_batch_norm_counts_a_batch_once():
    def norms(recompute):
        shape = ResNetModel(depth=18, num_classes=4, image_size=32, width=8)
        workload = dataclasses.replace(WORKLOAD, model=shape, seq_length=1)
        (chunk,) = chunks_of_stage(Layout(), 0, workload.num_layers)
        with torch.device("meta"):
            model = build_model(workload, chunk)
        assert isinstance(model, ResNet)
        apply_recompute(model, recompute, chunk)
        model.to_empty(device="cpu")
        model.materialize(torch.device("cpu"))
        init_parameters(model, 0, ShardMap())
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        model(images).square().mean().backward()
        return [*(p.grad for p in model.parameters()), *model.buffers()]

    counts, plain = ((8,),), norms(Recompute())
    selective = SelectiveRecompute(pattern=r".*(batch_norm|relu|conv2d)", num_layers=counts)
    for again in (Recompute(selective=(selective,)), Recompute(full=counts)):
        assert equal(norms(again), plain)


def test_views_share_one_storage_object():
    """What finding dropped tensors by their storage rests on."""
    x = torch.randn(4, 6)
    storage = weakref.ref(storage_of(x))
    view = x.detach().view(-1)[3:]
    assert storage() is not None and storage_of(view) is storage()
    del x
    assert storage() is storage_of(view)
    del view
    assert storage() is None


ALL = ((2,),)
MUL = SelectiveRecompute(pattern=r"feed_forward\..*(silu|mul)", num_layers=ALL)
ATTENTION = SelectiveRecompute(pattern="attention|.*norm", num_layers=((1,),))
SELECTIVE = Recompute(selective=(MUL, ATTENTION))
BF16 = Precision(level="O1", dtype="bfloat16")
O2 = Precision(level="O2", dtype="bfloat16")
FOUR_LAYERS = dataclasses.replace(WORKLOAD, model=dataclasses.replace(SHAPE, num_layers=4))
ZERO3 = Layout(dp_shard=2, zero_stage=3)
TP2_SP = Layout(tp=2, sequence_parallel=True)
LOCAL = dataclasses.replace(TP2_SP, tp_engine="local")


def trained(result):
    assert isinstance(result, RankReport), result
    return result.losses, result.grad_norms


def effects(result):
    assert isinstance(result, RankReport), result
    return {effect.pattern: effect for effect in result.findings.recompute}


@pytest.mark.slow
@pytest.mark.representative("zero3", "local")
@pytest.mark.parametrize("layout", [ZERO3, TP2_SP, LOCAL], ids=["zero3", "tp", "local"])
def test_every_way_gives_the_same_bits(layout, tmp_path):
    ways = [Recompute(), Recompute(full=ALL), SELECTIVE, dataclasses.replace(SELECTIVE, full=((1,),))]
    specs = [tiny_spec(layout, recompute=way, num_microbatches=2) for way in ways]
    specs += [tiny_spec(layout, recompute=way, precision=BF16) for way in (Recompute(), SELECTIVE)]
    plain, *others, plain_bf16, bf16 = run_gang(specs, tmp_path)
    for other in others:
        assert trained(other) == trained(plain)
    assert trained(bf16) == trained(plain_bf16)
    selective = effects(others[1])
    assert all(effect.saved_bytes > 0 and effect.num_matches > 0 for effect in selective.values())
    assert selective[MUL.pattern].num_matches == 2 * 2 * 2  # operators, layers, micro-batches


@pytest.mark.slow
def test_16_bit_shards(tmp_path):
    specs = [tiny_spec(ZERO3, recompute=way, precision=O2) for way in (Recompute(), SELECTIVE)]
    plain, selective = run_gang(specs, tmp_path)
    assert trained(selective) == trained(plain)


@pytest.mark.slow
def test_gathered_sequences_are_gathered_again(tmp_path):
    before_attention = select(gather_pattern("attention"))
    ways = [Recompute(), Recompute(communication=ALL), Recompute(communication=ALL, selective=(MUL, ATTENTION))]
    ways.append(before_attention)
    plain, communication, both, one = run_gang([tiny_spec(LOCAL, recompute=way) for way in ways], tmp_path)
    assert trained(communication) == trained(both) == trained(one) == trained(plain)
    effect = effects(communication)["communication"]
    assert effect.num_matches == 2 * 2  # before attention and feed-forward, layers
    # Kept instead of the gathered sequence: this rank's half of it.
    whole_bytes = WORKLOAD.global_batch_size * WORKLOAD.seq_length * WORKLOAD.model.hidden_size * 4
    assert effect.saved_bytes == 2 * 2 * whole_bytes // 2
    assert effect.recompute_s > 0.0
    (chosen,) = effects(one).values()
    assert (chosen.num_matches, chosen.saved_bytes) == (effect.num_matches // 2, effect.saved_bytes // 2)
    assert chosen.recompute_s > 0.0


@pytest.mark.slow
@pytest.mark.representative("interleaved")
@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (Layout(pp=2, stage_layers=((1, 1), (1, 1)), num_virtual_stages=2, schedule="interleaved"), ((1, 0), (1, 1))),
        (Layout(pp=2, stage_layers=((1, 1), (1, 1)), num_virtual_stages=2, schedule="zbv"), ((1, 1), (0, 1))),
        (dataclasses.replace(LOCAL, num_copies=2), ((4,),)),
    ],
    ids=["interleaved", "zbv", "copies"],
)
def test_by_stage_and_chunk(layout, counts, tmp_path):
    patterns = tuple(SelectiveRecompute(pattern=text, num_layers=counts) for text in (MUL.pattern, ".*"))
    ways = [Recompute(), Recompute(selective=patterns), Recompute(full=counts)]
    specs = [tiny_spec(layout, workload=FOUR_LAYERS, recompute=way, num_microbatches=4) for way in ways]
    plain, selective, full = run_gang(specs, tmp_path)
    assert trained(selective) == trained(full) == trained(plain)
    num_layers = sum(row[0] for row in counts)  # of rank 0
    num_calls = 2 * num_layers * 4 * layout.num_copies
    assert effects(selective)[MUL.pattern].num_matches == num_calls
    assert effects(selective)[".*"].saved_bytes > 0
