"""Modules whose code is not ours: found, counted, cut into stages, or refused with the reason and the place."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

from tests.support import ROOT
from tests.trials import own_modules
from tests.trials.test_own_parity import ENCODER, decoder
from trials.datasets import Share, UserBatches
from trials.dryrun.tracker import MemoryTracker
from trials.failure import DataError, InfeasibleSpec
from trials.legality import violations
from trials.models import build_model, build_without_values
from trials.models.model import pipeline_problem, plan_problem
from trials.models.module_facts import CountRequest, count
from trials.parallel.mesh import ShardMap, init_parameters
from trials.sizes import all_chunks
from trials.spec import Candidate, Kernels, Layout, ModuleFacts, PythonData, TextData, Workload
from trials.user_code import call_function, load_function

DATA = PythonData(dataset="tests.trials.own_modules:dataset", cwd=str(ROOT))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of code, which the import path forgets again."""
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "faulty_module.py").write_text("import nothing_like_this\n")
    (tmp_path / "fine_module.py").write_text("def build():\n    return 1 / 0\n")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent_module:build", r"cannot import absent_module from .*workload\.cwd"),
        ("faulty_module:build", r"No module named 'nothing_like_this' \(faulty_module\.py, line 1\)"),
        ("fine_module:make", r"fine_module\.py has no function 'make'"),
        ("trials:build", "must not be called 'trials'; rename the file"),
    ],
)
def test_import_errors_name_their_place(name, words, folder):
    with pytest.raises(InfeasibleSpec, match=words):
        load_function(name, str(folder))


def test_errors_of_a_user_function_name_its_line(folder):
    with pytest.raises(InfeasibleSpec, match=r"ZeroDivisionError: division by zero \(fine_module\.py, line 2\)"):
        call_function("fine_module:build", str(folder))


def test_an_encoder_is_counted_and_can_be_split():
    facts = count(CountRequest(model=ENCODER, data=DATA, seq_length=1)).facts
    assert facts is not None
    assert (facts.num_layers, facts.no_pipeline, facts.no_tensor_parallel) == (3, None, None)
    assert facts.num_parameters == sum(parameter.numel() for parameter in own_modules.build().parameters())
    # Attention's matmuls and convolutions come on top of 6 FLOPs per weight and position.
    assert facts.flops_per_sample > 6 * own_modules.LENGTH * 3 * 4 * own_modules.WIDTH**2
    assert facts.activation_elements > 3 * own_modules.LENGTH * own_modules.WIDTH
    assert facts.num_kernels > 3 * 10


@pytest.mark.slow
def test_a_decoder_of_transformers_is_counted_like_our_llama():
    reply = count(CountRequest(model=decoder("llama", None), data=TextData(), seq_length=16))
    assert reply.facts is not None and reply.shape is not None
    assert (reply.facts.num_layers, reply.facts.no_pipeline, reply.facts.no_tensor_parallel) == (3, None, None)
    shape = reply.shape
    assert (shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.ffn_hidden_size) == (32, 4, 2, 48)
    tied = count(
        CountRequest(model=decoder("qwen3", None, tie_word_embeddings=True), data=TextData(), seq_length=16)
    ).facts
    assert tied is not None and "share weights" in str(tied.no_pipeline)
    assert reply.facts.head == tied.head == "lm_head"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "keys", "head"),
    [
        ("gpt_neox", {}, "lm_head"),
        ("granite", {"logits_scaling": 2.0}, None),  # scales the logits
        ("gemma2", {}, None),  # caps them
        ("gptj", {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4}, None),  # has a bias, and converts them
    ],
)
def test_only_a_head_whose_outputs_are_the_logits_computes_the_loss(model_type, keys, head):
    model = decoder(model_type, None, **keys)
    facts = count(CountRequest(model=model, data=TextData(), seq_length=16)).facts
    assert facts is not None and facts.head == head
    workload = Workload(
        model=dataclasses.replace(model, facts=facts), data=TextData(), seq_length=16, global_batch_size=8
    )
    candidate = Candidate(micro_batch_size=8, kernels=Kernels(loss_chunks=2))
    refused = "loss_chunks requires a linear head without bias whose outputs are the logits; this decoder has none"
    assert list(violations(workload, candidate)) == ([] if head else [refused])


@pytest.mark.slow
@pytest.mark.parametrize("text", ["{}", json.dumps({"model_type": "vit"}), json.dumps({"model_type": "no-such"})])
def test_a_configuration_that_is_not_a_decoder_is_refused(text):
    model = dataclasses.replace(decoder("llama"), config=text)
    with pytest.raises(InfeasibleSpec, match="transformers cannot build a decoder"):
        count(CountRequest(model=model, data=TextData(), seq_length=16))


def test_a_module_that_works_between_its_parts_cannot_be_cut():
    """Its forward adds positions outside of any module, so on every stage."""

    class Positions(own_modules.Encoder):
        def forward(self, x):
            return self.head(self.encoder(self.embed(x) + self.shift))

    own_modules.positions = Positions
    model = dataclasses.replace(ENCODER, model="tests.trials.own_modules:positions")
    facts = count(CountRequest(model=model, data=DATA, seq_length=1)).facts
    assert facts is not None
    assert "its forward does more than the modules in workload.before, layers and after" in str(facts.no_pipeline)


def test_reasons_why_a_module_cannot_be_split():
    tied, encoder = own_modules.tied(), own_modules.build()
    assert "before and after share weights" in str(pipeline_problem(tied, "layers", ("table",), ("out",)))
    assert "set workload.before and .after" in str(pipeline_problem(encoder, "encoder.blocks", None, ()))
    assert "head.norm.weight is neither" in str(pipeline_problem(encoder, "encoder.blocks", ("embed",), ()))
    with pytest.raises(InfeasibleSpec, match=r"workload\.layers: no module 'blocks' in the model, which has embed"):
        pipeline_problem(encoder, "blocks", (), ())
    assert "set workload.tensor_parallel" in str(plan_problem(encoder, ()))
    assert "no module with weights matches that path" in str(plan_problem(encoder, [("blocks.*", "colwise")]))
    assert "a Conv1d; only Linear" in str(plan_problem(encoder, [("encoder.blocks.*.conv", "colwise")]))
    assert "shares its weights" in str(plan_problem(tied, [("out", "colwise")]))


def test_legality_reports_the_facts_of_the_module():
    facts = dataclasses.replace(ENCODER.facts, no_pipeline="no stages", no_tensor_parallel="no plan")
    model = dataclasses.replace(ENCODER, facts=facts)
    workload = Workload(model=model, data=DATA, seq_length=1, global_batch_size=8)
    layouts = [
        (Layout(pp=2, stage_layers=((1, 2),)), ["pp 2: no stages"]),
        (Layout(tp=2), ["tp 2: no plan"]),
        (Layout(dp_shard=2, zero_stage=3), []),
    ]
    for layout, expected in layouts:
        candidate = Candidate(layout=layout, micro_batch_size=1)
        assert list(violations(workload, candidate)) == expected
    able = dataclasses.replace(workload, model=ENCODER)
    (refused,) = violations(able, Candidate(layout=Layout(tp=2, tp_engine="local")))
    assert "requires tp_engine dtensor" in refused
    (refused,) = violations(dataclasses.replace(able, seq_length=4), Candidate(layout=Layout(cp=2)))
    assert "not support context parallelism" in refused


def test_ranks_read_the_rows_of_one_global_batch():
    whole = UserBatches(own_modules.dataset(), Share(global_batch_size=8, seed=5), origin="waves")[3]
    parts = [
        UserBatches(own_modules.dataset(), Share(global_batch_size=8, dp_rank=i, dp=2, seed=5), origin="waves")[3]
        for i in range(2)
    ]
    assert torch.equal(torch.cat([inputs for inputs, _ in parts]), whole[0])
    assert torch.equal(torch.cat([targets for _, targets in parts]), whole[1])


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([torch.zeros(3)], "a sample is a Tensor; it must be a pair"),
        ([({"a": 1}, 2)], "the input of a sample must be one tensor"),
        ([(torch.zeros(2), 0), (torch.zeros(3), 0)], "samples cannot be combined into a batch"),
    ],
)
def test_samples_that_cannot_be_batched_are_named(samples, words):
    batches = UserBatches(samples, Share(global_batch_size=8), origin="my:data")
    with pytest.raises(DataError, match=words):
        for step in range(4):
            batches[step]


def built(model, perturbation=0.0, dtype=torch.float32, **changes):
    """The whole model on the CPU, with its initial values."""
    workload = Workload(model=model, data=DATA, seq_length=1, global_batch_size=8)
    (chunk,) = all_chunks(Layout(), model.num_layers)
    found = build_model(workload, chunk)
    found.store_as(dtype)
    found.to_empty(device="cpu")
    with torch.no_grad():
        found.materialize(torch.device("cpu"))
    init_parameters(found, 0, ShardMap(), perturbation)
    return found


def test_perturbed_weights_differ_by_the_given_amount():
    plain, again, twin = built(ENCODER), built(ENCODER), built(ENCODER, 1e-3)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))
    off = max(float(((a - b).abs() / b.abs().clamp_min(1e-12)).max()) for a, b in _weights(plain, twin))
    assert 1e-4 < off <= 1.001e-3


def _weights(one, other):
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return [(a.detach(), b.detach()) for a, b in pairs if bool(b.abs().min() > 0)]


def test_initial_values_are_those_set_by_the_module(monkeypatch):
    """Drawn one tensor at a time: constants and tables are equal, random ones are alike, ties stay."""

    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(16, 8, padding_idx=3)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            nn.init.orthogonal_(self.layers[1].weight)
            nn.init.trunc_normal_(self.layers[0].weight, std=0.5)
            self.copied = nn.Parameter(self.layers[0].weight.detach().clone() * 2)
            self.out = nn.Linear(8, 16, bias=False)
            self.out.weight = self.table.weight
            self.register_buffer("angles", torch.arange(8.0).cos())
            self.plain = torch.linspace(0, 1, 5)
            self.given = nn.Parameter(torch.from_numpy(np.full(4, 7.0, dtype=np.float32)))

    monkeypatch.setattr(own_modules, "many", Many, raising=False)
    model = dataclasses.replace(
        ENCODER, model="tests.trials.own_modules:many", layers="layers", facts=ModuleFacts(num_layers=2)
    )
    assert build_without_values(model, 0).recorder is not None
    made = built(model).module
    assert made.out.weight is made.table.weight and not made.table.weight[3].any()
    assert torch.allclose(made.layers[1].weight @ made.layers[1].weight.T, torch.eye(8), atol=1e-5)
    assert torch.equal(made.copied, made.layers[0].weight * 2) and 0.35 < made.copied.std() / 2 < 0.6
    assert torch.equal(made.angles, torch.arange(8.0).cos()) and torch.equal(made.plain, torch.linspace(0, 1, 5))
    assert torch.equal(made.given, torch.full((4,), 7.0))


@pytest.mark.parametrize("reads", ["a value", "a file", "a generator", "a closure"])
def test_a_module_whose_values_cannot_be_computed_later_is_built_eagerly(reads, monkeypatch, tmp_path):
    torch.save(torch.full((3,), 5.0), tmp_path / "weights.pt")
    kept = []

    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
            values = torch.full((3,), 5.0)
            if reads == "a value":
                values = torch.tensor(values.tolist())
            elif reads == "a file":
                values = torch.load(tmp_path / "weights.pt")
            elif reads == "a generator":
                values = values + 0 * torch.rand(3, generator=torch.Generator())
            else:
                kept.append(torch.ones(3))
            self.values = nn.Parameter(values)

    monkeypatch.setattr(own_modules, "reads", Reads, raising=False)
    model = dataclasses.replace(
        ENCODER, model="tests.trials.own_modules:reads", layers="layers", facts=ModuleFacts(num_layers=2)
    )
    has_values = build_without_values(model, 0).recorder is None
    assert has_values or reads == "a file"
    assert torch.equal(built(model).module.values, torch.full((3,), 5.0))
    assert not kept or kept[-1].device.type == "cpu"


def test_no_more_than_one_whole_tensor_is_computed_at_a_time():
    """Peak of what is live while values are computed: the largest tensor, not the model."""
    model = dataclasses.replace(
        ENCODER, model="tests.trials.own_modules:wide", layers="layers", facts=ModuleFacts(num_layers=8)
    )
    own = build_without_values(model, 0)
    tracker = MemoryTracker()
    sizes = [parameter.nbytes for parameter in own.module.parameters()]
    with tracker:
        for parameter in own.module.parameters():
            own.recorder.compute(parameter)
    peak = max(one.total_bytes for one in tracker.peaks().values())
    assert max(sizes) <= peak <= 2 * max(sizes) < sum(sizes) / 3
