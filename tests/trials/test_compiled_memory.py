"""What compiled layers keep for the backward pass: graphs of dry runs against those of real tensors and of inductor."""

import contextlib
import dataclasses

import pytest
import torch

from benchmarks.dryrun.cases import compiled
from tests.trials.simulated import FAMILIES, simulated_runs
from trials.dryrun.estimate import DryRunRequest, Traffic
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
SMALL = LlamaModel(hidden_size=512, num_layers=2, num_heads=8, num_kv_heads=2, ffn_hidden_size=1792, vocab_size=256)
PARTITIONED = "aot_eager_decomp_partition"
CASES = [("O2", "", PARTITIONED), ("O2", "feed_forward", "inductor")]
LAYOUTS = ("ZeRO-3 x2, O2 bf16", "CP2 all-gather")


def _spec(level, pattern, num_layers, compile_="block", backend="inductor"):
    rules = (SelectiveRecompute(pattern=pattern, num_layers=((num_layers,),)),) if pattern else ()
    candidate = Candidate(
        micro_batch_size=2,
        precision=Precision(level=level, dtype="float32" if level == "O0" else "bfloat16"),
        recompute=Recompute(selective=rules),
        kernels=Kernels(compile=compile_, backend=backend),
    )
    model = dataclasses.replace(SMALL, num_layers=num_layers)
    workload = Workload(model=model, data=TextData(), seq_length=256, global_batch_size=2)
    return TrialSpec(workload=workload, candidate=candidate)


def _kept_bytes(spec):
    """Bytes that autograd keeps in the forward pass of the real model, without its weights."""
    torch._dynamo.reset()
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


@pytest.mark.representative("-".join(CASES[0]))
@pytest.mark.filterwarnings("ignore")  # dynamo warns of what it does itself while tracing
@pytest.mark.parametrize(("level", "pattern", "backend"), CASES, ids=["-".join(case) for case in CASES])
def test_a_compiled_layer_keeps_what_the_dry_run_predicts(level, pattern, backend):
    fewer, more = _predicted_bytes([_spec(level, pattern, number) for number in (2, 3)])
    real_fewer, real_more = (_kept_bytes(_spec(level, pattern, number, backend=backend)) for number in (2, 3))
    assert more - fewer == pytest.approx(real_more - real_fewer, rel=TOLERANCE)


@pytest.mark.exhaustive
def test_graphs_of_every_layout_do_the_work_of_eager_code_with_less_memory():
    specs = [spec for name in LAYOUTS for spec in (FAMILIES[name], compiled(FAMILIES[name]))]
    runs = simulated_runs([DryRunRequest(spec=spec, rank=0) for spec in specs])
    for name, plain, graphs in zip(LAYOUTS, runs[::2], runs[1::2], strict=True):
        assert not graphs.is_upper_bound, name
        traffic = dict(plain.collectives)
        if name == "CP2 all-gather":  # a graph gathers once for both passes
            gathers = traffic["all_gather"]
            traffic["all_gather"] = Traffic(num_calls=gathers.num_calls // 2, num_bytes=gathers.num_bytes // 2)
        assert graphs.collectives == traffic, name
        assert sum(graphs.flops.values()) == pytest.approx(sum(plain.flops.values())), name
        assert _peak_in_passes(graphs) < _peak_in_passes(plain), name


@pytest.mark.filterwarnings("ignore")
def test_a_graph_of_an_unknown_backend_is_simulated_as_eager_code():
    specs = [_spec("O2", "", 2, "off"), _spec("O2", "", 2, backend="aot_eager")]
    plain, bound = simulated_runs([DryRunRequest(spec=spec, rank=0) for spec in specs])
    assert (plain.is_upper_bound, bound.is_upper_bound) == (False, True)
    assert bound.peaks == plain.peaks
