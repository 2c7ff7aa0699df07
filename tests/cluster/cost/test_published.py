"""Published tables are read strictly; blanks are filled by rules; what cannot be modelled says why."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cost.accuracy import evaluate, rank_correlation
from benchmarks.published.table import PublishedRow, TableError, read_table, read_what_can_be
from benchmarks.published.texts import network_bytes_per_s
from cluster.cost.cost_model import Reported
from cluster.cost.inputs import from_rows
from tests.support import ROOT

TABLE = ROOT / "tests" / "data" / "published.csv"


def test_reads_and_models_the_table() -> None:
    rows = read_table(TABLE)
    modelled = [row.inputs for row in rows if row.inputs is not None]
    assert len(rows) > 60
    assert not [row.reason for row in rows if row.inputs is None]
    x = from_rows(modelled)
    assert (x.stage_layers.sum(axis=1) == x.num_layers).all()
    assert np.isfinite(x.peak_flops_per_s).all()


def test_tokens_per_second_stand_in_for_the_step_time() -> None:
    llama = [row for row in read_table(TABLE) if row["source"] == "seed 004" and row.step_time_s]
    row = llama[0]
    assert row.inputs is not None
    tokens = row.inputs["micro_batch_size"] * row.inputs["num_microbatches"] * row.inputs["seq_length"]
    assert row.step_time_s == pytest.approx(tokens / float(row["tokens_per_s_per_gpu"]))


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
def test_refuses_wrong_values_naming_line_and_column(tmp_path: Path, column: str, value: str, message: str) -> None:
    path = tmp_path / "t.csv"
    with TABLE.open(encoding="utf-8", newline="") as source, path.open("w", encoding="utf-8", newline="") as copy:
        reader = csv.DictReader(source)
        writer = csv.DictWriter(copy, reader.fieldnames or ())
        writer.writeheader()
        writer.writerow({**next(reader), column: value})
    with pytest.raises(TableError, match=rf"t\.csv:2: .*{message}"):
        read_table(path)


def test_refuses_wrong_columns(tmp_path: Path) -> None:
    header, first, *_ = TABLE.read_text(encoding="utf-8").splitlines()
    path = tmp_path / "t.csv"
    path.write_text(header.replace("layers,", "depth,") + "\n" + first + "\n", encoding="utf-8")
    with pytest.raises(TableError, match="no column layers"):
        read_table(path)
    path.write_text(header + "\n" + first + ",extra\n", encoding="utf-8")
    with pytest.raises(TableError, match="values expected"):
        read_table(path)


def table_of(tmp_path: Path, *changes: dict[str, str]) -> tuple[PublishedRow, ...]:
    """A table that repeats the first row of the small one, changed as each of ``changes`` says."""
    path = tmp_path / "t.csv"
    with TABLE.open(encoding="utf-8", newline="") as source, path.open("w", encoding="utf-8", newline="") as copy:
        reader = csv.DictReader(source)
        writer = csv.DictWriter(copy, reader.fieldnames or ())
        writer.writeheader()
        first = next(reader)
        writer.writerows([{**first, "peak_mem_GB": "", "mem_kind": "", **change} for change in changes])
    return read_table(path)


def test_blanks_are_those_of_other_rows_of_the_same_setup(tmp_path: Path) -> None:
    silent = {"micro_batch": "", "n_micro_batches": "", "global_batch": "", "recompute": ""}
    stated = {"micro_batch": "4", "n_micro_batches": "2", "global_batch": "", "recompute": "full"}
    like, _, unlike = table_of(tmp_path, silent, stated, {**silent, "seq_len": "64"})
    (alone,) = table_of(tmp_path, silent)
    assert like.inputs is not None and unlike.inputs is not None and alone.inputs is not None
    assert (like.inputs["micro_batch_size"], like.inputs["num_microbatches"]) == (4, 2)
    assert sum(like.inputs["stage_full"]) == like.inputs["num_layers"]
    assert unlike.inputs["micro_batch_size"] == alone.inputs["micro_batch_size"] == 1
    assert like["micro_batch"] == "", "what the source says stays"


def test_a_set_limit_bounds_memory_and_is_no_peak(tmp_path: Path) -> None:
    (row,) = table_of(tmp_path, {"peak_mem_GB": "20", "mem_kind": "max_device_memory as stated"})
    assert row.peak_bytes is None and row.inputs is not None
    assert row.inputs["memory_bytes"] == 20e9
    assert row.out_of_memory is False


def test_a_run_with_a_figure_fitted(tmp_path: Path) -> None:
    silent = dict.fromkeys(("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "oom"), "")
    timed, nothing = table_of(tmp_path, {**silent, "step_time_s": "1"}, silent)
    assert timed.out_of_memory is False
    assert nothing.out_of_memory is None


def test_figures_of_all_stages_are_the_fullest_ones(tmp_path: Path) -> None:
    (row,) = table_of(tmp_path, {"mem_per_stage_GB": "11.5/10/9", "mem_kind": "torch max_memory_allocated"})
    assert row.peak_bytes == 11.5e9
    assert row.reported == Reported("fullest", "allocated")


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("NVLink; 800 Gb/s between nodes", 12.5e9),
        ("8x200 Gb/s HDR IB", 25e9),
        ("Management: 1x BlueField 2 DPU 100Gb/s, Compute: 8x NVIDIA ConnectX-7 IB NDR 400Gb/s", 50e9),
        ("one node, NVLink", None),
        ("NVLink in node; RDMA 400 Gb/s per GPU", 50e9),
        ("intra: 8x NVLink 100 Gb/s; host: 2x 100 Gb/s", 3.125e9),
        ("4 nodes, HDR 200 Gb/s x4", 12.5e9),
        ("NDR 400Gb/s InfiniBand", None),
        ("intra: 24x 100Gb/s Ethernet; host: 2x ConnectX-5 100Gb/s", None),
    ],
)
def test_network_bandwidth_per_device(text: str, bytes_per_s: float | None) -> None:
    assert network_bytes_per_s(text, 8) == bytes_per_s


@pytest.mark.parametrize(
    ("changes", "peak_flops_per_s"),
    [
        ({"gpu": "H100-80GB"}, 989.5e12),
        ({"gpu": "H100-80GB", "precision_detail": "float8 linear layers, bf16 elsewhere"}, 1979e12),
        ({"gpu": "H100-80GB", "notes": "trained with fp8"}, 1979e12),
        ({"gpu": "V100-32GB"}, 125e12),
    ],
)
def test_a_number_format_that_is_not_stated_comes_from_the_other_texts(
    tmp_path: Path, changes: dict[str, str], peak_flops_per_s: float
) -> None:
    (row,) = table_of(tmp_path, {"precision": "", "framework": "Megatron-LM", "notes": "", "flash_attn": "", **changes})
    assert row.inputs is not None
    assert row.inputs["peak_flops_per_s"] == pytest.approx(peak_flops_per_s, rel=2e-3)
    assert row.inputs["flash"] == (changes["gpu"] != "V100-32GB"), "no bfloat16: software of before fused attention"


def test_a_number_format_that_is_not_stated_is_the_one_of_the_same_software(tmp_path: Path) -> None:
    stated = {"gpu": "H100-80GB", "precision": "fp8"}
    blank, _, _ = table_of(tmp_path, {**stated, "precision": ""}, stated, {**stated, "gpu": "A100-80GB"})
    assert blank.inputs is not None
    assert blank.inputs["peak_flops_per_s"] > 1.9e15


def test_sharded_weights_of_a_pipeline_are_gathered_once(tmp_path: Path) -> None:
    sharded = {"zero_stage": "3", "dp": "4", "tp": "1", "n_gpus": "8", "pp": "2", "framework": "torchtitan"}
    rows = table_of(tmp_path, sharded, {**sharded, "dp": "8", "pp": "1"}, {**sharded, "framework": "MaxText (JAX)"})
    assert [(row.inputs or {})["gathers_once"] for row in rows] == [1, 0, 0]


def test_flags_say_what_overlaps_and_how_norms_are_made(tmp_path: Path) -> None:
    plain = {"framework": "Megatron-LM", "other_flags": ""}
    texts = (
        "tp_comm_overlap=True, fused_rms_norm",
        "tp-comm-overlap: False overlap-param-gather",
        "flash; no fused rmsnorm",
    )
    rows = table_of(tmp_path, plain, *({**plain, "other_flags": text} for text in texts))
    recipe, silent = table_of(tmp_path, {**plain, "framework": "NeMo"}, {**plain, "framework": "PyTorch"})
    names = ("hides_collectives", "hides_gathering", "loose_norms")
    found = [[(row.inputs or {})[name] for name in names] for row in (*rows, recipe, silent)]
    assert found == [[0, 0, 1], [1, 0, 0], [0, 1, 1], [0, 0, 1], [1, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    ("kind", "detail", "full", "repeated"),
    [
        ("selective", "", 0, 0.08),
        ("selective", "per-op SAC", 0, 0.5),
        ("selective", "per-layer", 6, 0),
        ("per-stage", "block:4-layers-per-stage", 4, 0),
    ],
)
def test_details_of_recompute(tmp_path: Path, kind: str, detail: str, full: int, repeated: float) -> None:
    changes = {"recompute": kind, "recompute_detail": detail, "layers": "24", "pp": "2", "dp": "", "tp": "1"}
    (row,) = table_of(tmp_path, changes)
    assert row.inputs is not None
    assert row.inputs["stage_full"] == [full, full]
    assert row.inputs["stage_repeated"] == [repeated] * 2


def test_attention_of_an_older_generation(tmp_path: Path) -> None:
    torch = {"framework": "torchtitan", "gpu": "H100-80GB"}
    rows = table_of(tmp_path, torch, {**torch, "gpu": "A100-80GB"}, {**torch, "framework": "NeMo"})
    assert [(row.inputs or {})["aged_attention"] for row in rows] == [1, 0, 0]


def test_evaluation_of_the_small_table() -> None:
    result = evaluate(read_table(TABLE), num_draws=1)
    vtrain = next(entry for entry in result["sources"] if entry["source"] == "vtrain-single")
    assert vtrain["after"]["10"]["mape"] < 0.15
    assert vtrain["after"]["10"]["spearman"] > 0.85
    assert {entry["source"] for entry in result["sources"]} == {
        "vtrain-single",
        "seed 004",
        "bigscience-1b3",
        "megatron-bridge",
    }


def rewritten(tmp_path: Path, *, drop: str = "", **changes: str) -> Path:
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
def test_what_cannot_be_described_is_counted_with_its_reason(
    tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    rows, notes = read_what_can_be(rewritten(tmp_path, drop="compile", **changes))
    assert len(rows) == len(read_table(TABLE))
    assert notes == ["no column compile: read as blank", "column split left out"]
    assert [reason in row.reason for row in rows[:5]] == [True] * 5
    result = evaluate(rows[:12], num_draws=1)
    (entry,) = result["sources"]
    assert entry["not_modelled"] == 5
    assert any(reason in text for text in entry["reasons"])
    assert np.isfinite(entry["after"]["0"]["mape"]), "the other rows are judged"


def test_tables_without_figures_or_rows_are_judged_as_far_as_they_go(tmp_path: Path) -> None:
    silent = dict.fromkeys(("step_time_s", "tokens_per_s_per_gpu", "peak_mem_GB", "mem_per_stage_GB"), "")
    rows, _ = read_what_can_be(rewritten(tmp_path, **silent, oom="true"))
    only_oom = evaluate(rows[:5], num_draws=1)["summary"]["after"]
    assert only_oom["5"]["mape"] is None and only_oom["5"]["oom_recall"] is not None
    assert evaluate((), num_draws=1)["sources"] == []
    (tmp_path / "empty.csv").write_text("", encoding="utf-8")
    with pytest.raises(TableError, match="no column problem, source"):
        read_what_can_be(tmp_path / "empty.csv")


@pytest.mark.parametrize(("flags", "known"), [("cpu_offload=False", False), ("optimizer offload Y", None)])
def test_what_ran_partly_in_host_memory_says_nothing_of_the_device(
    tmp_path: Path, flags: str, known: bool | None
) -> None:
    (row,) = table_of(tmp_path, {"other_flags": flags})
    assert row.out_of_memory is known


def test_rank_correlation_with_ties() -> None:
    assert rank_correlation(np.array([1.0, 2.0, 2.0, 3.0]), np.array([10.0, 20.0, 20.0, 30.0])) == pytest.approx(1)
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])) == pytest.approx(-1)
    assert rank_correlation(np.array([1.0, 1.0]), np.array([1.0, 2.0])) == 0
