"""Candidates become inputs of the cost model, and large numbers of them are estimated quickly."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from cluster.cost.cost_model import cost_model, inputs_of
from cluster.cost.generic import GenericInputs, generic_peak_bytes, generic_step_seconds
from cluster.cost.usual import KnobColumns
from cluster.cost.work import layers_params, selective_shares, tables_params, work_of
from cluster.hardware.topology import load_cluster
from tests.cluster.cost.rows import varied
from trials.sizes import model_flops_per_token, num_parameters
from trials.spec import (
    Candidate,
    ImageFolderData,
    Kernels,
    Layout,
    LinearModel,
    LlamaModel,
    Precision,
    RandomData,
    Recompute,
    ResNetModel,
    SelectiveRecompute,
    TextData,
    Workload,
)

LLAMA = LlamaModel(
    hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, ffn_hidden_size=14336, vocab_size=128256
)
WORKLOAD = Workload(model=LLAMA, data=TextData(), seq_length=8192, global_batch_size=64)
BF16 = Precision(level="O2", dtype="bfloat16")
CLUSTER = load_cluster("dgx-h100")


def test_parameters_and_flops_agree_with_the_trial_runner() -> None:
    x = inputs_of([(WORKLOAD, Candidate(precision=BF16))], CLUSTER)
    work = work_of(x)
    # The cost model counts both norms and biases as 4 h per layer and no final norm.
    assert (layers_params(x, work) + tables_params(x)).sum() == pytest.approx(num_parameters(LLAMA), rel=1e-3)
    forward = 32 * (work.matmul_flops + 2 * work.attention_flops) + work.head_flops
    assert 3 * forward[0] / work.tokens[0] == pytest.approx(model_flops_per_token(LLAMA, 8192), rel=1e-3)


def test_pipelines_keep_what_backward_passes_gather() -> None:
    layouts = (Layout(dp_shard=2, zero_stage=3), Layout(pp=2, dp_shard=2, zero_stage=3, stage_layers=((16, 16),)))
    x = inputs_of([(WORKLOAD, Candidate(layout=layout, precision=BF16)) for layout in layouts], CLUSTER)
    assert x.stays_gathered.tolist() == [0, 1]


def test_layouts_and_recompute_arrive_per_stage() -> None:
    layout = Layout(pp=2, dp_shard=2, tp=2, zero_stage=1, schedule="interleaved", num_virtual_stages=2)
    layout = Layout(
        **{**{f: getattr(layout, f) for f in layout.__dataclass_fields__}, "stage_layers": ((9, 8), (9, 6))}
    )
    recompute = Recompute(
        full=((4, 0), (0, 2)),
        selective=(SelectiveRecompute(pattern=r"feed_forward\.mul", num_layers=((9, 8), (9, 6))),),
    )
    x = inputs_of([(WORKLOAD, Candidate(layout=layout, recompute=recompute, precision=BF16))], CLUSTER)
    assert x.stage_layers.tolist() == [[18, 14]]
    assert x.stage_full.tolist() == [[4, 2]]
    assert 0.1 < x.selective_share[0] < 0.3
    assert x.num_microbatches[0] == 32


def test_selective_patterns_by_operator_and_module() -> None:
    def shares(pattern: str, layers: int = 32) -> tuple[float, float]:
        recompute = Recompute(selective=(SelectiveRecompute(pattern=pattern, num_layers=((layers,),)),))
        (dropped,), (repeated,) = selective_shares(recompute, LLAMA, WORKLOAD.seq_length, ((32,),))
        return dropped, repeated

    mul, work = shares(r"feed_forward\.mul")
    module, module_work = shares("feed_forward")
    assert 0 < mul < module < 1
    assert work < 0.1 < module_work
    assert shares(r"feed_forward\.mul", 8) == pytest.approx((mul / 4, work / 4))
    assert shares("nothing") == (0, 0)


def test_precision_levels() -> None:
    kernels = Kernels(matmul_precision="high")
    rows = [Candidate(), Candidate(kernels=kernels), Candidate(precision=Precision(level="O1", dtype="bfloat16"))]
    x = inputs_of([(WORKLOAD, c) for c in [*rows, Candidate(precision=BF16)]], CLUSTER)
    assert x.peak_flops_per_s.tolist() == [66.9e12, 494.7e12, 989.4e12, 989.4e12]
    assert x.cast_bytes.tolist() == [0, 0, 2, 0]
    assert (x.weight_bytes + x.gradient_bytes + x.optimizer_bytes == 16).all()


def test_sums_over_tp_hide_where_the_backward_pass_can_be_taken_apart() -> None:
    local, zbv = Layout(tp=2, tp_engine="local"), {"schedule": "zbv", "num_virtual_stages": 2}
    layouts = [local, Layout(tp=2), Layout(tp=2, tp_engine="local", pp=2, stage_layers=((8, 8), (8, 8)), **zbv)]  # type: ignore[arg-type]
    candidates = [Candidate(layout=layout, precision=BF16) for layout in layouts]
    candidates.append(Candidate(layout=local, precision=Precision(level="O1-fp8", dtype="bfloat16")))
    x = inputs_of([(WORKLOAD, candidate) for candidate in candidates], CLUSTER)
    assert x.hides_sums.tolist() == [1, 0, 0, 0]


def test_chunks_add_up_gradients_of_the_head_in_fp32() -> None:
    candidates = [Candidate(precision=BF16, kernels=Kernels(loss_chunks=chunks)) for chunks in (1, 4)]
    x = inputs_of([(WORKLOAD, candidate) for candidate in candidates], CLUSTER)
    assert x.head_sums_bytes.tolist() == [0, 4]


def test_other_models_are_refused() -> None:
    other = Workload(model=LinearModel(), data=RandomData(), seq_length=1, global_batch_size=8)
    with pytest.raises(NotImplementedError, match="linear"):
        inputs_of([(other, Candidate())], CLUSTER)


def test_large_numbers_are_cheap() -> None:
    """A row among 20,000 costs little more time than a row among 500, and memory stays bounded."""
    model, few = cost_model(), varied(500)
    many = few.take(np.tile(np.arange(500), 40))
    seconds = {}
    for x in (few, many):
        times = []
        for _ in range(4):
            start = time.process_time()
            found = model.estimate(x)
            times.append(time.process_time() - start)
        seconds[len(x)] = min(times) / len(x)
    assert seconds[20_000] < 3 * seconds[500]
    np.testing.assert_allclose(found.step_s[:500], found.step_s[-500:])
    tracemalloc.start()
    model.estimate(many)
    assert tracemalloc.get_traced_memory()[1] < 200e6
    tracemalloc.stop()


def test_generic_workloads() -> None:
    names = GenericInputs.__dataclass_fields__.keys() - {"knobs", "kind"}
    ones = {name: np.ones(2) for name in names}
    workload = Workload(model=ResNetModel(), data=ImageFolderData(), seq_length=1, global_batch_size=8)
    x = GenericInputs(
        **{
            **ones,
            "knobs": KnobColumns.of_pairs([(workload, Candidate())] * 2),
            "kind": "accelerator",
            "forward_flops": np.full(2, 4e9),
            "activation_bytes": np.full(2, 1e8),
            "num_params": np.full(2, 25e6),
            "num_kernels": np.full(2, 160.0),
            "param_bytes": np.full(2, 16.0),
            "micro_batch_size": np.array([1.0, 1024.0]),
            "dp": np.full(2, 8.0),
            "peak_flops_per_s": np.full(2, 125e12),
            "memory_bytes_per_s": np.full(2, 900e9),
            "link_bytes_per_s": np.full(2, 150e9),
        }
    )
    model = cost_model()
    seconds = generic_step_seconds(x, model.time.coefficients)
    assert seconds["launch"][0] > seconds["compute"][0], "one image is bound by launches"
    assert seconds["launch"][1] < 1e-3 * seconds["compute"][1], "1024 are not"
    assert seconds["compute"][1] == pytest.approx(1024 * seconds["compute"][0])
    peaks = generic_peak_bytes(x, model.memory.coefficients)
    assert peaks["activations"][1] == pytest.approx(1024 * peaks["activations"][0])
