"""Published tables are read strictly; blanks are filled by rules; what cannot be modelled has a reason."""

from __future__ import annotations

import csv

import numpy as np
import pytest

from benchmarks.cost.accuracy import evaluate
from benchmarks.published.table import TableError, read_table, read_what_can_be
from cluster.cost.inputs import from_rows
from tests.support import ROOT

TABLE = ROOT / "tests" / "data" / "published.csv"


def test_reads_and_models_the_table():
    rows = read_table(TABLE)
    modelled = [row.inputs for row in rows if row.inputs is not None]
    assert len(rows) > 60
    assert not [row.reason for row in rows if row.inputs is None]
    x = from_rows(modelled)
    assert (x.stage_layers.sum(axis=1) == x.num_layers).all()
    assert np.isfinite(x.peak_flops_per_s).all()


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("layers", "many", "layers is 'many', not a number"),
        ("step_time_s", "-1", "must be finite and not negative"),
        ("step_time_s", "nan", "must be finite and not negative"),
        ("oom", "maybe", "oom is 'maybe'"),
        ("quality", "D", "quality is 'D'"),
    ],
)
def test_refuses_wrong_values_naming_line_and_column(tmp_path, column, value, message):
    path = tmp_path / "t.csv"
    with TABLE.open(encoding="utf-8", newline="") as source, path.open("w", encoding="utf-8", newline="") as copy:
        reader = csv.DictReader(source)
        writer = csv.DictWriter(copy, reader.fieldnames or ())
        writer.writeheader()
        writer.writerow({**next(reader), column: value})
    with pytest.raises(TableError, match=rf"t\.csv:2: .*{message}"):
        read_table(path)


def test_refuses_wrong_columns(tmp_path):
    header, first, *_ = TABLE.read_text(encoding="utf-8").splitlines()
    path = tmp_path / "t.csv"
    path.write_text(header.replace("layers,", "depth,") + "\n" + first + "\n", encoding="utf-8")
    with pytest.raises(TableError, match="no column layers"):
        read_table(path)
    path.write_text(header + "\n" + first + ",extra\n", encoding="utf-8")
    with pytest.raises(TableError, match="values expected"):
        read_table(path)


def table_of(tmp_path, *changes):
    """A table that repeats the first row of the small one, changed by each of ``changes``."""
    path = tmp_path / "t.csv"
    with TABLE.open(encoding="utf-8", newline="") as source, path.open("w", encoding="utf-8", newline="") as copy:
        reader = csv.DictReader(source)
        writer = csv.DictWriter(copy, reader.fieldnames or ())
        writer.writeheader()
        first = next(reader)
        writer.writerows([{**first, "peak_mem_GB": "", "mem_kind": "", **change} for change in changes])
    return read_table(path)


def test_blanks_are_those_of_other_rows_of_the_same_setup(tmp_path):
    silent = {"micro_batch": "", "n_micro_batches": "", "global_batch": "", "recompute": ""}
    stated = {"micro_batch": "4", "n_micro_batches": "2", "global_batch": "", "recompute": "full"}
    like, _, unlike = table_of(tmp_path, silent, stated, {**silent, "seq_len": "64"})
    (alone,) = table_of(tmp_path, silent)
    assert like.inputs is not None and unlike.inputs is not None and alone.inputs is not None
    assert (like.inputs["micro_batch_size"], like.inputs["num_microbatches"]) == (4, 2)
    assert sum(like.inputs["stage_full"]) == like.inputs["num_layers"]
    assert unlike.inputs["micro_batch_size"] == alone.inputs["micro_batch_size"] == 1
    assert like["micro_batch"] == "", "values of the source stay"


def test_a_label_unlike_the_catalogue_means_another_variant(tmp_path):
    usual, larger = table_of(tmp_path, {"gpu": "H100", "gpu_mem_GB": "80"}, {"gpu": "H100", "gpu_mem_GB": "96"})
    assert usual.inputs is not None and larger.inputs is not None
    assert usual.inputs["memory_bytes"] == 85.5e9
    assert larger.inputs["memory_bytes"] == pytest.approx(1.2 * usual.inputs["memory_bytes"], rel=0.02)


def test_what_a_peak_counts_depends_on_the_log_it_comes_from(tmp_path):
    peak = {"peak_mem_GB": "50", "mem_kind": "torch CUDA peak (GiB)"}
    stated = {**peak, "mem_kind": "torch max_memory_allocated"}
    rows = table_of(tmp_path, peak, {**peak, "framework": "torchtitan"}, {**stated, "framework": "torchtitan"})
    assert [row.reported.scope for row in rows] == ["allocated", "reserved", "allocated"]


def test_flags_give_stage_layers_batches_and_overlap(tmp_path):
    pipeline = {"layers": "20", "n_params": "", "pp": "4", "tp": "1", "dp": "2", "n_gpus": "8", "vpp": ""}
    blank = dict.fromkeys(("micro_batch", "n_micro_batches", "global_batch"), "")
    listed, unequal, local, flagged, swapped = table_of(
        tmp_path,
        {**pipeline, "other_flags": "mc2 layers per stage 3,6,6,5"},
        {**pipeline, "other_flags": "layers per stage 3,6,6,6"},
        {**pipeline, **blank, "seq_len": "64", "other_flags": "schedule=1F1B; local batch 16 per DP rank"},
        {**pipeline, "other_flags": "overlap-grad-reduce reuse-fp32-param", "precision": "bf16"},
        {**pipeline, "other_flags": "swap-attention", "precision": "bf16"},
    )
    assert listed.inputs["stage_layers"] == [3, 6, 6, 5]
    assert unequal.inputs["stage_layers"] == [5, 5, 5, 5], "other layers than the model has"
    assert (local.inputs["micro_batch_size"], local.inputs["num_microbatches"]) == (4, 4)
    assert (swapped.inputs["hides_reduction"], flagged.inputs["hides_reduction"]) == (0, 1)
    assert flagged.inputs["optimizer_bytes"] == swapped.inputs["optimizer_bytes"] - 2
    assert listed.out_of_memory is False and swapped.out_of_memory is None, "activations are in host memory"


def test_evaluation_of_the_small_table():
    result = evaluate(read_table(TABLE), num_draws=1)
    vtrain = next(entry for entry in result["sources"] if entry["source"] == "vtrain-single")
    assert vtrain["after"]["10"]["mape"] < 0.15
    assert vtrain["after"]["10"]["spearman"] > 0.85
    assert vtrain["after"]["10"]["mape"] < vtrain["after"]["10"]["mape_before"]
    assert vtrain["after"]["0"]["spearman"] == vtrain["after"]["0"]["spearman_before"]
    assert {entry["source"] for entry in result["sources"]} == {
        "vtrain-single",
        "seed 004",
        "bigscience-1b3",
        "megatron-bridge",
    }


def rewritten(tmp_path, *, drop="", **changes):
    """The small table with values changed in its first five rows, and a column less."""
    path = tmp_path / "t.csv"
    with TABLE.open(encoding="utf-8", newline="") as source, path.open("w", encoding="utf-8-sig", newline="") as copy:
        reader = csv.DictReader(source)
        names = [name for name in (*(reader.fieldnames or ()), "split") if name != drop]
        writer = csv.DictWriter(copy, names, extrasaction="ignore")
        writer.writeheader()
        for i, fields in enumerate(reader):
            writer.writerow({**fields, **(changes if i < 5 else {}), "split": "test"})
    return path


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "GeForce 256"}, "GeForce 256"),
        ({"moe": "a hybrid"}, "mixture of experts"),
        ({"precision": "int3"}, "unknown precision 'int3'"),
        ({"layers": "about 40"}, "layers is 'about 40', not a number"),
        ({"dp": "64", "tp": "3"}, "are not 8 devices"),
        ({"layers": "", "hidden": "", "n_params": ""}, "neither the architecture nor"),
    ],
)
def test_indescribable_rows_are_counted_with_a_reason(tmp_path, changes, reason):
    rows, notes = read_what_can_be(rewritten(tmp_path, drop="compile", **changes))
    assert len(rows) == len(read_table(TABLE))
    assert notes == ["no column compile: read as blank", "column split left out"]
    assert [reason in row.reason for row in rows[:5]] == [True] * 5
    result = evaluate(rows[:12], num_draws=1)
    (entry,) = result["sources"]
    assert entry["not_modelled"] == 5
    assert any(reason in text for text in entry["reasons"])
    assert np.isfinite(entry["after"]["0"]["mape"]), "the other rows are judged"
