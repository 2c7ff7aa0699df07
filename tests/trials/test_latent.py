"""Multi-head latent attention computes what transformers computes, and trains like one process."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from tests.trials.gang import differences, run_gang
from tests.trials.initial import check_all
from tests.trials.parity_knobs import spec_of
from tests.trials.ranks import planted
from tests.trials.test_experts import EXPERTS, with_ep
from tests.trials.test_parity import NEUTRAL
from trials.legality import violations
from trials.models.built_in import Llama, MultiHeadLatentAttention, rotary_table
from trials.models.experts import routers_in
from trials.sizes import Chunk, model_flops_per_token, num_parameters
from trials.spec import LatentAttention, LlamaModel

LATENT = LatentAttention(q_lora_rank=10, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)


def with_latent(spec, latent=LATENT, experts=None):
    heads = spec.workload.model.num_heads
    model = dataclasses.replace(spec.workload.model, num_kv_heads=heads, latent=latent, experts=experts)
    return dataclasses.replace(spec, workload=dataclasses.replace(spec.workload, model=model))


def drawn(module):
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return module


OF_TRANSFORMERS = {
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}


@pytest.mark.parametrize("rank", [10, 0])
def test_it_computes_what_transformers_computes(rank):
    """Values, and gradients of inputs and of every weight."""
    deepseek = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    latent = dataclasses.replace(LATENT, q_lora_rank=rank)
    shape = LlamaModel(
        hidden_size=20, num_layers=1, num_heads=4, num_kv_heads=4, ffn_hidden_size=8, norm_eps=1e-6, latent=latent
    )
    config = deepseek.DeepseekV3Config(
        **{name: value or None for name, value in dataclasses.asdict(latent).items()},
        hidden_size=20,
        num_attention_heads=4,
        num_key_value_heads=4,
        rope_interleave=False,
        attn_implementation="eager",
    )
    ours, theirs = drawn(MultiHeadLatentAttention(shape, latent)), deepseek.DeepseekV3Attention(config, 0)
    for name, other in {**OF_TRANSFORMERS, **({} if rank else {"wq_b": "q_proj"})}.items():
        if getattr(ours, name) is not None:
            getattr(theirs, other).weight = torch.nn.Parameter(getattr(ours, name).weight.detach().clone())
    x = torch.randn(2, 7, 20, requires_grad=True)
    table = rotary_table(7, shape.rotary_size, shape.rope_theta)
    mask = torch.full((7, 7), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(x, tuple(table.unsqueeze(1)), mask)
    out = ours(x, table)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *theirs.parameters()])
    named = dict(zip(["x", *(name for name, _ in theirs.named_parameters())], wanted, strict=True))
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, named["x"], rtol=1e-4, atol=1e-4)
    for name, parameter in ours.named_parameters():
        other = "q_proj" if not rank and name == "wq_b.weight" else OF_TRANSFORMERS[name.removesuffix(".weight")]
        torch.testing.assert_close(parameter.grad, named[f"{other}.weight"], rtol=1e-4, atol=1e-4)


def test_weights_and_flops_are_counted():
    """In a model with experts, too; FLOPs against those of the matrix products, less the causal half."""
    for experts in (None, EXPERTS):
        model = with_latent(spec_of(NEUTRAL), experts=experts).workload.model
        chunk = Chunk(
            chunk=0, stage=0, virtual_stage=0, layer_ids=tuple(range(model.num_layers)), is_first=True, is_last=True
        )
        built = Llama(model, 8, chunk)
        assert num_parameters(model) == sum(parameter.numel() for parameter in built.parameters())
        assert bool(routers_in([built])) == (experts is not None)
    model = with_latent(spec_of(NEUTRAL)).workload.model
    longer = model_flops_per_token(model, 16) - model_flops_per_token(model, 8)
    assert longer == 8 * 6 * model.num_layers * model.num_heads * (10 + 8)


CASES = {
    "local": {"tp": "local"},
    "local-sp": {"tp": "local-sp"},
    "zero3-ulysses": {"dp": "zero3", "cp": "ulysses"},
    "ring": {"cp": "ring"},
    "zero1-local-sp-1f1b": {"pp": "1f1b", "dp": "zero1", "tp": "local-sp", "batches": "m2"},
    "all-gather-block": {"cp": "all-gather", "graph": "block"},
    "local-sp-copies": {"tp": "local-sp-copies", "batches": "m1"},
    "select": {"tp": "local", "recompute": "mixed"},
}
USUAL = ("local", "local-sp", "select")


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.representative(USUAL[1])
@pytest.mark.parametrize("names", [USUAL[:1], USUAL[1:2], tuple(CASES)[2:]], ids=["local", "local-sp", "others"])
def test_trains_like_a_single_process(names, tmp_path):
    (expected,) = run_gang([with_latent(spec_of(NEUTRAL))], tmp_path / "alone", before=check_all)
    for name in names:
        spec = with_latent(spec_of({**NEUTRAL, **CASES[name]}))
        assert not list(violations(spec.workload, spec.candidate)), name
        (found,) = run_gang([spec], tmp_path / name, before=check_all)
        loss, norm = differences(found, expected)
        assert loss < 1e-5 and norm < 1e-5, (name, loss, norm)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_with_split_experts_it_trains_like_a_single_process(tmp_path):
    """The layers of DeepSeek-V3."""
    alone, split = (
        with_latent(spec_of({**NEUTRAL, **changes}), experts=EXPERTS)
        for changes in ({}, {"dp": "zero1", "tp": "local"})
    )
    (expected,) = run_gang([alone], tmp_path / "alone")
    (found,) = run_gang([with_ep(split, 4)], tmp_path, before=check_all)
    assert max(differences(found, expected)) < 1e-5


def whole_gradients(_original):
    """Narrow projections count only this rank's heads."""
    return lambda _model: []


@pytest.mark.slow
def test_a_fault_in_the_gradients_of_narrow_projections_shows(tmp_path):
    spec = with_latent(spec_of({**NEUTRAL, "tp": "local"}))
    fault = functools.partial(planted, "trials.parallel.tensor", "_narrow_weights", whole_gradients)
    (expected,) = run_gang([with_latent(spec_of(NEUTRAL))], tmp_path / "alone")
    (found,) = run_gang([spec], tmp_path, around=[fault])
    assert max(differences(found, expected)) > 1e-5


def test_what_cannot_be_trained_is_refused():
    def problems(spec):
        return " ".join(violations(spec.workload, spec.candidate))

    spec = spec_of(NEUTRAL)
    assert "odd" in problems(with_latent(spec, dataclasses.replace(LATENT, qk_rope_head_dim=3)))
    assert "exceeds" in problems(with_latent(spec, dataclasses.replace(LATENT, v_head_dim=11)))
    fewer = with_latent(spec)
    model = dataclasses.replace(fewer.workload.model, num_kv_heads=1)
    assert "as many key-value heads" in problems(
        dataclasses.replace(fewer, workload=dataclasses.replace(fewer.workload, model=model))
    )
    assert "requires tp_engine local" in problems(with_latent(spec_of({**NEUTRAL, "tp": "tp"})))
