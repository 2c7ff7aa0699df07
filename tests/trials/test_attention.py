"""Which attention kernel is taken where, attention put together from parts of the keys, and context parallelism."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trials.ranks import run_ranks
from tests.trials.split_models import differences, many
from tests.trials.tiny import SHAPE, tiny_spec
from trials.attention import Back, Merged, Parts, add_part, attend, attend_backward, packed, plan_attention, plus_packed
from trials.dryrun.estimate import DryRunRequest
from trials.dryrun.tracker import fake_process_group
from trials.kernels import attention_plan
from trials.models.built_in import rotary_table
from trials.parallel.context import GatheredAttention, RingAttention, by_holder, in_order, split_sequence
from trials.parallel.mesh import Group
from trials.spec import Kernels, Layout, LlamaModel, Precision

GROUPED = LlamaModel(hidden_size=512, num_layers=1, num_heads=8, num_kv_heads=2, ffn_hidden_size=512)
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("device", "dtype", "wanted", "kernel", "expands"),
    [
        ("cpu", FP32, "auto", "flash", False),
        ("cpu", BF16, "math", "math", False),
        ("cuda", BF16, "auto", "flash", False),
        ("cuda", BF16, "cudnn", "cudnn", False),
        ("cuda", FP32, "auto", "efficient", True),
        ("cuda", BF16, "efficient", "efficient", True),
        ("cuda", FP32, "math", "math", False),
        ("rocm", BF16, "auto", "flash", False),
        ("rocm", FP32, "auto", "efficient", True),
        ("npu", BF16, "auto", "math", True),
    ],
)
def test_grouped_queries_avoid_kernels_that_hold_all_scores(device, dtype, wanted, kernel, expands):
    plan = plan_attention(GROUPED, wanted, dtype, device)
    assert (plan.kernel, plan.expands) == (kernel, expands)


@pytest.mark.parametrize(
    ("head_size", "dtype", "capability", "kernel"),
    [
        (64, torch.float16, (7, 0), "efficient"),
        (64, BF16, (9, 0), "flash"),
        (512, BF16, (9, 0), "efficient"),
        (4, BF16, (9, 0), "math"),
        (4, FP32, (9, 0), "efficient"),
    ],
)
def test_cuda_kernels_have_their_limits(head_size, dtype, capability, kernel):
    model = LlamaModel(hidden_size=8 * head_size, num_layers=1, num_heads=8, num_kv_heads=8, ffn_hidden_size=64)
    assert plan_attention(model, "auto", dtype, "cuda", capability).kernel == kernel


def test_the_number_format_is_that_of_the_attention_operator():
    """A dry run plans for the device that is meant, on the one it has; a list may keep attention in fp32."""

    def planned(**precision):
        spec = tiny_spec(precision=Precision(level="O1", dtype="bfloat16", **precision), kernels=Kernels())
        request = DryRunRequest(spec=dataclasses.replace(spec, device="cuda"), rank=0)
        model = request.spec.workload.model
        assert isinstance(model, LlamaModel)
        plan = attention_plan(request.spec, model, torch.device("cpu"))
        return plan.dtype, plan.kernel

    assert planned() == (BF16, "flash")
    assert planned(black=("scaled_dot_product_attention",)) == (FP32, "efficient")
    assert planned(black=("linear",)) == (BF16, "flash")


@pytest.mark.parametrize(
    ("layout", "capability", "chosen", "runs", "kernel"),
    [
        (Layout(cp=2), (9, 0), SDPBackend.CUDNN_ATTENTION, True, "cudnn"),
        (Layout(cp=2, cp_method="ring"), (10, 0), SDPBackend.CUDNN_ATTENTION, True, "cudnn"),
        (Layout(cp=2), (9, 0), SDPBackend.CUDNN_ATTENTION, False, "flash"),
        (Layout(cp=2), (9, 0), SDPBackend.FLASH_ATTENTION, True, "flash"),
        (Layout(cp=2), (8, 0), SDPBackend.CUDNN_ATTENTION, True, "flash"),
        (Layout(cp=2, cp_method="ulysses"), (9, 0), SDPBackend.CUDNN_ATTENTION, True, "flash"),
    ],
)
def test_parts_of_the_keys_take_cudnn_where_whole_sequences_do(layout, capability, chosen, runs, kernel, monkeypatch):
    """The device's answers are given here: there is no Hopper."""
    tried = []

    def attempt(plan, *_):
        tried.append(plan.kernel)
        if not runs:
            raise RuntimeError("no kernel")

    monkeypatch.setattr("trials.kernels.capability", lambda _: capability)
    monkeypatch.setattr("torch._fused_sdp_choice", lambda *_, **__: chosen.value)
    monkeypatch.setattr("trials.kernels._try_parts", attempt)
    spec = tiny_spec(layout, precision=Precision(level="O2", dtype="bfloat16"))
    assert attention_plan(spec, SHAPE, torch.device("cpu")).kernel == kernel
    assert kernel != "cudnn" or tried == ["cudnn"], "it is tried before use"


def test_torch_reveals_its_choice_of_kernel():
    q = torch.zeros(1, 2, 128, 8, dtype=BF16, requires_grad=True)
    assert torch._fused_sdp_choice(q, q, q, is_causal=True, enable_gqa=False) == SDPBackend.FLASH_ATTENTION.value


CP = 4


def drawn(num_positions, dtype, num_kv_heads=2):
    """Queries, keys, values and the output's gradient."""
    generator = torch.Generator().manual_seed(1)
    heads = (4, num_kv_heads, num_kv_heads, 4)
    return [torch.randn(2, n, num_positions, 16, generator=generator).to(dtype) for n in heads]


@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_parts_of_the_keys_add_up(kernel, dtype, tolerance):
    """Queries attend to themselves, to a part that all of them see, and to one that only the later half sees."""
    q, *keys_values, grad = drawn(40, dtype)
    (own_k, seen_k, late_k), (own_v, seen_v, late_v) = (
        (t, torch.roll(t, 3, 2)[:, :, :30], torch.roll(t, 5, 2)) for t in keys_values
    )
    parts = Parts(kernel, repeats=kernel == "math")
    out, lse, seeds = parts.attend(q, own_k, own_v, causal=True)
    merged = Merged(out, lse)
    merged.add(*parts.attend(q, seen_k, seen_v)[:2], is_late=False)
    merged.add(*parts.attend(q[:, :, 20:], late_k, late_v)[:2], is_late=True)
    back = Back(grad, merged.out.to(dtype), merged.lse, seeds)
    of_q, of_own_k, of_own_v = parts.backward(back, q, own_k, own_v, causal=True)
    of_q = of_q.float()
    sums = [torch.empty_like(packed(k, v)) for k, v in ((seen_k, seen_v), (late_k, late_v))]
    add_part(parts, back, q, of_q, packed(seen_k, seen_v), sums[0], is_late=False)
    add_part(parts, back, q, of_q, packed(late_k, late_v), sums[1], is_late=True)

    wide = [t.double().requires_grad_() for t in (q, own_k, own_v, seen_k, seen_v, late_k, late_v)]
    visible = torch.cat([torch.ones(40, 40).tril(), torch.ones(40, 30), torch.ones(40, 40)], dim=1).bool()
    visible[:20, 70:] = False
    all_k, all_v = (torch.cat(wide[i::2], dim=2) for i in (1, 2))
    wanted = F.scaled_dot_product_attention(wide[0], all_k, all_v, attn_mask=visible, enable_gqa=True)
    wanted.backward(grad.double())
    none = torch.zeros(1, dtype=dtype)
    of_others = (
        plus_packed(none.expand_as(k), none.expand_as(k), one) for k, one in zip((seen_k, late_k), sums, strict=True)
    )
    found = [merged.out, of_q, of_own_k, of_own_v, *next(of_others), *next(of_others)]
    for one, other in zip(found, [wanted.detach(), *(t.grad for t in wide)], strict=True):
        assert other is not None
        assert (one.double() - other).abs().max() <= tolerance * max(1.0, float(other.abs().max()))


@pytest.mark.parametrize("kernel", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("num_positions", [40, 64])
def test_kernels_of_devices_are_called_as_their_operators_are_declared(kernel, num_positions):
    """On tensors without storage: arguments, their order, and shapes, of which the efficient kernel pads one."""
    q, k, v, grad = (t.to("meta") for t in drawn(num_positions, torch.bfloat16, num_kv_heads=4))
    out, lse, seeds = attend(kernel, q, k[:, :, :8], v[:, :, :8], causal=False)
    assert out.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32
    of_q, of_k, of_v = attend_backward(kernel, grad, q, k[:, :, :8], v[:, :, :8], out, lse, seeds, causal=False)
    assert of_q.shape == q.shape and of_k.shape == of_v.shape == k[:, :, :8].shape


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operator made."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.num_elements = max([self.num_elements, *made])
        return result


@pytest.mark.parametrize(("function", "held"), [(GatheredAttention, CP), (RingAttention, 1)])
@pytest.mark.parametrize("rank", [0, CP - 1])
def test_nothing_is_larger_than_the_keys_and_values_held(function, held, rank):
    """No mask, no scores, no copies of keys and values for every query head; the scores of one rank are 64 times 256
    elements for every head."""
    with fake_process_group(rank, CP):
        group = Group(name=torch.distributed.group.WORLD.group_name, size=CP, rank=rank)
        q, k, v = (torch.randn(1, heads, 64, 8, requires_grad=True) for heads in (2, 1, 1))
        with Largest() as largest:
            out = function.apply(q, k, v, Parts("flash", repeats=False), group)
            functools.reduce(torch.add, out.unbind(1)).sum().backward()
    assert largest.num_elements == max(held * 2 * k.numel(), q.numel())


class Launches(TorchDispatchMode):
    """Collectives started and awaited, and attention, in order; and whether that reads what was received itself."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.reads_received = []
        self._received = set()

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional":
            self.names.append(NAMES[name])
            self._received.add(result.untyped_storage().data_ptr())
        elif "flash_attention" in name:
            self.names.append("attend")
            keys, values = args[2:4] if name.endswith("backward") else args[1:3]
            places = {one.untyped_storage().data_ptr() for one in (keys, values)}
            self.reads_received.append(places <= self._received)
        return result


NAMES = {
    "all_gather_into_tensor": "gather",
    "reduce_scatter_tensor": "scatter",
    "all_to_all_single": "turn",
    "wait_tensor": "wait",
}
GATHERED = ["gather", "attend", "wait", "attend", "attend"]
TURN = ["wait", "turn", "attend"]
RING_FORWARD = ["turn", "attend", *TURN, *TURN, "wait", "attend"]
RING_BACKWARD = ["turn", "attend", *TURN, "turn", *TURN, "wait", "turn", "wait", "attend", "wait", "turn", "wait"]


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [(GatheredAttention, GATHERED, [*GATHERED, "scatter", "wait"]), (RingAttention, RING_FORWARD, RING_BACKWARD)],
)
def test_keys_and_values_travel_while_others_are_attended_to(function, forward, backward):
    """The gather, or the next turn of the ring, is started before attention to what is here, and awaited after it, in
    both passes; round the ring, sums of gradients too travel while the next keys are attended to. Attention reads keys
    and values where they arrived, of several ranks as of one."""
    rank = CP - 2
    with fake_process_group(rank, CP):
        group = Group(name=torch.distributed.group.WORLD.group_name, size=CP, rank=rank)
        q, k, v = (torch.randn(1, heads, 64, 8, requires_grad=True) for heads in (2, 2, 2))
        with Launches() as launches:
            out = function.apply(q, k, v, Parts("flash", repeats=False), group)
        with Launches() as back:
            out.sum().backward()
    assert launches.names == forward and back.names == backward
    for one in (launches, back):
        assert one.reads_received == [False, *[True] * (one.names.count("attend") - 1)], "the first are its own"


ULYSSES, RING = (Layout(cp=2, cp_method=method) for method in ("ulysses", "ring"))
HYBRID = Layout(cp=4, cp_method="hybrid", ulysses_degree=2)
ALL_HEADS = {"shape": dataclasses.replace(SHAPE, num_kv_heads=4)}
LOCAL_SP = {"tp": 2, "tp_engine": "local", "sequence_parallel": True}
CASES = {
    2: {
        "all_gather": (Layout(cp=2), {}),
        "ulysses": (ULYSSES, {}),
        "ring": (RING, {}),
        "ring-math": (RING, {"attention": "math"}),
        "ring-selective": (RING, {"selective": r"attention\.scaled_dot_product_attention"}),
        "all_gather-math": (Layout(cp=2), {"attention": "math"}),
        "all_gather-expanded": (Layout(cp=2), {"expands": True}),
        "ulysses-expanded": (ULYSSES, {"expands": True}),
        "ring-expanded": (RING, {"expands": True}),
    },
    4: {
        "all_gather4": (Layout(cp=4), {}),
        "ring4": (dataclasses.replace(RING, cp=4), {}),
        "ring-copies-recompute": (Layout(cp=2, cp_method="ring", num_copies=2, **LOCAL_SP), {"recompute": True}),
        "ulysses4-all-heads": (dataclasses.replace(ULYSSES, cp=4), ALL_HEADS),
        "hybrid": (HYBRID, {}),
        "hybrid-selective": (HYBRID, {"selective": r"attention\.scaled_dot_product_attention"}),
        "ulysses-local-sp-all-heads": (Layout(cp=2, cp_method="ulysses", **LOCAL_SP), ALL_HEADS),
    },
    8: {
        "hybrid-copies-recompute-all-heads": (
            dataclasses.replace(HYBRID, num_copies=2, **LOCAL_SP),
            {**ALL_HEADS, "recompute": True},
        ),
        "hybrid8-all-heads": (dataclasses.replace(HYBRID, cp=8, ulysses_degree=4), ALL_HEADS),
    },
}


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 2))
def test_the_parts_of_all_ranks_make_the_sequence(cp, piece, num_sequences):
    length = 2 * cp * piece
    tokens = torch.arange(num_sequences * length).view(num_sequences, length)
    parts = [split_sequence(tokens, index, cp) for index in range(cp)]
    assert {part.shape for part in parts} == {(num_sequences, length // cp)}
    whole = in_order(torch.stack(parts)[..., None])
    assert torch.equal(whole[..., 0], tokens)
    assert torch.equal(by_holder(whole, cp)[..., 0], torch.stack(parts))


def test_every_rank_attends_to_the_same_number_of_keys():
    num_keys = torch.arange(1, 33)[None]
    assert {int(split_sequence(num_keys, index, 4).sum()) for index in range(4)} == {int(num_keys.sum()) // 4}


def test_rotary_positions_are_those_of_the_part():
    table = rotary_table(16, 8, 1e4)
    assert torch.equal(split_sequence(table, 1, 2), torch.cat([table[:, 4:8], table[:, 8:12]], dim=1))


@functools.cache
def results(world_size):
    cases = {"one": (Layout(), {}), "one-all-heads": (Layout(), ALL_HEADS)} if world_size == 1 else CASES[world_size]
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(cases, run_ranks(many, world_size, Path(folder), list(cases.values()))[0], strict=True))


@pytest.mark.representative("2-all_gather", "2-ulysses", "2-ring")
@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size, cases in CASES.items() for name in cases])
def test_loss_and_gradients_are_those_of_one_process(world_size, name):
    reference = results(1)["one-all-heads" if name.endswith("all-heads") else "one"]
    loss, grads = differences(results(world_size)[name], reference)
    assert loss <= 2e-6 and grads <= 1e-5, (loss, grads)
