"""Parameters, FLOPs and number formats of models, and what the runner refuses."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials import sizes
from trials.failure import InfeasibleSpec
from trials.legality import check
from trials.models.built_in import Llama, ResNet
from trials.sizes import all_chunks
from trials.spec import (
    Candidate,
    Kernels,
    Layout,
    LinearModel,
    LlamaModel,
    Loader,
    LossScale,
    Precision,
    Protocol,
    Recompute,
    ResNetModel,
    SelectiveRecompute,
    gather_pattern,
)


def whole(shape):
    return all_chunks(Layout(), shape.num_layers)[0]


LLAMA2_7B = LlamaModel(
    hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_hidden_size=11008, vocab_size=32000
)


@pytest.mark.parametrize("shape", [SHAPE, LLAMA2_7B])
def test_counts_the_parameters_of_the_model(shape):
    with torch.device("meta"):
        model = Llama(shape, 16, whole(shape))
    assert sizes.num_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())


def test_llama2_7b_has_the_published_size():
    assert sizes.num_parameters(LLAMA2_7B) == 6_738_415_616


def test_flops_match_what_torch_counts():
    """Torch counts matmuls of one forward and backward; the formula adds the norms' gains, a small part."""
    from torch.utils.flop_counter import FlopCounterMode

    shape, length = LlamaModel(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4, ffn_hidden_size=128), 32
    model = Llama(shape, length, whole(shape))
    model.materialize(torch.device("cpu"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, length, dtype=torch.long)).sum().backward()
    gains = 6 * shape.hidden_size * (2 * shape.num_layers + 1)
    attention = 12 * shape.num_layers * shape.hidden_size * length
    counted = counter.get_total_flops() / length
    expected = sizes.model_flops_per_token(shape, length) - gains
    # Torch's CPU attention kernel may be counted or not, according to the version.
    assert counted == pytest.approx(expected, rel=0.05) or counted == pytest.approx(expected - attention, rel=0.05)


@pytest.mark.parametrize(("depth", "size"), [(18, 224), (50, 224), (50, 75)])
def test_resnet_figures_match_the_model(depth, size):
    """Torch leaves out the unneeded gradient of the image."""
    from torch.utils.flop_counter import FlopCounterMode

    shape = ResNetModel(depth=depth, image_size=size)
    with torch.device("meta"):
        model = ResNet(shape, all_chunks(Layout(), shape.num_layers)[0])
    assert sizes.num_parameters(shape) == sum(parameter.numel() for parameter in model.parameters())
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(2, 3, size, size, device="meta"))
    assert counter.get_total_flops() / 2 == pytest.approx(sizes.model_flops_per_token(shape, 1) / 3)


def test_resnet50_has_the_published_size_and_cost():
    shape = ResNetModel()
    assert sizes.num_parameters(shape) == 25_557_032
    assert sizes.model_flops_per_token(shape, 1) / 6 == pytest.approx(4.09e9, rel=1e-3)


def test_the_linear_chain_multiplies_its_weights():
    shape = LinearModel(num_layers=9, size=8192)
    assert sizes.num_parameters(shape) == 9 * 8192**2
    assert sizes.model_flops_per_token(shape, 1) == 6 * 9 * 8192**2


@pytest.mark.parametrize(
    ("precision", "kernels", "expected"),
    [
        (Precision(), Kernels(), "float32"),
        (Precision(), Kernels(matmul_precision="high"), "tf32"),
        (Precision(), Kernels(matmul_precision="medium"), "tf32"),
        (Precision(level="O1", dtype="bfloat16"), Kernels(matmul_precision="high"), "bfloat16"),
        (Precision(level="O2", dtype="float16"), Kernels(), "float16"),
        (Precision(level="O1-fp8", dtype="bfloat16"), Kernels(), "float8"),
    ],
)
def test_matrix_products_have_a_number_format(precision, kernels, expected):
    assert sizes.matmul_format(Candidate(precision=precision, kernels=kernels)) == expected


ZBV = Layout(pp=2, schedule="zbv", num_virtual_stages=2, stage_layers=((1, 1), (0, 0)))


def with_workload(**changes):
    return tiny_spec(workload=dataclasses.replace(WORKLOAD, **changes))


def with_model(**changes):
    shape = dataclasses.replace(SHAPE, **changes)
    return tiny_spec(Layout(tp=2), workload=dataclasses.replace(WORKLOAD, model=shape))


GATHERS = (SelectiveRecompute(pattern=gather_pattern("attention"), num_layers=((1,),)),)
ODD_LENGTH = dataclasses.replace(WORKLOAD, seq_length=15)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (tiny_spec(Layout(tp=2, dp_replicate=2)), "DDP cannot wrap tensor-parallel DTensors"),
        (tiny_spec(Layout(tp=2, dp_shard=2, zero_stage=1)), "ZeRO-1's buckets cannot hold tensor-parallel DTensors"),
        (tiny_spec(Layout(dp_shard=2)), "dp_shard 2 has no effect with zero_stage 0"),
        (tiny_spec(Layout(zero_stage=3)), "zero_stage 3 requires dp_shard above 1"),
        (tiny_spec(Layout(sequence_parallel=True)), "sequence_parallel requires tp above 1"),
        (tiny_spec(Layout(tp=4)), "num_kv_heads 2 is not divisible by tp 4"),
        (with_model(ffn_hidden_size=71), "ffn_hidden_size 71 is not divisible by tp 2"),
        (with_model(vocab_size=257), "vocab_size 257 is not divisible by tp 2"),
        (with_model(vocab_size=128), "less than the 256 values"),
        (with_model(hidden_size=30), "hidden_size 30 is not divisible by num_heads 4"),
        (with_model(hidden_size=20), "head size 5 is odd"),
        (with_model(num_kv_heads=3), "num_heads 4 is not divisible by num_kv_heads 3"),
        (tiny_spec(Layout(tp=2, sequence_parallel=True), workload=ODD_LENGTH), "seq_length 15 is not divisible"),
        (tiny_spec(Layout(dp_replicate=3)), "not divisible by micro_batch_size 2 x dp 3"),
        (tiny_spec(precision=Precision(level="O1")), "AMP level O1 does not allow float32"),
        (tiny_spec(precision=Precision(level="O1", dtype="float16")), "if and only if dtype is float16"),
        (tiny_spec(precision=Precision(loss_scale=LossScale())), "if and only if dtype is float16"),
        (tiny_spec(recompute=Recompute(full=((3,),))), "full counts 3 layers, but there are 2"),
        (tiny_spec(loader=Loader(num_workers=1)), "prefetch_factor must be 0 if and only if"),
        (tiny_spec(Layout(pp=0)), "must be at least 1"),
        (tiny_spec(Layout(pp=2, stage_layers=((1, 1),))), "1f1b requires at least one micro-batch per stage"),
        (tiny_spec(Layout(pp=2, schedule="gpipe", stage_layers=((1, 2),))), "stage_layers add up to 3 of 2 layers"),
        (tiny_spec(Layout(pp=2, schedule="gpipe")), "stage_layers has 0 chunks of 0 stages"),
        (tiny_spec(ZBV, kernels=Kernels(compile="block")), "which compiled graphs do not allow"),
        (tiny_spec(ZBV, recompute=Recompute(full=((1, 0),))), "full has 1 chunk of 2 stages"),
        (tiny_spec(Layout(cp=3)), "seq_length 16 is not divisible by 2 x cp 3"),
        (tiny_spec(Layout(cp=4, cp_method="ulysses")), "num_kv_heads 2 is not divisible by tp 1 x cp 4"),
        (tiny_spec(Layout(tp=2, num_copies=2)), "tp_engine local or auto"),
        (tiny_spec(Layout(shard_embedding=True)), "shard_embedding requires FSDP2"),
        (tiny_spec(recompute=Recompute(communication=((1,),))), "communication requires tp above 1"),
        (
            tiny_spec(Layout(tp=2), recompute=Recompute(selective=GATHERS)),
            "communication requires tp above 1, sequence_parallel",
        ),
        (tiny_spec(precision=Precision(white=("linear",))), "lists require AMP level O1"),
        (with_workload(model=LinearModel(num_layers=2)), "seq_length must be 1 for model kind linear"),
        (with_workload(model=ResNetModel(), seq_length=1), "resnet cannot train on data kind text"),
    ],
)
def test_refuses(spec, words):
    with pytest.raises(InfeasibleSpec, match=words.replace("*", r"\*").replace(".", r"\.")):
        check(spec)


@pytest.mark.parametrize("protocol", [Protocol(num_steps=0), Protocol(num_steps=9, max_steps=8)])
def test_refuses_a_protocol_that_measures_nothing(protocol):
    with pytest.raises(InfeasibleSpec, match=r"num_steps \d is outside 1\.\."):
        check(dataclasses.replace(tiny_spec(), protocol=protocol))


def test_refuses_a_warmup_that_cannot_end():
    with pytest.raises(InfeasibleSpec, match=r"min_warmup_steps 7 is outside 0\.\."):
        check(dataclasses.replace(tiny_spec(), protocol=Protocol(min_warmup_steps=7)))


def test_one_message_names_every_broken_rule():
    with pytest.raises(InfeasibleSpec, match=r"DDP cannot wrap.*; .*but there are 2"):
        check(tiny_spec(Layout(tp=2, dp_replicate=2), recompute=Recompute(full=((9,),))))


def test_odd_sequences_are_fine_without_sequence_parallel():
    check(tiny_spec(Layout(tp=2), workload=ODD_LENGTH))


def test_planning_computes_sizes_without_importing_torch():
    code = "import sys, trials.legality, trials.sizes, trials.failure; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
