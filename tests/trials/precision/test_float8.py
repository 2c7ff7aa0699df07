"""8-bit float matmuls: which modules have them, that they are what is computed, and where they are refused."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials.failure import InfeasibleSpec
from trials.legality import check
from trials.models.built_in import next_token_loss
from trials.precision import autocast, check_float8
from trials.spec import ImageFolderData, Layout, Precision, Recompute, ResNetModel, SelectiveRecompute, TrialSpec
from trials.training.loop import ModelPart, parallelize

FLOAT8 = Precision(level="O1-fp8", dtype="bfloat16")
WIDE = dataclasses.replace(WORKLOAD, model=dataclasses.replace(SHAPE, hidden_size=64, ffn_hidden_size=96))
CPU = torch.device("cpu")
KEEP, FLAT = Recompute(), Layout()


def trained(precision: Precision, recompute: Recompute = KEEP) -> tuple[ModelPart, Tensor]:
    """The model after one backward pass, and its loss."""
    spec = tiny_spec(workload=WIDE, precision=precision, recompute=recompute)
    (part,) = parallelize(spec, None, CPU, stage=0)
    tokens = torch.arange(64).view(4, 16)
    with autocast(precision, CPU):
        loss = next_token_loss(part.module(tokens), tokens)
    loss.backward()
    return part, loss.detach()


def test_the_layers_linear_modules_compute_in_8_bits_and_nothing_else_does() -> None:
    part, loss = trained(FLOAT8)
    converted = {name for name, module in part.model.named_modules() if type(module).__name__ == "Float8Linear"}
    per_layer = ("attention.wqkv", "attention.wo", "feed_forward.w13", "feed_forward.w2")
    assert converted == {f"layers.{i}.{name}" for i in range(2) for name in per_layer}
    same, exact = trained(Precision(level="O1", dtype="bfloat16"))
    assert 0 < abs(loss - exact) < 2e-3 * exact
    name = "layers.0.feed_forward.w13.weight"
    gradient, expected = (one.model.get_parameter(name).grad for one in (part, same))
    assert gradient is not None and expected is not None and gradient.dtype == torch.float32
    # e5m2 rounds a gradient by up to an eighth; products average that out.
    assert 0.005 < (gradient - expected).norm() / expected.norm() < 0.2


def test_patterns_of_recompute_see_linear() -> None:
    pattern = SelectiveRecompute(pattern=r".*\.w(13|qkv)\.linear", num_layers=((2,),))
    part, loss = trained(FLOAT8, Recompute(selective=(pattern,)))
    same, expected = trained(FLOAT8)
    (effect,) = part.recompute_meter.effects(1)
    assert effect.num_matches == 4 and effect.saved_bytes > 0
    assert loss == expected
    for one, other in zip(part.model.parameters(), same.model.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def spec_of(layout: Layout = FLAT, precision: Precision = FLOAT8, **shape: Any) -> TrialSpec:
    workload = dataclasses.replace(WIDE, model=dataclasses.replace(WIDE.model, **shape))
    return tiny_spec(layout, workload=workload, precision=precision)


RESNET = dataclasses.replace(WIDE, model=ResNetModel(), data=ImageFolderData(), seq_length=1)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (spec_of(ffn_hidden_size=72), "ffn_hidden_size 72 is not divisible by 16; use O1"),
        (spec_of(Layout(tp=2), ffn_hidden_size=48), "ffn_hidden_size 48 is not divisible by 16 on each of 2"),
        (spec_of(Layout(tp=2), num_heads=16, num_kv_heads=2), "queries, keys and values 80 is not divisible by 16"),
        (spec_of(precision=Precision(level="O1-fp8", dtype="float16")), "in bfloat16, not in float16"),
        (tiny_spec(workload=RESNET, precision=FLOAT8), "of which the layers of model kind resnet have none"),
    ],
)
def test_refuses(spec: TrialSpec, words: str) -> None:
    with pytest.raises(InfeasibleSpec, match=words):
        check(spec)


@pytest.mark.parametrize(
    ("capability", "hip", "architecture", "words"),
    [
        ((8, 0), None, "", r"needs compute capability 8\.9, Some Card has 8\.0; use level O1"),
        ((8, 9), None, "", None),
        ((9, 0), "7.0", "gfx90a", "needs an MI300 or newer, Some Card is gfx90a; use level O1"),
        ((9, 4), "7.0", "gfx942:sramecc+", None),
    ],
)
def test_devices_without_8_bit_matmuls_are_refused(
    capability: tuple[int, int], hip: str | None, architecture: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(name="Some Card", gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: properties.name)
    monkeypatch.setattr(torch.version, "hip", hip)
    if words is None:
        check_float8(torch.device("cuda", 0))
        return
    with pytest.raises(InfeasibleSpec, match=words):
        check_float8(torch.device("cuda", 0))


def test_a_machine_without_the_package_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(InfeasibleSpec, match=r"needs the package torchao: pip install 'tune-cluster\[fp8\]'"):
        check_float8(CPU)


def test_the_package_says_nothing_when_it_is_imported() -> None:
    code = "from trials.precision import torchao_float8\nwith torchao_float8() as it: it.Float8LinearConfig"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
