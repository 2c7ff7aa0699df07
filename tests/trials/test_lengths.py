"""Samples of varying length: every way of batching trains on the same tokens, without padding in the loss."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import pytest
import torch

from tests.trials.gang import differences, run_gang
from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials import datasets
from trials.failure import DataError
from trials.legality import violations
from trials.lengths import arrange, draw_lengths, expected_positions, length_report
from trials.models import built_in
from trials.sizes import coordinates
from trials.spec import (
    Candidate,
    Experts,
    HuggingFaceModel,
    Kernels,
    Layout,
    Loader,
    ModuleFacts,
    PythonData,
    PythonModel,
    TextData,
    Workload,
)
from trials.training.loop import Accumulation, SilentMarker, Trainer
from trials.worker import open_dataset

EXAMPLES = Path(__file__).parents[2] / "configs" / "examples"
LENGTHS = (2, 3, 5, 8, 13, 16)
VARYING = dataclasses.replace(WORKLOAD, data=TextData(lengths=LENGTHS))
DECODER = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def trial(batching="padding", layout=None, *, workload=VARYING, num_microbatches=2, **knobs):
    loader = Loader(batching=batching, full_batch=knobs.pop("full_batch", False))
    return tiny_spec(layout, workload=workload, num_microbatches=num_microbatches, loader=loader, **knobs)


def trained(spec):
    """Loss and gradient norm of three steps in this process."""
    trainer = Trainer(spec, None, torch.device("cpu"), place=coordinates(spec.candidate.layout, 0))
    dataset = open_dataset(spec, 0)
    return [trainer.step(*dataset[step], SilentMarker()).tolist() for step in range(3)]


@functools.cache
def one_by_one(workload=VARYING):
    """Every sample in a separate micro-batch, so that nothing is padded, packed or masked."""
    return trained(trial(workload=workload, num_microbatches=8))


def off_by(found, expected):
    return max(abs(a - b) for pair in zip(found, expected, strict=True) for a, b in zip(*pair, strict=True))


WAYS = {
    "padding": {},
    "buckets": {"batching": "buckets"},
    "packing": {"batching": "packing", "num_microbatches": 4},
    "rows without samples": {"batching": "packing", "num_microbatches": 1},
    "loss in chunks": {"batching": "packing", "kernels": Kernels(loss_chunks=3)},
}


@pytest.mark.parametrize("name", WAYS)
def test_every_batching_trains_like_the_samples_one_by_one(name):
    assert off_by(trained(trial(**WAYS[name])), one_by_one()) < 1e-5


def test_packed_rows_of_an_imported_decoder_train_like_its_samples_one_by_one():
    pytest.importorskip("transformers")
    model = HuggingFaceModel(config=json.dumps(DECODER), vocab_size=256, facts=ModuleFacts(num_layers=2))
    workload = dataclasses.replace(VARYING, model=model)
    assert off_by(trained(trial("packing", workload=workload)), one_by_one(workload)) < 1e-5


def _leaks_across_documents(monkeypatch):
    size = VARYING.seq_length
    monkeypatch.setattr(built_in, "document_mask", lambda _: torch.ones(size, size, dtype=torch.bool).tril())


def _micro_batches_count_alike(monkeypatch):
    monkeypatch.setattr(Accumulation, "mean_tokens", property(lambda _: None, lambda *_: None), raising=False)


def _padding_counts(monkeypatch):
    monkeypatch.setattr(datasets, "IGNORED", 0)


@pytest.mark.parametrize(
    ("bug", "batching"),
    [
        (_leaks_across_documents, "packing"),
        (_micro_batches_count_alike, "padding"),
        (_padding_counts, "padding"),
        (_padding_counts, "packing"),
    ],
)
def test_the_loss_catches(bug, batching, monkeypatch):
    expected = one_by_one()
    bug(monkeypatch)
    assert off_by(trained(trial(batching)), expected) > 1e-3


LAYOUTS = {
    "ddp": {"layout": Layout(dp_replicate=2)},
    "full batch": {"layout": Layout(dp_replicate=2), "batching": "buckets", "full_batch": True},
    "zero1": {"layout": Layout(dp_shard=2, zero_stage=1), "batching": "buckets"},
    "zero3": {"layout": Layout(dp_shard=2, zero_stage=3), "batching": "packing"},
    "pp": {"layout": Layout(pp=2, stage_layers=((1, 1),))},
    "sp": {"layout": Layout(tp=2, sequence_parallel=True)},
    "local": {"layout": Layout(tp=2, sequence_parallel=True, tp_engine="local"), "batching": "packing"},
}


@pytest.mark.slow
@pytest.mark.parity
def test_layouts_train_like_the_samples_one_by_one_and_report_padding_and_imbalance():
    def run(specs):
        with tempfile.TemporaryDirectory() as folder:
            return run_gang(specs, Path(folder))

    graphs = [trial(kernels=Kernels(compile="block", backend="eager", dynamic=dynamic)) for dynamic in (False, True)]
    alone, static, dynamic = run([trial(num_microbatches=8), *graphs])
    assert max(differences(static, alone) + differences(dynamic, alone)) <= 1e-5
    assert static.findings.graph.num_graphs > dynamic.findings.graph.num_graphs
    found = dict(zip(LAYOUTS, run([trial(**one) for one in LAYOUTS.values()]), strict=True))
    for name, report in found.items():
        loss, norm = differences(report, alone)
        assert loss <= 1e-5 and norm <= 1e-5, name
        assert report.tokens_per_step == alone.tokens_per_step == round(sum(map(sum, map(drawn, (2, 3, 4)))) / 3)
        assert 0 < report.findings.lengths.padding < 1, name
    assert alone.findings.lengths.padding == 0.0
    assert found["ddp"].findings.lengths.imbalance > 0 == found["zero3"].findings.lengths.imbalance
    assert found["pp"].findings.lengths.num_shapes == 1 < found["ddp"].findings.lengths.num_shapes


def drawn(step):
    return draw_lengths(VARYING, step)


def test_lengths_follow_their_distribution_and_depend_only_on_seed_and_step():
    many = dataclasses.replace(VARYING, global_batch_size=600)
    for step in range(3):
        counts = [draw_lengths(many, step).count(length) for length in LENGTHS]
        assert max(counts) - min(counts) <= 1
    assert drawn(0) == drawn(0) != drawn(1)
    assert many.tokens_per_step == 100 * sum(LENGTHS)
    assert VARYING.attended_length == sum(n * n for n in LENGTHS) / sum(LENGTHS)


@pytest.mark.parametrize("batching", ["padding", "packing", "buckets"])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_every_sample_is_in_one_row_and_ranks_have_equally_many_micro_batches(batching, dp):
    workload = dataclasses.replace(VARYING, global_batch_size=64)
    candidate = Candidate(layout=Layout(dp_replicate=dp), micro_batch_size=4, loader=Loader(batching=batching))
    sizes = [(length,) for length in draw_lengths(workload, 0)]
    ranks = arrange(sizes, candidate, (16,))
    assert len(ranks) == dp and len({len(own) for own in ranks}) == 1
    batches = [one for own in ranks for one in own]
    assert sorted(number for one in batches for row in one.rows for number in row) == list(range(64))
    assert all(len(one.rows) == 4 for one in batches)
    assert all(sum(sizes[number][0] for number in row) <= one.size[0] <= 16 for one in batches for row in one.rows)


def test_buckets_and_packing_pad_less_and_balance_ranks():
    workload = dataclasses.replace(VARYING, global_batch_size=64)
    reports = {}
    for batching in ("padding", "packing", "buckets"):
        candidate = Candidate(layout=Layout(dp_replicate=4), micro_batch_size=4, loader=Loader(batching=batching))
        sizes = [(length,) for length in draw_lengths(workload, 0)]
        reports[batching] = length_report([(sizes, arrange(sizes, candidate, (16,)))], candidate)
        found = expected_positions(workload, candidate) * 64 * 16
        assert found == pytest.approx(workload.tokens_per_step / (1 - reports[batching].padding), rel=0.1)
    assert reports["packing"].padding < reports["buckets"].padding < reports["padding"].padding
    assert reports["buckets"].imbalance < reports["padding"].imbalance
    assert reports["buckets"].num_shapes <= 8


def detection(**knobs):
    model = PythonModel(
        model="detector:build",
        loss="detector:loss",
        layers="blocks",
        cwd=str(EXAMPLES),
        facts=ModuleFacts(num_layers=3, has_convolutions=True),
    )
    data = PythonData(dataset="detector:dataset", cwd=str(EXAMPLES))
    return trial(workload=Workload(model=model, data=data, seq_length=1, global_batch_size=16), **knobs)


def test_a_detector_trains_alike_on_images_of_every_padding():
    alone = trained(detection(num_microbatches=16))
    for batching in ("padding", "buckets"):
        assert off_by(trained(detection(batching=batching, num_microbatches=4)), alone) < 1e-4
    report = open_dataset(detection(batching="padding", num_microbatches=4), 0).report(range(3))
    better = open_dataset(detection(batching="buckets", num_microbatches=4), 0).report(range(3))
    assert 0 < better.padding < report.padding


def test_sizes_must_match_the_inputs():
    dataset = open_dataset(detection(), 0)
    dataset._sizes = [(3, 32, 32)] * len(dataset._sizes)
    with pytest.raises(DataError, match="but sizes lists"):
        dataset[0]


PIPELINE, PACKING = Layout(pp=2, stage_layers=((1, 1),)), Loader(batching="packing")
COPIES = Layout(tp=2, tp_engine="local", sequence_parallel=True, num_copies=2)
EXPERTS = dataclasses.replace(SHAPE, experts=Experts(num_experts=2, top_k=1, ffn_hidden_size=32))
DYNAMIC = Kernels(compile="block", dynamic=True)
REFUSED = {
    "requires samples of varying length": (WORKLOAD, {"loader": PACKING}),
    "the number of rows varies": (VARYING, {"loader": PACKING, "layout": PIPELINE}),
    "exchange tensors of one length": (VARYING, {"loader": Loader(batching="buckets"), "layout": PIPELINE}),
    "unlike attention flash": (VARYING, {"loader": PACKING, "kernels": Kernels(attention="flash")}),
    "not split by context parallelism": (VARYING, {"layout": Layout(cp=2)}),
    "dynamic requires micro-batches of varying length": (WORKLOAD, {"kernels": DYNAMIC}),
    "a CUDA graph has one length": (
        VARYING,
        {"kernels": dataclasses.replace(DYNAMIC, compile_mode="reduce-overhead")},
    ),
    "samples of varying length need an even micro_batch_size": (VARYING, {"layout": COPIES}),
    "require a dense model": (dataclasses.replace(VARYING, model=EXPERTS), {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_what_cannot_vary(reason):
    workload, knobs = REFUSED[reason]
    assert any(reason in problem for problem in violations(workload, Candidate(**knobs)))
