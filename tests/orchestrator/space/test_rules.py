"""Every rule fires exactly when its arithmetic requires, and agrees with what the runner refuses."""

import dataclasses
import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.space.rules import RULES, check
from tests.orchestrator.space.candidate_strategies import (
    CANDIDATES,
    DEGREES,
    OTHER_WORKLOADS,
    WORKLOADS,
    canonicalize,
    random_candidate,
)
from tests.support.sweep_files import topology
from trials import legality
from trials.spec import (
    Candidate,
    Experts,
    Kernels,
    LatentAttention,
    Layout,
    LlamaModel,
    Precision,
    Recompute,
    ResNetModel,
    TextData,
    Workload,
)

FP8 = ("O1-fp8", "O2-fp8")
NODES = st.lists(st.integers(1, 8), min_size=1, max_size=4)
WORKLOAD = Workload(
    model=LlamaModel(
        hidden_size=64, num_layers=4, num_heads=8, num_kv_heads=4, ffn_hidden_size=96
    ),
    data=TextData(),
    seq_length=32,
    global_batch_size=16,
)  # fmt: skip


def broken(candidate, workload=WORKLOAD, where=None, filters=None):
    return {violation.rule_id for violation in check(candidate, workload, where, filters)}


def ddp(layout):
    """DistributedDataParallel reduces the gradients."""
    replicates = layout.zero_stage == 0 and layout.dp_replicate * layout.cp > 1 and layout.replicate_with == "ddp"
    return layout.zero_stage == 1 or replicates


def recomputes_selected(candidate):
    return any(any(row) for part in candidate.recompute.selective for row in part.num_layers)


def micro_batches(candidate, workload):
    layout = candidate.layout
    return workload.global_batch_size // (candidate.micro_batch_size * layout.dp_replicate * layout.dp_shard)


def wrong_chunks(layout):
    if layout.pp == 1:
        return layout.num_virtual_stages != 1
    allowed = {"1f1b": {1}, "zbv": {2}, "interleaved": {2, 3, 5}, "gpipe": {1, 2, 3, 5}}
    too_many = layout.pp * layout.num_virtual_stages > 4 + 2 * layout.pp
    return layout.num_virtual_stages not in allowed[layout.schedule] or too_many


def wrong_stages(layout, num_layers=4):
    if layout.pp == 1:
        return layout.stage_layers != ()
    flat = [count for row in layout.stage_layers for count in row]
    return not fits(layout.stage_layers, layout) or any(count < 0 for count in flat) or sum(flat) != num_layers


def fits(counts, layout):
    return [len(row) for row in counts] == [layout.pp] * layout.num_virtual_stages


def wrong_recompute(candidate):
    layout, recompute = candidate.layout, candidate.recompute
    present = layout.stage_layers if layout.pp > 1 else ((4,),)
    for counts in (recompute.full, recompute.communication, *(part.num_layers for part in recompute.selective)):
        if counts and not fits(counts, layout):
            return True
        if counts and fits(present, layout):
            pairs = [(n, m) for row, most in zip(counts, present, strict=True) for n, m in zip(row, most, strict=True)]
            if any(n > m for n, m in pairs):
                return True
    return False


EXPERTS = Experts(num_experts=4, top_k=2, ffn_hidden_size=16, aux_loss=0.1)
LATENT = LatentAttention(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4)
BROKEN_WHEN = {
    "shard-needs-zero": lambda c, w: (c.layout.dp_shard == 1) != (c.layout.zero_stage == 0),
    "tp-num-heads": lambda c, w: w.model.num_heads % c.layout.tp != 0,
    "tp-num-kv-heads": lambda c, w: w.model.num_kv_heads % c.layout.tp != 0,
    "tp-hidden-size": lambda c, w: w.model.hidden_size % c.layout.tp != 0,
    "tp-ffn-hidden-size": lambda c, w: w.model.ffn_hidden_size % c.layout.tp != 0,
    "tp-vocab-size": lambda c, w: w.model.vocab_size % c.layout.tp != 0,
    "sp-needs-tp": lambda c, w: c.layout.sequence_parallel and c.layout.tp < 2,
    "sp-seq-length": lambda c, w: c.layout.sequence_parallel and w.seq_length % (c.layout.cp * c.layout.tp) > 0,
    "zero1-with-tp": lambda c, w: c.layout.zero_stage == 1 and c.layout.tp > 1 and c.layout.tp_engine == "dtensor",
    "ddp-with-tp": lambda c, w: (
        ddp(c.layout) and c.layout.zero_stage == 0 and c.layout.tp > 1 and c.layout.tp_engine == "dtensor"
    ),
    "ddp-with-chunks": lambda c, w: ddp(c.layout) and c.layout.zero_stage == 0 and c.layout.num_virtual_stages > 1,
    "global-batch": lambda c, w: (
        w.global_batch_size
        not in range(0, w.global_batch_size + 1, c.micro_batch_size * c.layout.dp_replicate * c.layout.dp_shard)
    ),
    "copies": lambda c, w: (
        c.layout.num_copies == 2
        and not (
            c.layout.tp > 1
            and c.layout.tp_engine == "local"
            and (
                c.micro_batch_size in (2, 4, 8)
                or (
                    c.layout.cp == 1
                    and c.loader.batching != "buckets"
                    and w.seq_length % (2 * c.layout.tp if c.layout.sequence_parallel or w.model.experts else 2) == 0
                )
            )
        )
    ),
    "experts": lambda c, w: (
        w.model.experts is not None
        and (
            c.precision.level in FP8
            or (
                c.layout.tp >= 2
                and (
                    c.layout.ep % c.layout.tp > 0
                    or c.layout.tp_engine == "dtensor"
                    or (c.layout.num_copies == 2 and c.micro_batch_size in (1, 3) and w.model.experts.aux_loss > 0)
                    or w.seq_length % (c.layout.cp * c.layout.tp) > 0
                )
            )
        )
    ),
    "expert-parallel": lambda c, w: (
        c.layout.ep > 1
        and (
            w.model.experts is None
            or 4 % c.layout.ep > 0
            or (c.layout.dp_shard if c.layout.zero_stage else c.layout.dp_replicate)
            * c.layout.cp
            * c.layout.tp
            % c.layout.ep
            > 0
        )
    ),
    "latent-attention": lambda c, w: (
        w.model.latent is not None
        and (c.precision.level in FP8 or (c.layout.tp > 1 and c.layout.tp_engine == "dtensor"))
    ),
    "cp-seq-length": lambda c, w: c.layout.cp > 1 and w.seq_length % (2 * c.layout.cp) != 0,
    "cp-heads": lambda c, w: (
        c.layout.cp > 1
        and c.layout.cp_method in ("ulysses", "hybrid")
        and any(
            heads % ((c.layout.cp if c.layout.cp_method == "ulysses" else c.layout.ulysses_degree) * c.layout.tp)
            for heads in (w.model.num_heads, w.model.num_kv_heads)
        )
    ),
    "cp-hybrid": lambda c, w: (
        (c.layout.ulysses_degree, c.layout.cp) not in ((2, 4), (2, 6), (3, 6))
        if c.layout.cp_method == "hybrid"
        else c.layout.ulysses_degree > 1
    ),
    "virtual-stages": lambda c, w: wrong_chunks(c.layout),
    "stage-layers": lambda c, w: wrong_stages(c.layout),
    "num-microbatches": lambda c, w: (
        c.layout.pp > 1
        and (
            (c.layout.schedule == "1f1b" and micro_batches(c, w) < c.layout.pp)
            or (c.layout.schedule == "interleaved" and micro_batches(c, w) % max(1, micro_batches(c, w) // c.layout.pp))
        )
    ),
    "shard-embedding": lambda c, w: c.layout.shard_embedding and (ddp(c.layout) or c.layout.dp * c.layout.cp == 1),
    "recompute-shape": lambda c, w: wrong_recompute(c),
    "recompute-pattern": lambda c, w: any(
        p.pattern in ("(", r"(\w*\w*)*!") or len(p.pattern) > 200 for p in c.recompute.selective
    ),
    "communication-with-compile": lambda c, w: c.kernels.compile != "off" and c.recompute.repeats_gathers,
    "recompute-communication": lambda c, w: (
        c.recompute.communication != ()
        and not (c.layout.tp > 1 and c.layout.sequence_parallel and c.layout.tp_engine == "local")
    ),
    "compile-with-zbv": lambda c, w: c.kernels.compile != "off" and c.layout.schedule == "zbv",
    "compile-select-with-ep": lambda c, w: c.kernels.compile != "off" and c.layout.ep > 1 and recomputes_selected(c),
    "compile-recompute-with-dtensor": lambda c, w: (
        c.kernels.compile != "off"
        and c.layout.tp > 1
        and c.layout.tp_engine == "dtensor"
        and any(sum(map(sum, n)) > 0 for n in (c.recompute.full, *(p.num_layers for p in c.recompute.selective)))
    ),
    "cuda-graphs": lambda c, w: (
        c.kernels.compile != "off"
        and c.kernels.compile_mode == "reduce-overhead"
        and not (
            c.layout.pp == 1
            and micro_batches(c, w) <= 1
            and (c.layout.dp_replicate * c.layout.dp_shard * c.layout.cp == 1 or ddp(c.layout))
        )
    ),
    "loss-scale": lambda c, w: (
        (c.precision.loss_scale is None) == (c.precision.dtype == "float16")
        or (c.precision.loss_scale is not None and c.precision.loss_scale.initial > 3.5e38)
    ),
    "amp-lists-with-compile": lambda c, w: c.kernels.compile != "off" and c.precision.white + c.precision.black != (),
    "keep-fp32": lambda c, w: (
        c.precision.keep_fp32 != ()
        and not (
            c.precision.level in ("O2", "O2-fp8")
            and c.layout.tp < 2
            and c.layout.cp < 2
            and c.layout.ep < 2
            and c.kernels.compile == "off"
            and c.kernels.loss_chunks < 2
            and not (c.layout.zero_stage == 3 and recomputes_selected(c))
            and "(" not in c.precision.keep_fp32
        )
    ),
    "fp8-gather": lambda c, w: (
        c.precision.fp8_gather
        and not (
            c.precision.level in FP8
            and c.layout.zero_stage > 1
            and c.layout.dp_shard * c.layout.cp > 1
            and (c.layout.tp < 2 or c.layout.tp_engine == "dtensor")
        )
    ),
    "loss-chunks": lambda c, w: (
        c.kernels.loss_chunks > 1 and c.kernels.loss_chunks > c.micro_batch_size * w.seq_length // max(1, c.layout.cp)
    ),
    "loss-chunks-with-lists": lambda c, w: c.kernels.loss_chunks > 1 and c.precision.white + c.precision.black != (),
    "fp8-dtype": lambda c, w: c.precision.level in FP8 and c.precision.dtype != "bfloat16",
    "fp8-sizes": lambda c, w: (
        c.precision.level in FP8
        and any(
            size % (16 * c.layout.tp)
            for size in (
                w.model.hidden_size,
                w.model.ffn_hidden_size,
                (w.model.num_heads + 2 * w.model.num_kv_heads) * (w.model.hidden_size // w.model.num_heads),
            )
        )
    ),
    "offload-with-selective": lambda c, w: (
        c.offload.activations and bool(c.recompute.selective or c.recompute.communication)
    ),
    "offload-with-compile-model": lambda c, w: c.offload.activations and c.kernels.compile == "model",
    "offload-with-cuda-graphs": lambda c, w: (
        c.offload.activations and c.kernels.compile != "off" and c.kernels.compile_mode == "reduce-overhead"
    ),
    "cudnn-range": lambda c, w: c.kernels.cudnn_tuning_range not in ((), (1, 4)),
    "fused": lambda c, w: c.kernels.fused == "liger",
    "memory-format": lambda c, w: c.kernels.memory_format == "auto" and c.layout.pp > 1,
    "amp-lists": lambda c, w: (
        (c.precision.level != "O1" and bool(c.precision.white + c.precision.black))
        or "no name" in c.precision.white + c.precision.black
        or bool(set(c.precision.white) & set(c.precision.black))
    ),
}


@settings(max_examples=400, deadline=None)
@given(CANDIDATES, WORKLOADS)
def test_every_rule_fires_exactly_when_its_arithmetic_requires(candidate, workload):
    found = broken(candidate, workload)
    for rule_id, expected in BROKEN_WHEN.items():
        assert (rule_id in found) == bool(expected(candidate, workload)), rule_id


OF_OTHER_MODELS = {"own-pipeline", "own-tensor-parallel", "fp8-model"}
"""Rules that Llamas cannot break; see tests/trials/test_own_modules.py, and below."""


def test_every_rule_is_tested():
    awkward = dataclasses.replace(
        WORKLOAD,
        seq_length=30,
        model=dataclasses.replace(WORKLOAD.model, ffn_hidden_size=97, experts=EXPERTS, latent=LATENT),
    )
    rng, found = random.Random(0), set()
    for _ in range(1500):
        found |= broken(random_candidate(rng), awkward)
    assert {rule.id for rule in legality.RULES} - found == {
        "degrees",
        "model-kind",
        "varying-with-cp",
        *OF_OTHER_MODELS,
    }


@given(CANDIDATES, WORKLOADS | OTHER_WORKLOADS)
def test_the_planner_rejects_exactly_what_the_runner_refuses(candidate, workload):
    candidate = canonicalize(candidate, workload.model)
    assert bool(check(candidate, workload)) == bool(list(legality.violations(workload, candidate)))


@given(CANDIDATES, OTHER_WORKLOADS)
def test_model_kind(candidate, workload):
    layout = candidate.layout
    found = broken(candidate, workload)
    assert ("model-kind" in found) == (layout.pp * layout.cp * layout.tp > 1)
    is_fp8 = candidate.precision.level in FP8
    assert ("fp8-model" in found) == (is_fp8 and isinstance(workload.model, ResNetModel))
    assert ("shard-embedding" in found) == layout.shard_embedding


@given(DEGREES, NODES)
def test_tp_in_node(tp, nodes):
    found = broken(Candidate(layout=Layout(tp=tp)), where=topology(*nodes))
    assert ("tp-in-node" in found) == all(tp > count for count in nodes)


@given(CANDIDATES, NODES)
def test_fits_lease_counts_whole_tensor_parallel_groups(candidate, nodes):
    layout, groups = candidate.layout, 0
    for free in nodes:
        while free >= layout.tp:
            free -= layout.tp
            groups += 1
    assert ("fits-lease" in broken(candidate, where=topology(*nodes))) == (groups * layout.tp < layout.world_size)


@given(CANDIDATES, NODES, st.integers(1, 8))
def test_more_nodes_never_make_it_worse(candidate, nodes, more):
    assert broken(candidate, where=topology(*nodes, more)) <= broken(candidate, where=topology(*nodes))


@given(CANDIDATES, NODES, st.data())
def test_larger_nodes_never_make_it_worse(candidate, nodes, data):
    larger = list(nodes)
    larger[data.draw(st.integers(0, len(nodes) - 1))] += 1
    assert broken(candidate, where=topology(*larger)) <= broken(candidate, where=topology(*nodes))


@given(CANDIDATES, WORKLOADS, NODES)
def test_knowing_the_hardware_only_adds_reasons(candidate, workload, nodes):
    assert broken(candidate, workload) <= broken(candidate, workload, topology(*nodes))


@pytest.mark.parametrize(
    ("device", "is_slice"),
    [
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", True),
        ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", True),
        ("NVIDIA H100 80GB HBM3", False),
    ],
)
def test_slices_take_one_rank_each(device, is_slice):
    where = topology(4, kind="cuda", name=device)
    assert "slices-alone" not in broken(Candidate(), where=where)
    for layout in (Layout(dp_replicate=2), Layout(dp_shard=2, zero_stage=3), Layout(tp=2), Layout(pp=2), Layout(cp=2)):
        assert ("slices-alone" in broken(Candidate(layout=layout), where=where)) == is_slice


@pytest.mark.parametrize(
    ("kind", "device", "refused"),
    [
        ("cuda", "NVIDIA H200", set()),
        ("cuda", "NVIDIA A100-SXM4-80GB", set()),
        ("cuda", "Tesla V100-SXM2-32GB", {"bfloat16"}),
        ("cuda", "Tesla T4", {"bfloat16"}),
        ("cuda", "NVIDIA GeForce RTX 2080 Ti", {"bfloat16"}),
        ("cuda", "Tesla P100-PCIE-16GB", {"bfloat16", "float16"}),
        ("cuda", "some unknown accelerator", set()),
        ("cpu", "Intel(R) Xeon(R) CPU", set()),
    ],
)
def test_amp_dtype_refuses_only_what_is_known_not_to_work(kind, device, refused):
    where = topology(1, kind=kind, name=device)
    found = {
        dtype
        for dtype in ("bfloat16", "float16")
        if "amp-dtype" in broken(Candidate(precision=Precision(level="O1", dtype=dtype)), where=where)
    }
    assert found == refused
    assert "amp-dtype" not in broken(Candidate(), where=where)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu", "npu"])
def test_kernels_of_liger_run_on_cuda_only(kind):
    for fused in ("auto", "torch", "liger"):
        found = broken(Candidate(kernels=Kernels(fused=fused)), where=topology(1, kind=kind))
        assert ("fused-device" in found) == (fused == "liger" and kind != "cuda")


@given(CANDIDATES, WORKLOADS, NODES)
def test_layout_rules_read_only_the_layout(candidate, workload, nodes):
    other = Candidate(layout=candidate.layout, micro_batch_size=candidate.micro_batch_size)
    on_layout = {rule.id for rule in RULES if rule.is_on_layout}
    where = topology(*nodes)
    assert broken(candidate, workload, where) & on_layout == broken(other, workload, where) & on_layout


@given(CANDIDATES, WORKLOADS, NODES)
def test_reasons_are_one_line(candidate, workload, nodes):
    for violation in check(candidate, workload, topology(*nodes)):
        assert violation.reason and "\n" not in violation.reason


def test_rule_ids_are_unique():
    assert len({rule.id for rule in RULES}) == len(RULES)


@given(CANDIDATES, WORKLOADS)
def test_one_device_runs_every_plain_candidate(candidate, workload):
    plain = dataclasses.replace(candidate, layout=Layout(), precision=Precision(), recompute=Recompute())
    plain = canonicalize(plain, workload.model)
    assume(workload.global_batch_size % plain.micro_batch_size == 0)
    assume(plain.kernels.loss_chunks <= plain.micro_batch_size * workload.seq_length)
    assume(plain.kernels.compile == "off" or not plain.offload.activations)
    assume(plain.kernels.compile_mode != "reduce-overhead" or plain.micro_batch_size == workload.global_batch_size)
    assume(plain.loader.batching == "padding" and not plain.kernels.dynamic)
    assert broken(plain, workload, topology(1)) == set()
