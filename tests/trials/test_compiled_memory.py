"""What compiled layers keep for the backward pass: graphs of dry runs against those of real tensors and of inductor."""

import contextlib
import dataclasses

import pytest
import torch

from benchmarks.dryrun.cases import FAMILIES
from tests.trials.simulated import simulated_runs
from trials.dryrun.estimate import DryRunRequest
from trials.precision import autocast
from trials.spec import (
    Candidate,
    Kernels,
    LlamaModel,
    Precision,
    Recompute,
    SelectiveRecompute,
    TextData,
    TrialSpec,
    Workload,
)
from trials.training.loop import parallelize

TOLERANCE = 0.03
SHAPES = {
    "tiny": LlamaModel(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_size=192, vocab_size=256),
    "small": LlamaModel(hidden_size=512, num_layers=2, num_heads=8, num_kv_heads=2, ffn_hidden_size=1792),
}
PARTITIONED = "aot_eager_decomp_partition"
CASES = [
    *((shape, "O2", pattern, PARTITIONED) for shape in SHAPES for pattern in ("", "feed_forward")),
    *(("small", level, "", PARTITIONED) for level in ("O0", "O1")),
    ("small", "O1", "feed_forward", PARTITIONED),
    *((shape, level, "", "inductor") for shape in SHAPES for level in ("O1", "O2")),
    ("small", "O2", "feed_forward", "inductor"),
]


def _spec(shape, level, pattern, num_layers, compile_="block"):
    model = dataclasses.replace(SHAPES[shape], num_layers=num_layers)
    rules = (SelectiveRecompute(pattern=pattern, num_layers=((num_layers,),)),) if pattern else ()
    candidate = Candidate(
        micro_batch_size=2,
        precision=Precision(level=level, dtype="float32" if level == "O0" else "bfloat16"),
        recompute=Recompute(selective=rules),
        kernels=Kernels(compile=compile_),
    )
    workload = Workload(model=model, data=TextData(), seq_length=256, global_batch_size=2)
    return TrialSpec(workload=workload, candidate=candidate)


def _kept_bytes(spec, backend):
    """Bytes that autograd keeps in the forward pass of the real model, without its weights."""
    torch._dynamo.reset()
    kernels = dataclasses.replace(spec.candidate.kernels, backend=backend)
    spec = dataclasses.replace(spec, candidate=dataclasses.replace(spec.candidate, kernels=kernels))
    device = torch.device("cpu")
    model = parallelize(spec, None, device, stage=0)[0].model
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    tokens = torch.zeros(2, spec.workload.seq_length, dtype=torch.long)
    with contextlib.ExitStack() as stack:
        stack.enter_context(autocast(spec.candidate, device))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
        loss = model(tokens, targets=tokens)
    assert loss.requires_grad
    return sum(size for size, _ in kept.values())


def _predicted_bytes(specs):
    """Bytes of activations when the backward pass begins."""
    runs = simulated_runs([DryRunRequest(spec=spec, rank=0, mode="cpu") for spec in specs])
    assert not any(run.is_upper_bound for run in runs)
    return [run.passes[1].live["activation"] for run in runs]


def _peak_in_passes(run):
    """Peak outside of the optimiser step."""
    return max(peak.total_bytes for place, peak in run.peaks.items() if place.startswith(("forward", "backward")))


@pytest.mark.representative("-".join(CASES[3]))
@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it does itself while tracing
@pytest.mark.parametrize(("shape", "level", "pattern", "backend"), CASES, ids=["-".join(case) for case in CASES])
def test_a_compiled_layer_keeps_what_the_dry_run_predicts(shape, level, pattern, backend):
    specs = [_spec(shape, level, pattern, number) for number in (2, 3)]
    fewer, more = _predicted_bytes(specs)
    real_fewer, real_more = (_kept_bytes(spec, backend) for spec in specs)
    assert more - fewer == pytest.approx(real_more - real_fewer, rel=TOLERANCE)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_keeps_less_and_does_the_same_work():
    specs = [_spec("small", "O2", "", number, compile_) for compile_ in ("off", "block") for number in (2, 3)]
    runs = simulated_runs([DryRunRequest(spec=spec, rank=0) for spec in specs])
    kept = [run.passes[1].live["activation"] for run in runs]
    assert kept[3] - kept[2] < 0.9 * (kept[1] - kept[0])
    assert runs[3].flops == pytest.approx(runs[1].flops)
    peaks = [_peak_in_passes(run) for run in runs]
    assert peaks[3] < peaks[1]
    assert runs[3].num_parameters == runs[1].num_parameters


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name",
    [
        *("DDP x2", "ZeRO-1 x2", "ZeRO-3 x2, O2 bf16", "PP2 1F1B", "TP2 DTensor", "TP2 local, sequence parallel"),
        *("CP2 all-gather", "CP2 ring", "CP2 Ulysses", "single, O1 fp8", "single, full recompute"),
    ],
)
def test_graphs_of_every_layout_are_simulated(name):
    """Collectives and work are those of eager code, activations fewer, or as many if all of them are recomputed."""
    spec = FAMILIES[name]
    kernels = dataclasses.replace(spec.candidate.kernels, compile="block")
    compiled = dataclasses.replace(spec, candidate=dataclasses.replace(spec.candidate, kernels=kernels))
    plain, graphs = simulated_runs([DryRunRequest(spec=one, rank=0) for one in (spec, compiled)])
    assert not graphs.is_upper_bound
    assert graphs.collectives == plain.collectives
    assert sum(graphs.flops.values()) == pytest.approx(sum(plain.flops.values()))
    assert _peak_in_passes(graphs) <= _peak_in_passes(plain)


@pytest.mark.filterwarnings("ignore")
def test_a_graph_of_an_unknown_backend_is_simulated_as_eager_code():
    eager, compiled = _spec("tiny", "O2", "", 2, "off"), _spec("tiny", "O2", "", 2)
    kernels = dataclasses.replace(compiled.candidate.kernels, backend="aot_eager")
    compiled = dataclasses.replace(compiled, candidate=dataclasses.replace(compiled.candidate, kernels=kernels))
    plain, bound = simulated_runs([DryRunRequest(spec=spec, rank=0) for spec in (eager, compiled)])
    assert (plain.is_upper_bound, bound.is_upper_bound) == (False, True)
    assert bound.peaks == plain.peaks
