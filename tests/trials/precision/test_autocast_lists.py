"""Custom autocast lists: what they name runs in the type they say, in every layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.trials.gang import run_gang
from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials.models import TrainModel, build_model
from trials.operators import operator_name
from trials.outcome import RankReport
from trials.parallel.mesh import ShardMap, init_parameters
from trials.precision import CastMeter, apply_autocast_lists, autocast
from trials.recompute import apply_recompute
from trials.reports import OperatorCast
from trials.sizes import chunks_of_stage
from trials.spec import Layout, Precision, Recompute, SelectiveRecompute

TOKENS = torch.randint(0, 256, (4, WORKLOAD.seq_length), generator=torch.Generator().manual_seed(0))
NUM_LINEARS = 4 * SHAPE.num_layers + 1
O1 = Precision(level="O1", dtype="bfloat16")
ALL_BLACK = dataclasses.replace(O1, black=("linear", "scaled_dot_product_attention"))
"""Nothing else of the model is in 16 bits unless its inputs are."""
WHITE = dataclasses.replace(O1, white=("rms_norm", "embedding"), black=("silu",))
EVERY_WAY = [
    Recompute(),
    Recompute(full=((2,),)),
    Recompute(full=((1,),), selective=(SelectiveRecompute(pattern=".*", num_layers=((2,),)),)),
]


def build(precision: Precision, recompute: Recompute | None = None) -> tuple[TrainModel, CastMeter]:
    (chunk,) = chunks_of_stage(Layout(), 0, WORKLOAD.num_layers)
    with torch.device("meta"):
        model = build_model(WORKLOAD, chunk)
    meter = apply_autocast_lists(model, precision)
    apply_recompute(model, recompute or Recompute(), chunk)
    model.to_empty(device="cpu")
    model.materialize(torch.device("cpu"))
    init_parameters(model, 3, ShardMap())
    return model, meter


def train(precision: Precision, recompute: Recompute | None = None) -> tuple[list[Tensor], dict[str, int]]:
    """Loss and gradients of a step, and calls by name."""
    model, meter = build(precision, recompute)
    with autocast(precision, torch.device("cpu")):
        loss = model(TOKENS, TOKENS)
    loss.backward()
    counts = {cast.name: cast.num_calls for cast in meter.casts(1)}
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())], counts


def output_types(precision: Precision) -> dict[str, torch.dtype]:
    """Types of every module's outputs."""
    model, _ = build(precision)
    types: dict[str, torch.dtype] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _module, _args, out, name=name: types.update({name: getattr(out, "dtype", None)})
        )
    with autocast(precision, torch.device("cpu")):
        model(TOKENS)
    return types


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_lists_overrule_autocast() -> None:
    usual = output_types(O1)
    assert usual["layers.0.attention_norm"] == torch.float32 and usual["output"] == torch.bfloat16
    listed = output_types(dataclasses.replace(O1, white=("rms_norm",), black=("linear",)))
    assert listed["layers.0.attention_norm"] == listed["norm"] == torch.bfloat16
    assert listed["layers.1.feed_forward.w13"] == listed["output"] == torch.float32


def test_all_black_is_fp32_to_the_bit() -> None:
    black, counts = train(ALL_BLACK)
    assert equal(black, train(Precision())[0])
    assert not equal(black, train(O1)[0])
    assert counts == {"linear": NUM_LINEARS, "scaled_dot_product_attention": SHAPE.num_layers}


def test_gradients_flow_through_the_casts() -> None:
    values, _ = train(WHITE)
    reference, _ = train(Precision())
    for value, wanted in zip(values, reference, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, wanted, rtol=0.1, atol=2e-3)
        assert bool(value.any())


@pytest.mark.parametrize("precision", [ALL_BLACK, WHITE], ids=["black", "white"])
@pytest.mark.parametrize("recompute", EVERY_WAY[1:], ids=["full", "selective"])
def test_a_layer_computed_again_sees_the_same_lists(precision: Precision, recompute: Recompute) -> None:
    plain, plain_counts = train(precision)
    again, counts = train(precision, recompute)
    assert equal(again, plain)
    assert counts == plain_counts


def test_names_never_met_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model, meter = build(dataclasses.replace(O1, white=("linaer", "mul")))
    assert meter.casts(1)[0] == OperatorCast(name="linaer", list="white", num_calls=0)
    caplog.clear()
    for _ in range(2):
        with autocast(O1, torch.device("cpu")):
            model(TOKENS)
    by_name = {cast.name: cast.num_calls for cast in meter.casts(2)}
    assert by_name["linaer"] == 0 and by_name["mul"] > 0
    assert caplog.records == []  # once is enough
    meter.reset()
    assert {cast.num_calls for cast in meter.casts(1)} == {0}


def test_no_lists_change_nothing() -> None:
    model, meter = build(O1)
    assert "forward" not in vars(model) and meter.casts(1) == ()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: x * x, "mul"),
        (lambda x: x @ x, "matmul"),
        (lambda x: torch.nn.functional.silu(x), "silu"),
        (lambda x: torch.nn.functional.rms_norm(x, (2,)), "rms_norm"),
        (lambda x: x.mul_(1.0), None),
        (lambda x: x.__imul__(1.0), None),
        (lambda x: x.mT, None),
        (lambda x: torch.ops.aten.mul.Tensor(x, x), None),
    ],
)
def test_operator_names(call, name: str | None) -> None:
    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(operator_name(func))
            return func(*args, **(kwargs or {}))

    seen: list[str | None] = []
    x = torch.ones(2, 2)
    with Names():
        call(x)
    assert seen == [name]


@pytest.mark.representative("zero3")
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp_shard=2, zero_stage=3),
        Layout(tp=2, sequence_parallel=True),
        Layout(tp=2, sequence_parallel=True, tp_engine="local"),
        Layout(pp=2, stage_layers=((1, 1),)),
    ],
    ids=["zero3", "tp", "local", "pp"],
)
def test_gangs(layout: Layout, tmp_path: Path) -> None:
    counts = ((1, 1),) if layout.pp > 1 else ((2,),)
    selective = Recompute(selective=(SelectiveRecompute(pattern=".*", num_layers=counts),))
    specs = [tiny_spec(layout, precision=precision, num_microbatches=2) for precision in (Precision(), ALL_BLACK)]
    specs += [
        tiny_spec(layout, precision=WHITE, num_microbatches=2, recompute=recompute)
        for recompute in (Recompute(), Recompute(full=counts), selective)
    ]
    results = run_gang(specs, tmp_path)
    assert [result for result in results if not isinstance(result, RankReport)] == []
    fp32, black, white, *again = results
    assert (black.losses, black.grad_norms) == (fp32.losses, fp32.grad_norms)
    for result in again:
        assert (result.losses, result.grad_norms) == (white.losses, white.grad_norms)
    assert white.losses == pytest.approx(fp32.losses, abs=2e-3) and white.losses != fp32.losses
    assert {cast.name: cast.num_calls > 0 for cast in white.findings.autocast} == dict.fromkeys(
        ("rms_norm", "embedding", "silu"), True
    )
