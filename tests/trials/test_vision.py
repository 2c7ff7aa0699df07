"""ResNet and the linear chain train the same whatever the layout, precision, recompute, memory format and graph mode.

Batch norm takes its statistics per micro-batch, so runs are compared that cut the global batch into the same
micro-batches: rank r trains on consecutive rows.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest
import torch

from tests.trials.gang import differences, run_gang
from tests.trials.tiny import FIVE_STEPS
from trials.models.built_in import BatchNorm, ResNet
from trials.operators import in_backward
from trials.outcome import RankReport
from trials.sizes import all_chunks
from trials.spec import (
    AdamW,
    Candidate,
    ImageFolderData,
    Kernels,
    Layout,
    LinearModel,
    Loader,
    LossScale,
    Precision,
    RandomData,
    Recompute,
    ResNetModel,
    TrialSpec,
    Workload,
)

IMAGES = Workload(
    model=ResNetModel(depth=18, num_classes=10, image_size=64, width=8),
    data=ImageFolderData(),
    seq_length=1,
    global_batch_size=8,
    optimizer=AdamW(lr=2e-5),
    seed=3,
)
VECTORS = dataclasses.replace(IMAGES, model=LinearModel(num_layers=3, size=48), data=RandomData())

BF16 = Precision(level="O1", dtype="bfloat16")
O2 = Precision(level="O2", dtype="bfloat16")
FP16 = Precision(level="O1", dtype="float16", loss_scale=LossScale(initial=256.0))
FULL, HALF = Recompute(full=((8,),)), Recompute(full=((3,),))
NHWC = Kernels(memory_format="nhwc")
DDP = Layout(dp_replicate=2)
ZERO1, ZERO2, ZERO3 = (Layout(dp_shard=2, zero_stage=stage) for stage in (1, 2, 3))
FSDP2 = Layout(dp_replicate=2, replicate_with="fsdp2")


def graph(kind, backend="aot_eager", **kernels):
    """``aot_eager`` traces the backward pass too, as real backends do, but takes twice as long."""
    return Kernels(compile=kind, backend=backend, **kernels)


CASES = {
    "single": {},
    "single/recompute": {"recompute": FULL},
    "single/nhwc": {"kernels": NHWC},
    "single/auto": {"kernels": Kernels(memory_format="auto")},
    "single/workers": {"loader": Loader(num_workers=1, prefetch_factor=2, full_batch=True)},
    "single/O1": {"precision": BF16},
    "single/O1-fp16/nhwc": {"precision": FP16, "kernels": NHWC},
    "single/O2/nhwc/recompute": {"precision": O2, "kernels": NHWC, "recompute": HALF},
    "single/blocks/recompute": {"kernels": graph("block"), "recompute": FULL},
    "single/model/nhwc": {"kernels": graph("model", memory_format="nhwc")},
    "single/model/auto": {"kernels": graph("model", "eager", memory_format="auto")},
    "ddp": {"layout": DDP},
    "ddp/nhwc/recompute": {"layout": DDP, "kernels": NHWC, "recompute": FULL},
    "ddp/auto/O1": {"layout": DDP, "kernels": Kernels(memory_format="auto"), "precision": BF16},
    "ddp/O2": {"layout": DDP, "precision": O2},
    "replicate/nhwc": {"layout": FSDP2, "kernels": NHWC},
    "zero1/nhwc/O1": {"layout": ZERO1, "kernels": NHWC, "precision": BF16},
    "zero2/recompute": {"layout": ZERO2, "recompute": HALF},
    "zero3": {"layout": ZERO3},
    "zero3/auto": {"layout": ZERO3, "kernels": Kernels(memory_format="auto")},
    "zero3/O2/nhwc/recompute": {"layout": ZERO3, "precision": O2, "kernels": NHWC, "recompute": FULL},
    "zero3/blocks/O1": {"layout": ZERO3, "kernels": graph("block", "eager"), "precision": BF16},
    "zero3/model": {"layout": ZERO3, "kernels": graph("model")},
}
LINEAR_CASES = {
    "linear": {},
    "linear/recompute": {"recompute": Recompute(full=((2,),))},
    "linear/O1": {"precision": BF16},
    "linear/ddp/O2": {"layout": DDP, "precision": O2},
    "linear/blocks": {"kernels": graph("block")},
    "linear/zero3/O2": {"layout": ZERO3, "precision": O2},
}


def trial(workload, candidate):
    """Trains in micro-batches of 2 in every layout."""
    return TrialSpec(workload=workload, candidate=Candidate(micro_batch_size=2, **candidate), protocol=FIVE_STEPS)


SPECS = {name: trial(IMAGES, case) for name, case in CASES.items()}
SPECS |= {name: trial(VECTORS, case) for name, case in LINEAR_CASES.items()}


REPRESENTATIVES = (
    *("single", "single/auto", "single/O1", "ddp/auto/O1", "ddp/nhwc/recompute", "zero3/auto"),
    *("linear", "linear/ddp/O2"),
)


def result_of(name):
    return results(SPECS[name].candidate.layout.world_size, name in REPRESENTATIVES)[name]


@functools.cache
def results(world_size, of_representatives):
    """Those of one gang: of all representatives on so many ranks, or of all others."""
    chosen = {
        name: spec
        for name, spec in SPECS.items()
        if (spec.candidate.layout.world_size, name in REPRESENTATIVES) == (world_size, of_representatives)
    }
    with tempfile.TemporaryDirectory() as folder:
        return dict(zip(chosen, run_gang(list(chosen.values()), Path(folder)), strict=True))


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.timeout(600)
@pytest.mark.representative(*REPRESENTATIVES)
@pytest.mark.parametrize("name", SPECS)
def test_trains_like_a_single_process(name):
    spec = SPECS[name]
    result = result_of(name)
    baseline = result_of("linear" if name in LINEAR_CASES else "single")
    loss, norm = differences(result, baseline)
    # Batch norm over few values amplifies rounding, and a rectifier that flips is felt at once. The fp32 rows show that
    # layouts are right: gradients of the wrong size or of the wrong rows are off by far more.
    loss_limit, norm_limit = (1e-5, 1e-3) if spec.candidate.precision.level == "O0" else (2e-2, 0.2)
    assert loss <= loss_limit and norm <= norm_limit, (loss, norm)
    assert isinstance(result, RankReport) and result.samples_per_step == 8


@pytest.mark.slow
def test_auto_formats_are_reported_and_agreed():
    for name in ("single/auto", "ddp/auto/O1", "zero3/auto"):
        result = result_of(name)
        assert isinstance(result, RankReport)
        found = result.findings.memory_format
        assert found is not None and found.chosen in ("nchw", "nhwc")
        assert found.rule == ("nhwc" if "O1" in name else "nchw")
        assert min(found.nchw_s, found.nhwc_s) > 0.0
    plain = result_of("single/O1")
    assert isinstance(plain, RankReport) and plain.findings.memory_format is None


@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_runs_report_their_graphs():
    for name in ("single/blocks/recompute", "single/model/nhwc", "zero3/model"):
        result = result_of(name)
        assert isinstance(result, RankReport)
        found = result.findings.graph
        assert found is not None and found.num_graphs >= 1 and result.compile_s == found.compile_s > 0.0
    compared = result_of("single/model/auto")
    assert isinstance(compared, RankReport) and compared.findings.graph is not None
    # Comparing memory formats compiles the model for both; that is no recompilation of training.
    assert (compared.findings.graph.num_graphs, compared.findings.graph.num_recompilations) == (1, 0)
    linear, blocks = (result_of(name) for name in ("linear/blocks", "single/blocks/recompute"))
    assert isinstance(linear, RankReport) and linear.findings.graph is not None
    # The first layer's input needs no gradient, the others' do.
    assert (linear.findings.graph.num_graphs, linear.findings.graph.num_recompilations) == (2, 1)
    assert "requires_grad" in linear.findings.graph.reasons[0]
    assert isinstance(blocks, RankReport) and blocks.findings.graph is not None
    # Eight blocks of seven shapes: within a shape the code is shared.
    assert (blocks.findings.graph.num_graphs, blocks.findings.graph.num_recompilations) == (7, 6)
    assert all("mismatch" in reason for reason in blocks.findings.graph.reasons)


def tiny_resnet():
    shape = ResNetModel(depth=18, num_classes=10, image_size=32, width=8)
    model = ResNet(shape, all_chunks(Layout(), shape.num_layers)[0])
    model.materialize(torch.device("cpu"))
    for name, parameter in model.named_parameters():
        initial = model.initial(name)
        torch.nn.init.normal_(parameter, initial.mean, initial.std)
    return model


def test_initial_values_keep_the_size_of_activations():
    model = tiny_resnet()
    sizes = []
    for layer in model.layers.values():
        layer.register_forward_hook(lambda _module, _args, output: sizes.append(output.std()))
    logits = model(torch.randn(16, 3, 32, 32))
    assert all(0.3 < size < 3.0 for size in sizes)
    assert 0.02 < logits.std() < 3.0


def test_backward_passes_are_distinguished_from_forward_passes():
    seen = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _grad: seen.append(in_backward()))
    (x * 2).sum().backward()
    assert seen == [True] and not in_backward()


def test_16_bit_weights_still_normalise_in_fp32():
    norm = BatchNorm(4)
    torch.nn.init.ones_(norm.weight)
    torch.nn.init.zeros_(norm.bias)
    norm.to(torch.bfloat16)
    norm.reset_statistics(torch.device("cpu"))
    assert norm.running_var.dtype == torch.float32
    x = torch.randn(8, 4, 3, 3) + 100.0
    out = norm(x.bfloat16())
    assert out.dtype == torch.bfloat16 and out.float().mean().abs() < 0.05
    assert norm.running_mean.mean() == pytest.approx(10.0, abs=0.2)
