"""The stage balancer inside a plan: what it adds, and that it means what the cost model means."""

import dataclasses
import json

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.cost.balancer import balance, nested_policies, problem_of
from cluster.cost.cost_model import cost_model, inputs_of
from cluster.cost.stage_balance import DoesNotFitError
from cluster.hardware.topology import load_cluster
from orchestrator.cli.main import main
from orchestrator.objective import Objective
from orchestrator.planning.planner import balance_layouts, balanced, with_balance
from orchestrator.space.file_types import even_split
from tests.support.sweep_files import write
from trials.spec import Candidate, Layout, LlamaModel, Precision, Recompute, SelectiveRecompute, TextData, Workload

SILU_MUL = r"feed_forward\.(silu|mul)"
MODEL = LlamaModel(
    vocab_size=32000, hidden_size=5120, ffn_hidden_size=13824, num_layers=40, num_heads=40, num_kv_heads=40
)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=4096, global_batch_size=256)
MEMORY_BYTES = 58e9


def cluster(memory_bytes=MEMORY_BYTES):
    described = load_cluster("ascend-910b-2x8")
    accelerator = dataclasses.replace(described.accelerator, usable_memory_bytes=memory_bytes)
    return dataclasses.replace(described, accelerator=accelerator)


@st.composite
def frames(draw):
    pp = draw(st.sampled_from([1, 2, 4]))
    schedule, chunks = draw(st.sampled_from([("1f1b", 1), ("interleaved", 2)])) if pp > 1 else ("1f1b", 1)
    tp = draw(st.sampled_from([1, 2, 4]))
    layout = Layout(
        pp=pp,
        dp_shard=16 // pp // tp,
        tp=tp,
        zero_stage=draw(st.sampled_from([1, 2, 3])) if 16 // pp // tp > 1 else 0,
        sequence_parallel=tp > 1,
        schedule=schedule,
        num_virtual_stages=chunks,
        stage_layers=even_split(40, pp, chunks, schedule) if pp > 1 else (),
    )
    micro_batch_size = draw(st.sampled_from([1, 2]))
    return Candidate(
        layout=layout, micro_batch_size=micro_batch_size, precision=Precision(level="O2", dtype="bfloat16")
    )


def policies(*more):
    return nested_policies([Recompute(), Recompute(full=((40,),)), *more])


def estimate_of(candidate, workload=WORKLOAD, where=None):
    return cost_model().estimate(inputs_of([(workload, candidate)], where or cluster()))


@settings(max_examples=25, deadline=None)
@given(frames(), st.sampled_from([0.6, 0.8, 1.0]))
def test_the_balancer_expects_what_the_cost_model_predicts(frame, share):
    try:
        problem = problem_of(WORKLOAD, frame, cluster(), cost_model(), policies(), memory_share=share)
        found = balance(problem, time_limit_s=600)  # of a busy machine
    except DoesNotFitError:
        return
    predicted = estimate_of(with_balance(frame, found, WORKLOAD))
    assert max(found.peak_bytes) <= MEMORY_BYTES * share * (1 + 1e-9)
    # With several chunks the balancer also counts them one by one, where the cost model averages over a rank.
    if frame.layout.num_virtual_stages == 1:
        assert max(found.peak_bytes) == pytest.approx(predicted.peak_bytes[0], rel=0.1)
    terms = ("forward", "backward", "recompute", "launch", "tensor_parallel", "sharding", "bubble")
    pipeline_s = float(np.sum([predicted.step_terms_s[name][0] for name in terms]))
    assert found.step_s == pytest.approx(pipeline_s, rel=0.06)
    assert sum(found.step_terms_s.values()) == pytest.approx(found.step_s)


@settings(max_examples=25, deadline=None)
@given(frames(), st.sampled_from([512, 4096]), st.sampled_from([32e9, 45e9, 58e9]), st.sampled_from([0.8, 1.0]))
def test_answers_of_the_balancer_fit_by_the_cost_model(frame, seq_length, memory_bytes, share):
    """Short sequences: the optimiser step is the worst moment. Gathering again: the model averages over all layers."""
    workload, where = dataclasses.replace(WORKLOAD, seq_length=seq_length), cluster(memory_bytes)
    again = Recompute(communication=((40,),)) if frame.layout.sequence_parallel else Recompute()
    selective = Recompute(selective=(SelectiveRecompute(pattern=SILU_MUL, num_layers=((40,),)),))
    found = balanced(workload, frame, where, policies(selective, again), share)
    if found is not None:
        assert estimate_of(found[0], workload, where).peak_bytes[0] <= memory_bytes * share
        assert sum(map(sum, found[1].stage_layers)) == 40


def test_the_optimiser_step_limits_the_layers_of_a_stage():
    """Where activations are few, no recompute helps: stages with tables take fewer layers, or nothing fits."""
    model = dataclasses.replace(MODEL, vocab_size=128_000)
    workload = dataclasses.replace(WORKLOAD, model=model, seq_length=8)
    layout = Layout(pp=4, dp_shard=4, zero_stage=1, stage_layers=((10, 10, 10, 10),))
    frame = Candidate(layout=layout, precision=Precision(level="O2", dtype="bfloat16"))
    even_bytes = estimate_of(frame, workload).peak_bytes[0]
    assert estimate_of(frame, workload).peak_terms_bytes["workspace"][0] > 0, "the step is the worst moment"
    limit_bytes = even_bytes * 0.95
    where = cluster(limit_bytes)
    problem = problem_of(workload, frame, where, cost_model(), policies())
    found = balance(problem)
    assert found.stage_layers == ((9, 11, 11, 9),) and max(found.peak_bytes) <= limit_bytes
    assert estimate_of(with_balance(frame, found, workload), workload, where).peak_bytes[0] <= limit_bytes
    with pytest.raises(DoesNotFitError):
        balance(dataclasses.replace(problem, memory_limit_bytes=even_bytes * 0.8))


def test_policies_are_nested():
    some = Recompute(selective=(SelectiveRecompute(pattern="a", num_layers=((1,),)),))
    other = Recompute(selective=(SelectiveRecompute(pattern="b", num_layers=((1,),)),), communication=((1,),))
    names = [policy.name for policy in nested_policies([other, Recompute(full=((2,),)), some])]
    assert names == ["none", "a", "a + b + communication", "full"]
    assert [policy.name for policy in nested_policies([Recompute()])] == ["none"]


CONTENT = {
    "name": "balanced",
    "workload": {
        "model": {
            "kind": "llama",
            "vocab_size": 32000,
            "hidden_size": 5120,
            "ffn_hidden_size": 13824,
            "num_layers": 40,
            "num_heads": 40,
            "num_kv_heads": 40,
        },
        "seq_length": 4096,
        "global_batch_size": 256,
    },
    "cluster": {
        "kind": "simulated",
        "num_nodes": 2,
        "devices_per_node": 8,
        "device_memory": "58GB",
        "simulation": {"accelerator": "ascend-910b"},
    },
    "baseline": {
        "pp": 2,
        "dp_shard": 8,
        "zero_stage": 1,
        "micro_batch_size": 1,
        "recompute": "full",
        "precision": "O2",
    },
    "space": {
        "pp": [1, 2],
        "dp_shard": [8, 16],
        "recompute": ["full", {"select": {SILU_MUL: "all"}}],
        "world_size": 16,
        "forbid": [{"pp": 1}],
        "balance": True,
    },
}


def plan(folder, *options, **changes):
    file = write(folder, {**CONTENT, **changes})
    arguments = ["plan", str(file), "--home", str(folder / "home"), *options]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout) if "--json" in options else done.stdout


def test_a_plan_has_balanced_candidates_and_explains_them(tmp_path):
    found = plan(tmp_path, "--json")
    balanced = [candidate for candidate in found["candidates"] if "balance" in candidate]
    assert len(balanced) == found["num_balanced"] >= 2
    assert all(candidate["params"]["pp"] == 2 for candidate in balanced), "patterns to forbid hold for them too"
    best = balanced[0]["balance"]
    assert sum(map(sum, best["stage_layers"])) == 40
    assert max(best["peak_bytes"]) <= 58e9 and best["gap"] < 1e-6
    fastest = found["forecast"]["top"][0]
    assert "balance" in next(c for c in found["candidates"] if c["config_key"] == fastest["config_key"])
    why = plan(tmp_path, "--why", balanced[0]["short_name"])
    assert "balanced by the cost model: ideal" in why and "no split is faster" in why
    assert f"{len(balanced)} of them balanced by the cost model" in plan(tmp_path)


def test_unbalanceable_workloads_are_reported(tmp_path):
    linear = {"workload": {"model": {"kind": "linear", "size": 64, "num_layers": 2}, "global_batch_size": 8}}
    cpu = {"cluster": {"kind": "local", "device": "cpu"}, "baseline": {}, "space": {"balance": True, "world_size": 1}}
    assert "not balanced: the cost model balances decoders" in plan(tmp_path, **linear, **cpu)


def test_without_hardware_nothing_is_balanced():
    found = balance_layouts((), WORKLOAD, None, Objective())
    assert not found.balances and found.problem
