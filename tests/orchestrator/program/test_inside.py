"""Knobs within a program: what the hook is given for each candidate, and how a candidate is written down again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.program.candidate_command import HOOK, LINES, START, artifact, script_command
from orchestrator.program.source_lines import source_lines
from orchestrator.promotion.verify import _space
from orchestrator.space.inside import InsideSection, knobs_set
from orchestrator.space.space import make_space
from trials.script.command import KNOBS_VARIABLE

ALL = {
    "micro_batch_size": [1, 2, 4],
    "num_workers": [0, 2],
    "dataloader": ["manual", "auto"],
    "prefetch_factor": [2, 4],
    "pin_memory": [False, True],
    "persistent_workers": [False, True],
    "precision": ["O0", "O1"],
    "recompute": ["none", "full"],
    "compile": ["off", "block"],
    "attention": ["auto", "math"],
    "matmul_precision": ["highest", "high"],
    "cudnn_benchmark": ["off", "on"],
    "memory_format": ["nchw", "nhwc"],
    "ddp_bucket_mb": ["as_is", 50],
    "ddp_gradient_as_bucket_view": ["as_is", True],
    "ddp_static_graph": ["as_is", True],
    "allocator": ["as_is", "expandable_segments:True"],
    "training_arguments": {"bf16": ["as_is", True]},
}


def sweep(folder, inside, space_of=None, **changes):
    (folder / "train.py").write_text("import os, sys; print(sys.path); print(os.environ.get('TUNE_CLUSTER_KNOBS'))")
    content = {
        "name": "inside",
        "workload": {
            "recipe": "custom",
            "run": [sys.executable, "train.py"],
            "global_batch_size": 8,
            "launcher": "own",
        },
        "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 1},
        "space": {"inside": inside, **(space_of or {})},
        **changes,
    }
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(content))
    return load_sweep(file)


def candidates(spec):
    return list(make_space(spec.choices, spec.to_workload().model, spec.custom_knobs))


def knobs_of(spec, candidate):
    """The knobs in the file that a trial's program is given; empty where it is given none."""
    command = script_command(spec.script, candidate, spec.to_protocol(), device="cpu")
    texts = [json.loads(file.text)["knobs"] for file in command.files]
    assert bool(texts) == (KNOBS_VARIABLE in dict(command.env))
    return texts[0] if texts else {}


@pytest.mark.parametrize("name", ALL)
def test_only_knobs_that_differ_from_the_baseline_are_passed_to_the_program(tmp_path, name):
    loader = {"num_workers": [0, 2]} if name in ("prefetch_factor", "persistent_workers") else {}
    spec = sweep(tmp_path, {name: ALL[name], **loader})
    found = {one: knobs_of(spec, one) for one in candidates(spec)}
    assert found.pop(spec.baseline_candidate) == {}
    assert all(found.values()) and len({json.dumps(knobs) for knobs in found.values()}) == len(found)


def test_the_baseline_defines_current_values(tmp_path):
    spec = sweep(tmp_path, {"num_workers": [4, 0, 2], "prefetch_factor": 2}, baseline={"num_workers": 4})
    found = {one.loader.num_workers: knobs_of(spec, one) for one in candidates(spec)}
    assert found == {4: {}, 0: {"num_workers": 0}, 2: {"num_workers": 2}}


def test_a_smaller_micro_batch_accumulates_so_that_the_global_batch_stays(tmp_path):
    cluster = {"kind": "local", "device": "cpu", "devices_per_node": 2}
    changes = {"baseline": {"dp_replicate": 2, "micro_batch_size": 2}, "cluster": cluster}
    spec = sweep(tmp_path, {"micro_batch_size": [1, 2, 4]}, space_of={"dp_replicate": [1, 2]}, **changes)
    found = {
        (one.layout.dp, one.micro_batch_size): tuple(knobs_of(spec, one).get("training_arguments", {}).values())
        for one in candidates(spec)
    }
    assert found == {(1, 1): (1, 8), (1, 2): (2, 4), (1, 4): (4, 2), (2, 1): (1, 4), (2, 2): (), (2, 4): (4, 1)}


def test_a_candidate_is_written_as_the_only_one_of_a_sweep(tmp_path):
    spec = sweep(tmp_path, {name: ALL[name] for name in ALL if name not in ("pin_memory", "attention", "compile")})
    content = spec.to_json()
    everything = candidates(spec)
    for candidate in [everything[0], *everything[1::97], everything[-1]]:
        alone = SweepSpec.from_json({**content, "space": _space(candidate, content)})
        assert candidates(alone) == [candidate]


def test_every_knob_has_code_lines_for_the_program():
    section = InsideSection.model_fields
    assert set(section) == set(ALL)  # micro_batch_size: by training_arguments
    values = {name: values[-1] for name, values in ALL.items() if isinstance(values, list)}
    values |= {"precision": "O1-bf16", "num_workers": "auto", "training_arguments": {"bf16": True}}
    del values["dataloader"], values["micro_batch_size"]
    for name, value in values.items():
        assert "\n+ " in source_lines({name: value}), name
    assert source_lines({}) == ""


def test_promotion_starts_the_program_with_the_hook_or_lists_the_lines(tmp_path):
    spec = sweep(tmp_path, {"num_workers": [0, 2]})
    candidate = spec.candidate_of({"num_workers": 2}, {})
    made = artifact(spec.script, candidate, "t001")
    there = tmp_path / "some where"
    for name, text in made.files.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": "/elsewhere"}
    done = subprocess.run(["sh", str(there / START)], capture_output=True, text=True, env=environment, timeout=60)
    paths, file = done.stdout.splitlines()[-2:]
    assert paths.index(str(there / HOOK / "hook")) < paths.index("/elsewhere"), done.stderr
    assert json.loads(Path(file).read_text())["knobs"] == knobs_set(candidate, spec.script.inside) == {"num_workers": 2}
    lines = artifact(spec.script, candidate, "t001", as_lines=True)
    assert "num_workers=2" in lines.files[LINES] and KNOBS_VARIABLE not in lines.files[START]
