"""Loss scaling, 16-bit weights and their update, autocast lists and 8-bit floats."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trials.gang import run_gang
from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials.failure import InfeasibleSpec
from trials.legality import check
from trials.models import build_model
from trials.models.built_in import next_token_loss
from trials.models.model import TrainModel
from trials.operators import operator_name
from trials.outcome import RankReport
from trials.parallel.mesh import HeldParameter, ShardMap, init_parameters
from trials.precision import (
    LossScaler,
    apply_autocast_lists,
    autocast,
    check_device,
    check_float8,
    mixed_precision_policy,
    store,
)
from trials.recompute import apply_recompute
from trials.reports import OperatorCast
from trials.sizes import chunks_of_stage
from trials.spec import ImageFolderData, Layout, LossScale, Precision, Recompute, ResNetModel, SelectiveRecompute
from trials.training import optimizer as adamw
from trials.training.loop import parallelize
from trials.training.optimizer import LocalAdamW

OVERFLOWING = LossScale(initial=2.0**60, backoff_factor=2.0**-24, backoff_interval=1)
O1_FP16 = Precision(level="O1", dtype="float16", loss_scale=OVERFLOWING)
O2_FP16 = Precision(level="O2", dtype="float16", loss_scale=OVERFLOWING)
FLAGS = st.lists(st.booleans(), max_size=60)


def run_lengths_scale(config, flags):
    """The schedule in another formulation: count complete intervals within runs of equal flags."""
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
def test_schedule(flags, growth_interval, backoff_interval):
    config = LossScale(initial=1.0, growth_interval=growth_interval, backoff_interval=backoff_interval)
    scaler = LossScaler(config)
    for finite in flags:
        scaler.update(finite=finite)
    assert scaler.scale == run_lengths_scale(config, flags)
    assert scaler.num_skipped == flags.count(False)


@pytest.mark.parametrize("finite", [True, False])
def test_the_scale_stays_a_positive_finite_number(finite):
    scaler = LossScaler(LossScale(growth_interval=1, backoff_interval=1))
    for _ in range(2000):
        scaler.update(finite=finite)
    assert 0.0 < scaler.scale < float("inf")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_collect_updates_too_small_for_16_bits(dtype):
    """A hundred updates of 1e-4 move a weight of 1; in 16 bits each alone would round to nothing."""
    parameter = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = LocalAdamW([HeldParameter(parameter)], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        parameter.grad = torch.ones(4, dtype=dtype)
        optimizer.step()
    assert torch.allclose(parameter.float(), torch.full((4,), 0.99), atol=4e-3)
    assert bool((parameter < 1.0).all())


def test_masters_divide_by_the_scale_in_fp32():
    """1e-3 / 2**15 is below float16's smallest number, yet the second moment must see it."""
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    held = [HeldParameter(parameter)]
    optimizer = LocalAdamW(held, grad_factor=lambda: 2.0**-15, lr=1e-2, eps=0.0, weight_decay=0.0)
    parameter.grad = torch.full((1,), 1e-3, dtype=torch.float16)
    optimizer.step()
    assert parameter.item() == pytest.approx(0.99, abs=1e-3)


def test_masters_have_the_memory_format_the_weights_train_in():
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
def test_old_devices_are_refused_with_a_remedy(dtype, capability, remedy, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Old Card")
    precision, device = Precision(dtype=dtype), torch.device("cuda", 0)
    if remedy is None:
        check_device(precision, device)
        return
    with pytest.raises(InfeasibleSpec, match=rf"{dtype} .*Old Card.*{capability[0]}\.{capability[1]}; {remedy}"):
        check_device(precision, device)


@pytest.mark.slow
def test_a_fixed_scale_changes_nothing_but_the_range(tmp_path):
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
def test_every_layout_skips_the_same_steps(precision, tmp_path):
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


def build(precision, recompute=None):
    (chunk,) = chunks_of_stage(Layout(), 0, WORKLOAD.num_layers)
    with torch.device("meta"):
        model = build_model(WORKLOAD, chunk)
    meter = apply_autocast_lists(model, precision)
    apply_recompute(model, recompute or Recompute(), chunk)
    model.to_empty(device="cpu")
    model.materialize(torch.device("cpu"))
    init_parameters(model, 3, ShardMap())
    return model, meter


CPU = torch.device("cpu")


def candidate_at(precision, layout=None):
    return tiny_spec(layout, precision=precision).candidate


def train(precision, recompute=None):
    """Loss and gradients of a step, and calls by name."""
    model, meter = build(precision, recompute)
    with autocast(candidate_at(precision), CPU):
        loss = model(TOKENS, TOKENS)
    loss.backward()
    counts = {cast.name: cast.num_calls for cast in meter.casts(1)}
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())], counts


def output_types(precision):
    """Types of every module's outputs."""
    model, _ = build(precision)
    types = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _module, _args, out, name=name: types.update({name: getattr(out, "dtype", None)})
        )
    with autocast(candidate_at(precision), CPU):
        model(TOKENS)
    return types


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_lists_overrule_autocast():
    usual = output_types(O1)
    assert usual["layers.0.attention_norm"] == torch.float32 and usual["output"] == torch.bfloat16
    listed = output_types(dataclasses.replace(O1, white=("rms_norm",), black=("linear",)))
    assert listed["layers.0.attention_norm"] == listed["norm"] == torch.bfloat16
    assert listed["layers.1.feed_forward.w13"] == listed["output"] == torch.float32


class Copies(TorchDispatchMode):
    """Records the 16-bit copies that are made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default:
            self.made.append(weakref.ref(out))
        return out

    @property
    def num_alive(self):
        return sum(one() is not None for one in self.made)


@pytest.mark.parametrize(("zero_stage", "num_alive"), [(2, 4), (3, 0)])
def test_copies_of_gathered_weights_do_not_outlive_their_use(zero_stage, num_alive):
    """Saved tensors are dropped, as by recompute: what remains is in autocast's cache."""
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    candidate = candidate_at(O1, Layout(dp_shard=2, zero_stage=zero_stage))
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    drop = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None)
    with Copies() as copies, autocast(candidate, CPU), drop:
        layers(x)
        assert len(copies.made) == 4 and copies.num_alive == num_alive


def test_all_black_is_fp32_to_the_bit():
    black, counts = train(ALL_BLACK)
    assert equal(black, train(Precision())[0])
    assert not equal(black, train(O1)[0])
    assert counts == {"linear": NUM_LINEARS, "scaled_dot_product_attention": SHAPE.num_layers}


def test_gradients_flow_through_the_casts():
    values, _ = train(WHITE)
    reference, _ = train(Precision())
    for value, wanted in zip(values, reference, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, wanted, rtol=0.1, atol=2e-3)
        assert bool(value.any())


@pytest.mark.parametrize("precision", [ALL_BLACK, WHITE], ids=["black", "white"])
@pytest.mark.parametrize("recompute", EVERY_WAY[1:], ids=["full", "selective"])
def test_a_layer_computed_again_sees_the_same_lists(precision, recompute):
    plain, plain_counts = train(precision)
    again, counts = train(precision, recompute)
    assert equal(again, plain)
    assert counts == plain_counts


def test_unmatched_operator_names_are_reported(caplog):
    model, meter = build(dataclasses.replace(O1, white=("linaer", "mul")))
    assert meter.casts(1)[0] == OperatorCast(name="linaer", list="white", num_calls=0)
    caplog.clear()
    for _ in range(2):
        with autocast(candidate_at(O1), CPU):
            model(TOKENS)
    by_name = {cast.name: cast.num_calls for cast in meter.casts(2)}
    assert by_name["linaer"] == 0 and by_name["mul"] > 0
    assert caplog.records == []  # once is enough
    meter.reset()
    assert {cast.num_calls for cast in meter.casts(1)} == {0}


def test_without_lists_nothing_changes():
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
def test_operator_names(call, name):
    class Names(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(operator_name(func))
            return func(*args, **(kwargs or {}))

    seen = []
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
def test_gangs(layout, tmp_path):
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


FLOAT8 = Precision(level="O1-fp8", dtype="bfloat16")
SHORT_FLOAT8 = Precision(level="O2-fp8", dtype="bfloat16")
WIDE = dataclasses.replace(WORKLOAD, model=dataclasses.replace(SHAPE, hidden_size=64, ffn_hidden_size=96))
KEEP, FLAT = Recompute(), Layout()


def trained(precision, recompute=KEEP):
    """The model after one backward pass, and its loss."""
    spec = tiny_spec(workload=WIDE, precision=precision, recompute=recompute)
    (part,) = parallelize(spec, None, CPU, stage=0)
    tokens = torch.arange(64).view(4, 16)
    with autocast(spec.candidate, CPU):
        loss = next_token_loss(part.module(tokens), tokens)
    loss.backward()
    return part, loss.detach()


@pytest.mark.parametrize(("precision", "stored"), [(FLOAT8, torch.float32), (SHORT_FLOAT8, torch.bfloat16)])
def test_the_layers_linear_modules_compute_in_8_bits_and_nothing_else_does(precision, stored):
    part, loss = trained(precision)
    converted = {name for name, module in part.model.named_modules() if type(module).__name__ == "Float8Linear"}
    per_layer = ("attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2")
    assert converted == {f"layers.{i}.{name}" for i in range(2) for name in per_layer}
    same, exact = trained(Precision(level=precision.base, dtype="bfloat16"))
    assert {parameter.dtype for parameter in part.model.parameters()} == {stored}
    assert 0 < abs(loss - exact) < 2e-3 * exact
    name = "layers.0.feed_forward.w13.weight"
    gradient, expected = (one.model.get_parameter(name).grad for one in (part, same))
    assert gradient is not None and expected is not None and gradient.dtype == stored
    # e5m2 rounds a gradient by up to an eighth; products average that out.
    assert 0.005 < (gradient - expected).norm() / expected.norm() < 0.2


def test_weights_are_gathered_in_16_bits_only_where_they_are_stored_so():
    assert mixed_precision_policy(FLOAT8).param_dtype is None
    policy = mixed_precision_policy(SHORT_FLOAT8)
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


def matmuls(precision):
    """Number formats of input, weight and result of linear modules, by path, and of gradients, by parameter."""
    spec = tiny_spec(workload=WIDE, precision=precision)
    (part,) = parallelize(spec, None, CPU, stage=0)
    paths = {parameter: name.removesuffix(".weight") for name, parameter in part.model.named_parameters()}
    seen = {}

    class Formats(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if operator_name(func) == "linear" and len(args) > 1:
                seen[paths[args[1]]] = (args[0].dtype, args[1].dtype, result.dtype)
            return result

    tokens = torch.arange(64).view(4, 16)
    with Formats():
        loss = next_token_loss(part.module(tokens), tokens)
    loss.backward()
    return seen, {name: parameter.grad.dtype for name, parameter in part.model.named_parameters()}


@pytest.mark.parametrize(("level", "norms"), [("O2", ".*norm"), ("O2", "RMSNorm"), ("O2-fp8", ".*norm")])
def test_modules_kept_in_fp32_store_and_compute_in_it_and_others_do_not(level, norms):
    patterns = (r"layers\.0", norms, "output")
    seen, gradients = matmuls(Precision(level=level, dtype="bfloat16", keep_fp32=patterns))
    in_first = {path for path in seen if path.startswith("layers.0.")}
    assert len(in_first) == 4 and "output" in seen
    assert {seen.pop(path) for path in {*in_first, "output"}} == {(torch.float32,) * 3}
    assert set(seen.values()) == ({(torch.bfloat16,) * 3} if level == "O2" else set())
    in_fp32 = {name for name, dtype in gradients.items() if dtype == torch.float32}
    assert in_fp32 == {name for name in gradients if "norm" in name or name.startswith(("layers.0.", "output."))}


class Two(TrainModel):
    """A model with values of its own, unlike the built-in ones, which draw theirs later."""

    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)


def test_weights_kept_in_fp32_are_not_rounded():
    model = Two()
    before = model.first.weight.detach().clone()
    store(model, Precision(level="O2", dtype="bfloat16", keep_fp32=("first",)), sharded=False, is_whole=True)
    assert model.last.weight.dtype == torch.bfloat16 and torch.equal(model.first.weight, before)


def test_a_pattern_that_matches_no_module_is_refused():
    with pytest.raises(InfeasibleSpec, match=r"keep_fp32: no module of the model matches 'heads'"):
        trained(Precision(level="O2", dtype="bfloat16", keep_fp32=("heads",)))


def test_zero3_refuses_to_recompute_operators_of_modules_kept_in_fp32():
    """Their weights are gathered again only when the module's own gradients arrive, which may be later."""
    zero3 = Layout(dp_shard=2, zero_stage=3)
    keeping = {"precision": Precision(level="O2", dtype="bfloat16", keep_fp32=(".*norm",))}
    selecting = {"recompute": Recompute(selective=(SelectiveRecompute(pattern=".*norm.*", num_layers=((1,),)),))}
    with pytest.raises(InfeasibleSpec, match="keep_fp32 with zero_stage 3 requires full recompute"):
        check(tiny_spec(zero3, **keeping, **selecting))
    for knobs in (keeping, selecting, keeping | {"recompute": Recompute(full=((1,),))}):
        check(tiny_spec(zero3, **knobs))
    check(tiny_spec(dataclasses.replace(zero3, zero_stage=2), **keeping, **selecting))


def test_patterns_of_recompute_see_linear():
    pattern = SelectiveRecompute(pattern=r".*\.w(13|qkv)\.linear", num_layers=((2,),))
    part, loss = trained(FLOAT8, Recompute(selective=(pattern,)))
    same, expected = trained(FLOAT8)
    (effect,) = part.recompute_meter.effects(1)
    assert effect.num_matches == 4 and effect.saved_bytes > 0
    assert loss == expected
    for one, other in zip(part.model.parameters(), same.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def spec_of(layout=FLAT, precision=FLOAT8, **shape):
    workload = dataclasses.replace(WIDE, model=dataclasses.replace(WIDE.model, **shape))
    return tiny_spec(layout, workload=workload, precision=precision)


RESNET = dataclasses.replace(WIDE, model=ResNetModel(), data=ImageFolderData(), seq_length=1)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (spec_of(ffn_hidden_size=72), "ffn_hidden_size 72 is not divisible by 16; use O1"),
        (spec_of(precision=SHORT_FLOAT8, ffn_hidden_size=72), "O2-fp8: ffn_hidden_size 72 is not .* by 16; use O2"),
        (spec_of(Layout(tp=2), ffn_hidden_size=48), "ffn_hidden_size 48 is not divisible by 16 on each of 2"),
        (spec_of(Layout(tp=2), num_heads=16, num_kv_heads=2), "queries, keys and values 80 is not divisible by 16"),
        (spec_of(precision=Precision(level="O1-fp8", dtype="float16")), "in bfloat16, not in float16"),
        (tiny_spec(workload=RESNET, precision=FLOAT8), "which the layers of model kind resnet do not have"),
    ],
)
def test_refuses(spec, words):
    with pytest.raises(InfeasibleSpec, match=words):
        check(spec)


@pytest.mark.parametrize(
    ("capability", "hip", "architecture", "words"),
    [
        ((8, 0), None, "", r"requires compute capability 8\.9, Some Card has 8\.0; use level O1"),
        ((8, 9), None, "", None),
        ((9, 0), "7.0", "gfx90a", "requires an MI300 or newer, Some Card is gfx90a; use level O1"),
        ((9, 4), "7.0", "gfx942:sramecc+", None),
    ],
)
def test_devices_without_8_bit_matmuls_are_refused(capability, hip, architecture, words, monkeypatch):
    properties = SimpleNamespace(name="Some Card", gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: properties.name)
    monkeypatch.setattr(torch.version, "hip", hip)
    if words is None:
        check_float8(FLOAT8, torch.device("cuda", 0))
        return
    with pytest.raises(InfeasibleSpec, match=words):
        check_float8(FLOAT8, torch.device("cuda", 0))


def test_a_missing_package_is_reported_with_the_install_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InfeasibleSpec, match=r"requires the package torchao: pip install 'tune-cluster\[fp8\]'"):
        check_float8(FLOAT8, CPU)


@pytest.mark.exhaustive
def test_the_package_is_silent_when_imported():
    code = "from trials.precision import torchao_float8\nwith torchao_float8() as it: it.Float8LinearConfig"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


WORKSPACE_BYTES = 4 * 100


def spied(monkeypatch):
    """Bytes of fp32 gradients and the options of every call of torch's update from now on."""
    calls = []
    update = adamw.adamw

    def noted(params, grads, *states, **options):
        calls.append((sum(grad.nbytes for grad in grads), options))
        update(params, grads, *states, **options)

    monkeypatch.setattr(adamw, "adamw", noted)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_match_torch_with_the_fused_kernel_in_bounded_memory(dtype, monkeypatch):
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


@given(FLAGS)
def test_fixed_scale_stays(flags):
    scaler = LossScaler(LossScale(initial=7.0, growth_interval=1, backoff_interval=1, dynamic=False))
    for finite in flags:
        scaler.update(finite=finite)
    assert scaler.scale == 7.0
