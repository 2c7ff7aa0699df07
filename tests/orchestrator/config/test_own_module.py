"""User modules in sweep files: counted once in a separate process, kept with the sweep."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.errors import ConfigError
from orchestrator.planning.planner import make_plan
from tests.support import ROOT
from trials.spec import HuggingFaceModel, PythonModel

EXAMPLE = ROOT / "configs" / "sweeps" / "python.yaml"
COUNTED = {"num_layers": 4, "no_pipeline": "weights are shared", "no_tensor_parallel": "there is no plan"}


def write(folder: Path, **changes: object) -> Path:
    content = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    content["workload"] |= {"cwd": str(ROOT / "configs" / "examples"), **changes}
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump({**content, "baseline": {"dp_replicate": 2, "micro_batch_size": 4}}))
    return file


@pytest.mark.slow
def test_the_module_is_counted_when_the_file_is_read_and_never_again(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load_sweep(EXAMPLE)
    model = spec.to_workload().model
    assert isinstance(model, PythonModel)
    assert (model.num_layers, model.facts.no_pipeline, model.facts.no_tensor_parallel) == (4, None, None)
    assert model.facts.num_parameters == 201_802
    monkeypatch.setattr("subprocess.run", None)
    again = SweepSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again.to_workload() == spec.to_workload() and again.spec_hash == spec.spec_hash
    layouts = {dataclasses.replace(c.layout, stage_layers=()) for c in make_plan(spec).candidates}
    assert {layout.tp_engine for layout in layouts if layout.tp > 1} == {"dtensor"}
    assert {layout.pp for layout in layouts} == {1, 2}


def test_unsplittable_modules_are_rejected_with_a_reason(tmp_path: Path) -> None:
    plan = make_plan(load_sweep(write(tmp_path, counted=COUNTED)))
    reasons = {rejection.rule_id: rejection.reason for rejection in plan.examples}
    assert reasons["own-pipeline"] == "pp 2: weights are shared"
    assert reasons["own-tensor-parallel"] == "tp 2: there is no plan"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model": "python_model"},
            "workload.model: expected MODULE:FUNCTION, got 'python_model'. Use a value such as my_model:build",
        ),
        ({"loss": "trials:loss"}, "workload.loss: your module cannot be called 'trials'"),
        (
            {"tensor_parallel": {"blocks.*.up": "columns"}},
            "workload.tensor_parallel.blocks.*.up: invalid value 'columns'; expected one of 'colwise'",
        ),
        ({"layer": "blocks"}, "workload.layer: unknown key. Did you mean 'layers'?"),
        ({"cwd": "/no/such/folder", "counted": None}, "workload.cwd: directory '/no/such/folder' does not exist"),
    ],
)
def test_errors_name_the_key(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_sweep(write(tmp_path, **{"counted": COUNTED, **changes}))
    assert words in str(caught.value)


@pytest.mark.slow
def test_errors_in_user_code_name_the_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import torch\n\ndef build():\n    return torch.nn.Lineal(3, 3)\n")
    names = dict.fromkeys(("model", "loss", "data"), "mine:build")
    with pytest.raises(ConfigError) as caught:
        load_sweep(write(tmp_path, **names, cwd="."))
    assert "mine:build fails: AttributeError" in str(caught.value) and "(mine.py, line 4)" in str(caught.value)


CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}


def write_decoder(folder: Path, **model: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    content = {
        "name": "decoder",
        "workload": {
            "model": {"kind": "huggingface", "config": "config.json", **model},
            "seq_length": 32,
            "global_batch_size": 8,
        },
        "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 2},
        "baseline": {"dp_replicate": 2, "micro_batch_size": 1},
        "space": {"dp_replicate": [1, 2], "pp": [1, 2], "tp": [1, 2], "micro_batch_size": [1, 2, 4]},
    }
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.slow
def test_a_decoder_of_transformers_is_read_from_its_configuration(tmp_path: Path) -> None:
    spec = load_sweep(write_decoder(tmp_path))
    model = spec.to_workload().model
    assert isinstance(model, HuggingFaceModel) and model.shape is not None
    assert (model.num_layers, model.vocab_size, model.shape.ffn_hidden_size) == (2, 512, 96)
    (tmp_path / "config.json").unlink()
    assert SweepSpec.from_json(json.loads(json.dumps(spec.to_json()))).to_workload().model == model
    plan = make_plan(spec)
    assert {rejection.rule_id for rejection in plan.examples} >= {"own-pipeline"}
    assert {candidate.layout.tp for candidate in plan.candidates} == {1, 2}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("absent.json", "workload.model.config:"),
        ({"hidden_size": 8}, "workload.model.config: the file has no 'model_type'"),
        ({"model_type": "llama"}, "workload.model.config: expected an integer vocab_size"),
    ],
)
def test_errors_of_a_configuration_name_its_key(config: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_sweep(write_decoder(tmp_path, config=config, counted=COUNTED))
    assert words in str(caught.value)
