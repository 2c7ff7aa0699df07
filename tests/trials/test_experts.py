"""Mixtures of experts train like one process in fp32, whatever the knobs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest
import torch

from tests.trials.gang import RankFailure, differences, run_gang
from tests.trials.initial import check_all
from tests.trials.parity_knobs import THREE_STEPS, WORKLOAD, read_rows, spec_of
from tests.trials.ranks import planted
from tests.trials.test_parity import MATRIX, NEUTRAL, name_of, tolerances
from tests.trials.tiny import tiny_spec
from trials.dryrun.tracker import fake_process_group
from trials.legality import violations
from trials.models import experts
from trials.models.experts import ExpertBalance, MixtureOfExperts, Router, grouped_matmul
from trials.parallel.mesh import DATA_AXES, build_mesh, flat_mesh
from trials.spec import Experts, Layout, with_learned_routing
from trials.training.loop import parallelize

EXPERTS = Experts(
    num_experts=4,
    top_k=2,
    ffn_hidden_size=24,
    shared_ffn_hidden_size=16,
    num_dense_layers=1,
    scores="sigmoid",
    aux_loss=0.1,
    z_loss=0.01,
)
REFERENCE = name_of(NEUTRAL)


def with_experts(spec, shape=EXPERTS):
    model = dataclasses.replace(spec.workload.model, experts=shape)
    return dataclasses.replace(spec, workload=dataclasses.replace(spec.workload, model=model))


def dense_specs():
    """The trials of the dense matrix with experts, and a single process."""
    rows = (NEUTRAL, *(row for row in read_rows() if row["clip"] == NEUTRAL["clip"]))
    return {name_of(row): with_experts(spec_of(row)) for row in rows}


def legal(specs):
    return {name: spec for name, spec in specs.items() if not list(violations(spec.workload, spec.candidate))}


def with_ep(spec, ep):
    layout = dataclasses.replace(spec.candidate.layout, ep=ep)
    return dataclasses.replace(spec, candidate=dataclasses.replace(spec.candidate, layout=layout))


def split_specs(specs):
    """Those of the trials that can also split the experts over 2 or 4 ranks."""
    return legal({f"ep{ep}/{name}": with_ep(spec, ep) for ep in (2, 4) for name, spec in specs.items()})


WHOLE = legal(dense_specs())
FOR_EXPERTS = [
    NEUTRAL | knobs
    for knobs in (
        {"dp": "zero3", "recompute": "full", "batches": "m4"},
        {"dp": "ddp", "precision": "O2-bf16"},
        {"tp": "local-sp", "recompute": "full", "loss": "chunked-loss"},
        {"dp": "zero3", "tp": "local-sp-copies", "recompute": "full", "batches": "m2"},
    )
]
WHOLE_GRAPHS = {name: with_experts(spec) for name, spec in MATRIX.items() if name.endswith("/model")}
SPLIT = split_specs(dense_specs() | WHOLE_GRAPHS | {name_of(row): with_experts(spec_of(row)) for row in FOR_EXPERTS})
SPECS = WHOLE | SPLIT


def world_size(name):
    return SPECS[name].candidate.layout.world_size


def is_eager(name):
    return SPECS[name].candidate.kernels.compile == "off"


def spread(names, count):
    """``count`` of the names, evenly spread over their order by world size."""
    ordered = sorted(names, key=lambda name: (world_size(name), name))
    return ordered[:: max(1, len(ordered) // count)][:count]


SPLIT_USUAL = [
    name
    for name in SPLIT
    if name in [f"ep2/{name_of(row)}" for row in FOR_EXPERTS[:3]] or name.startswith("ep2/zero1/m1/O1")
]


def tried_split():
    """Those on up to four ranks; of the compiled ones, which take long, some."""
    names = [name for name in SPLIT if world_size(name) <= 4]
    eager = [name for name in names if is_eager(name)]
    compiled = [name for name in names if name not in eager and name.startswith(("ep2/zero", "ep2/local/"))]
    fours = [name for name in eager if name.startswith("ep4")]
    return [*(name for name in eager if name not in fours), *spread(fours, 4), *compiled]


TRIED = [
    REFERENCE,
    *spread([name for name in WHOLE if world_size(name) <= 4 and name != REFERENCE and is_eager(name)], 9),
    "zero2/sharded-embedding/m1/O0/block",
    *tried_split(),
]
USUAL = [*(name for name in TRIED[1:] if world_size(name) <= 2 and name in WHOLE and is_eager(name)), *SPLIT_USUAL]


@functools.cache
def results(size, names):
    with tempfile.TemporaryDirectory() as folder:
        found = run_gang([SPECS[name] for name in names], Path(folder), before=check_all)
    return dict(zip(names, found, strict=True))


def result_of(name):
    group = USUAL if name in USUAL else TRIED
    names = tuple(one for one in group if world_size(one) == world_size(name) and (group is USUAL or one not in USUAL))
    return results(world_size(name), names)[name]


@functools.cache
def reference():
    return results(1, (REFERENCE,))[REFERENCE]


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.timeout(600)
@pytest.mark.representative(*USUAL)
@pytest.mark.parametrize("name", [name for name in TRIED if name != REFERENCE])
def test_trains_like_a_single_process(name):
    loss, norm = differences(result_of(name), reference())
    loss_limit, norm_limit = tolerances(SPECS[name].candidate.precision)
    assert loss <= loss_limit and norm <= norm_limit, (loss, norm)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_an_uneven_number_of_experts_is_split_expert_by_expert(tmp_path):
    """Six experts over four ranks, and three of them over two: each rank holds rows of all."""
    sharded = spec_of({**NEUTRAL, "dp": "zero3", "cp": "all-gather", "batches": "m2"})
    shape = dataclasses.replace(EXPERTS, num_experts=6)
    alone, whole, split = (with_experts(spec, shape) for spec in (spec_of(NEUTRAL), sharded, with_ep(sharded, 2)))
    (expected,) = run_gang([alone], tmp_path / "alone")
    for found in run_gang([whole, split], tmp_path, before=check_all):
        loss, norm = differences(found, expected)
        assert loss < 1e-5 and norm < 1e-5, (loss, norm)


COPIES = Layout(tp=2, tp_engine="local", num_copies=2, ep=2)


@pytest.mark.slow
@pytest.mark.parity
def test_replicas_are_routed_like_the_whole(tmp_path):
    """Halves of the sequences, whose own losses are means, and halves of the positions of one sequence."""
    few_losses = dataclasses.replace(EXPERTS, aux_loss=0.0)
    trials = [
        (COPIES, EXPERTS, 2),
        (COPIES, few_losses, 8),
        (dataclasses.replace(COPIES, sequence_parallel=True), few_losses, 8),
    ]
    specs = [
        with_experts(tiny_spec(layout, workload=WORKLOAD, num_microbatches=number), shape)
        for layout, shape, number in trials
    ]
    found = run_gang([dataclasses.replace(spec, protocol=THREE_STEPS) for spec in specs], tmp_path / "copies")
    (alone,) = run_gang([with_experts(spec_of(NEUTRAL), few_losses)], tmp_path / "alone")
    for result, expected in zip(found, (reference(), alone, alone), strict=True):
        assert max(differences(result, expected)) < 1e-5


def test_split_experts_are_gathered_with_their_layer():
    """The host waits for the router, so without that the gathering would begin when the rows are there."""
    spec = with_ep(with_experts(spec_of({**NEUTRAL, "dp": "zero3"})), 2)
    with fake_process_group(0, 2):
        mesh = build_mesh(spec.candidate.layout, torch.device("cpu"))
        (part,) = parallelize(spec, mesh, torch.device("cpu"), stage=0)
        dense, *layers = part.model.layers.values()
        for before, layer in zip((dense, *layers), layers, strict=False):
            unit = layer.feed_forward.experts
            assert layer._get_fsdp_state()._states_to_forward_prefetch == [unit._get_fsdp_state()]
            assert layer._get_fsdp_state()._states_to_backward_prefetch == [unit._get_fsdp_state()]
            assert unit._get_fsdp_state()._states_to_backward_prefetch == [before._get_fsdp_state()]
            assert unit.w13.device_mesh.size() == 1 and unit.w13.shape[0] == EXPERTS.num_experts // 2


def no_fault(original):
    return original


def lost_in_dispatch(finish):
    """The first row that arrives is lost."""
    return lambda *args: torch.cat([(rows := finish(*args))[:1] * 0, rows[1:]])


def back_in_another_order(results):
    return lambda exchange, returning: results(exchange, returning).flip(0)


def over_the_wrong_group(apply):
    """Gradients of experts are averaged as if every data-parallel rank had the same ones."""
    return lambda model, mesh, tp: dataclasses.replace(apply(model, mesh, tp), summed={})


def weighed_before_and_after(send):
    """Rows are scaled on their way as well as when their results are added."""
    return lambda exchange, rows, counts: send(exchange, rows * 0.5, counts)


def counted_once(num_replicas):
    """The norm takes experts for parameters that all ranks have."""
    return lambda parameter, shard, layout: num_replicas(parameter, None, layout)


EXCHANGE = "trials.parallel.expert_parallel"
LOOP = "trials.training.loop"
SPLIT_FAULTS = {
    "none": (EXCHANGE, "finish", no_fault),
    "a token lost in dispatch": (EXCHANGE, "finish", lost_in_dispatch),
    "results of other tokens": (f"{EXCHANGE}:RowExchange", "results", back_in_another_order),
    "gradients over the wrong group": (LOOP, "apply_expert_parallel", over_the_wrong_group),
    "weight before and after": (f"{EXCHANGE}:RowExchange", "send", weighed_before_and_after),
    "norm of other experts missing": ("trials.parallel.mesh", "num_replicas", counted_once),
}


@pytest.mark.slow
def test_faults_in_the_exchange_show(tmp_path):
    """In one gang, a trial with each fault: against one process, all differ but the one without."""
    spec = with_ep(with_experts(spec_of({**NEUTRAL, "dp": "zero3", "recompute": "full"})), 2)
    around = [functools.partial(planted, *fault) for fault in SPLIT_FAULTS.values()]
    found = run_gang([spec] * len(around), tmp_path, around=around)
    is_seen = {}
    for name, result in zip(SPLIT_FAULTS, found, strict=True):
        loss, norm = differences(result, reference())
        is_seen[name] = loss > 1e-5 or norm > 1e-5
    assert is_seen == {name: name != "none" for name in SPLIT_FAULTS}


def over_all_data_ranks(_original):
    """Experts are averaged with the others of the same place."""
    return lambda mesh: {"edp": flat_mesh(mesh, DATA_AXES)}


def nothing(_original):
    return lambda *_args: None


def no_names(_original):
    return lambda _model: []


def of_another_rank(part):
    return lambda x, size, rank: part(x, size, size - 1 - rank)


DATA = "trials.parallel.data_parallel"
TENSOR = "trials.parallel.tensor"
LAYOUT_FAULTS = {
    "ddp: experts averaged with others": ({"dp": "ddp"}, (DATA, "expert_mesh", over_all_data_ranks)),
    "replicate: experts averaged with others": ({"dp": "replicate"}, (DATA, "expert_mesh", over_all_data_ranks)),
    "ddp: experts in the group of all": (
        {"dp": "ddp"},
        (LOOP, "leave_experts_out", nothing),
    ),
    "tp: router and shared experts see one part": ({"tp": "local"}, (TENSOR, "_weights_of_mixtures", no_names)),
    "tp: gradient of other positions": ({"tp": "local"}, (TENSOR, "_part_of_positions", of_another_rank)),
    # Their norm is infinite, which ends the gang.
    "zero1: experts averaged with others": ({"dp": "zero1"}, (DATA, "expert_mesh", over_all_data_ranks)),
}


@pytest.mark.slow
def test_faults_in_the_reduction_of_experts_show(tmp_path):
    rows = [{**NEUTRAL, **changes} for changes, _ in LAYOUT_FAULTS.values()]
    specs = [with_ep(with_experts(spec_of(row)), 2) for row in rows]
    around = [functools.partial(planted, *fault) for _, fault in LAYOUT_FAULTS.values()]
    found = run_gang(specs, tmp_path, around=around)
    is_seen = {}
    for name, result in zip(LAYOUT_FAULTS, found, strict=True):
        is_seen[name] = isinstance(result, RankFailure) or max(differences(result, reference())) > 1e-5
    assert is_seen == dict.fromkeys(LAYOUT_FAULTS, True)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_ranks_with_the_same_experts_average_them(tmp_path):
    """Without it, two of four ranks with DDP would train with half of the tokens."""
    spec = with_ep(with_experts(spec_of({**NEUTRAL, "dp": "ddp", "cp": "ring"})), 2)
    without = functools.partial(planted, LOOP, "average_experts", nothing)
    sound, faulty = run_gang([spec, spec], tmp_path, around=[contextlib.nullcontext, without])
    assert max(differences(sound, reference())) < 1e-5 < max(differences(faulty, reference()))


def layer(shape=EXPERTS, seed=0):
    made = MixtureOfExperts(8, shape)
    made.router.materialize(torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return made


def by_loop(made, x):
    """What the layer computes, token by token."""
    rows = []
    for token in x.flatten(0, 1):
        scores = (made.router.weight @ token).sigmoid()
        best = scores.topk(EXPERTS.top_k).indices
        row = made.shared(token)
        for expert in best:
            gate, up = (token @ made.experts.w13[expert]).chunk(2)
            row = row + scores[expert] / scores[best].sum() * (
                (torch.nn.functional.silu(gate) * up) @ made.experts.w2[expert]
            )
        rows.append(row)
    return torch.stack(rows).view_as(x)


def gradients(made, compute, x):
    made.zero_grad()
    compute(x).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in made.named_parameters()}


def test_a_layer_computes_each_token_by_its_experts():
    made, x = layer(dataclasses.replace(EXPERTS, aux_loss=0.0, z_loss=0.0)), torch.randn(2, 7, 8)
    torch.testing.assert_close(made(x), by_loop(made, x))
    expected = gradients(made, functools.partial(by_loop, made), x)
    for name, gradient in gradients(made, made, x).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4)


def by_loop_with_losses(made, x):
    """What the layer computes, and its losses, written down as in the papers."""
    losses = []
    for sequence in x:
        logits = sequence @ made.router.weight.T
        scores = logits.sigmoid()
        chosen = scores.topk(EXPERTS.top_k).indices
        share = scores / scores.sum(-1, keepdim=True)
        for expert in range(EXPERTS.num_experts):
            f = EXPERTS.num_experts * (chosen == expert).sum() / (EXPERTS.top_k * len(sequence))
            losses.append(EXPERTS.aux_loss * f * share[:, expert].mean() / len(x))
        losses += [EXPERTS.z_loss * logits.exp().sum(-1).log().square().mean() / len(x)]
    return torch.stack(losses).sum()


def test_the_routers_losses_have_their_gradient_and_no_value():
    made, x = layer(), torch.randn(2, 7, 8, requires_grad=True)
    ExpertBalance([made.router], None).scale_losses(0.5)
    made(x).square().sum().backward()
    found, x.grad = (x.grad, made.router.weight.grad.clone()), None
    made.zero_grad()
    (by_loop(made, x).square().sum() + 0.5 * by_loop_with_losses(made, x)).backward()
    torch.testing.assert_close(found, (x.grad, made.router.weight.grad), rtol=1e-4, atol=1e-4)


def test_ranks_with_parts_of_a_sequence_use_its_load(monkeypatch):
    """Under context parallelism; the gradients of ranks are averaged."""
    made, x = layer(), torch.randn(1, 8, 8)

    def gradient(inputs):
        made.zero_grad()
        (0.0 * made(inputs)).sum().backward()  # leaves the gradients of the router's losses
        return made.router.weight.grad.clone()

    whole = gradient(x)
    _, ids = made.router(x[0])
    total = experts.counts_of(ids.view(1, -1), EXPERTS.num_experts).float()
    made.router.sequence_group = object()
    monkeypatch.setattr(experts, "summed", lambda _counts, _group: total)
    parts = [gradient(part) for part in x.chunk(2, dim=1)]
    torch.testing.assert_close(sum(parts) / 2, whole)


def test_with_a_capacity_later_tokens_skip_a_full_expert():
    made = layer(dataclasses.replace(EXPERTS, shared_ffn_hidden_size=0, capacity=0.75))
    x = torch.randn(3, 8, 8)
    weights, ids = (found.unflatten(0, (3, 8)) for found in made.router(x.flatten(0, 1), num_sequences=3))
    expected, dropped = torch.zeros_like(x), 0
    for number, sequence in enumerate(x):
        taken = [0] * EXPERTS.num_experts
        for position, token in enumerate(sequence):
            for weight, expert in zip(weights[number, position], ids[number, position].tolist(), strict=True):
                taken[expert] += 1
                if taken[expert] > 3:  # three quarters of 8 tokens x 2 / 4 experts
                    dropped += 1
                    continue
                gate, up = (token @ made.experts.w13[expert]).chunk(2)
                expected[number, position] += weight * ((torch.nn.functional.silu(gate) * up) @ made.experts.w2[expert])
    assert dropped
    torch.testing.assert_close(made(x), expected)
    ample = layer(dataclasses.replace(EXPERTS, capacity=4.0))
    torch.testing.assert_close(ample(x), layer()(x))


FAULTS = {
    "a token is lost": lambda rows, weights, ends: grouped_matmul(rows, weights, ends - 1),
    "groups are shifted": lambda rows, weights, ends: grouped_matmul(rows, weights.roll(1, 0), ends),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_the_grouped_product_show(fault, monkeypatch):
    made, x = layer(), torch.randn(2, 7, 8)
    expected = by_loop(made, x)
    monkeypatch.setattr(experts, "grouped_matmul", FAULTS[fault])
    assert not torch.allclose(made(x), expected, rtol=1e-3)


def test_empty_groups_have_no_gradient():
    rows, weights = torch.randn(3, 4), torch.randn(3, 4, 5, requires_grad=True)
    grouped_matmul(rows, weights, torch.tensor([0, 3, 3], dtype=torch.int32)).sum().backward()
    assert weights.grad[1].abs().sum() > 0 and not weights.grad[[0, 2]].any()


def test_balanced_routing_gives_every_expert_the_same_number_of_tokens():
    made = layer(dataclasses.replace(EXPERTS, routing="balanced"))
    made(torch.randn(2, 6, 8))
    assert made.router.load.tolist() == [6.0] * 4


def test_the_bias_evens_out_a_skewed_router():
    router = Router(8, dataclasses.replace(EXPERTS, balance_rate=0.01))
    router.materialize(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    router.weight.data.normal_(generator=generator)
    router.weight.data[:2, 0] = 4.0  # which all tokens have in common
    x = torch.cat([torch.ones(256, 1), torch.randn(256, 7, generator=generator)], dim=1)
    balance = ExpertBalance([router], None)
    shares = []
    for _ in range(150):
        _, ids = router(x)
        router.load.add_(ids.flatten().bincount(minlength=4))
        balance.reset()
        balance.update()
        shares.append(balance.loads(0)[0].busiest / 4)
    assert shares[0] > 0.38 and max(shares[-4:]) < 0.35


def test_the_load_is_that_of_the_steps_since_the_last_reset():
    router = Router(8, EXPERTS, layer=3)
    router.materialize(torch.device("cpu"))
    balance = ExpertBalance([router], None)
    assert balance.loads(0) == ()
    for load in ([99.0, 0.0, 0.0, 0.0], [4.0, 2.0, 2.0, 0.0], [2.0, 0.0, 2.0, 0.0]):
        if load[0] == 4.0:
            balance.reset()
        router.load.copy_(torch.tensor(load))
        balance.update()
    (found,) = balance.loads(5)
    assert (found.layer, found.rank, found.num_idle) == (3, 5, 1)
    assert found.busiest == found.busiest_on_rank == pytest.approx(6 / 3)
    assert found.busiest_rank == 1.0
    halves = ExpertBalance([router], None, ep=2)
    router.load.copy_(torch.tensor([4.0, 2.0, 1.0, 1.0]))
    halves.update()
    assert halves.loads(0)[0].busiest_rank == pytest.approx(6 / 4)
    router.bias.sub_(torch.tensor([-1e-3, 0.0, 1e-3, 1e-3]))
    assert router.bias.tolist() == pytest.approx([-3e-3, 2e-3, 0.0, 3e-3])


def test_a_trial_reports_the_load_of_every_layer():
    loads = reference().findings.experts
    assert [load.layer for load in loads] == list(range(1, SPECS[REFERENCE].workload.model.num_layers))
    assert all(1.0 <= load.busiest <= 2.0 and load.busiest == load.busiest_on_rank for load in loads)


def test_the_loss_gate_and_exports_route_as_learned():
    workload = SPECS[REFERENCE].workload
    balanced = dataclasses.replace(EXPERTS, routing="balanced")
    measured = dataclasses.replace(workload, model=dataclasses.replace(workload.model, experts=balanced))
    assert with_learned_routing(measured) == workload == with_learned_routing(workload)


def test_what_cannot_be_trained_is_refused():
    spec = with_experts(spec_of(NEUTRAL))
    model = spec.workload.model

    def problems(shape):
        workload = dataclasses.replace(spec.workload, model=dataclasses.replace(model, experts=shape))
        return " ".join(violations(workload, spec.candidate))

    assert "num_experts 4" in problems(dataclasses.replace(EXPERTS, top_k=5))
    assert "capacity" in problems(dataclasses.replace(EXPERTS, capacity=0.0))
    assert "num_dense_layers" in problems(dataclasses.replace(EXPERTS, num_dense_layers=3))
    sharded = with_experts(spec_of({**NEUTRAL, "dp": "zero3"}))
    for ep, why in (
        (4, "dp_shard 2 x cp 1 x tp 1 is not divisible by ep 4"),
        (3, "num_experts 4 is not divisible by ep 3"),
    ):
        assert why in list(violations(sharded.workload, with_ep(sharded, ep).candidate))
    assert any("dp_replicate 1" in problem for problem in violations(spec.workload, with_ep(spec, 2).candidate))
    assert "ep 2 requires a model with experts" in list(
        violations(spec_of(NEUTRAL).workload, with_ep(spec, 2).candidate)
    )
    candidate = dataclasses.replace(spec.candidate, layout=dataclasses.replace(spec.candidate.layout, tp=2))
    limited = dataclasses.replace(model, experts=dataclasses.replace(EXPERTS, capacity=1.5))
    for axis in ("cp", "tp"):
        layout = dataclasses.replace(spec.candidate.layout, **{axis: 2})
        assert any(
            "whole sequences" in problem
            for problem in violations(
                dataclasses.replace(spec.workload, model=limited), dataclasses.replace(spec.candidate, layout=layout)
            )
        )
    assert any("ep 1 must be a multiple" in problem for problem in violations(spec.workload, candidate))
