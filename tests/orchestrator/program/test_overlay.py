"""What a trial of a user's program runs: candidates laid over its command, its files and its environment."""

import dataclasses
import json

from orchestrator.config.sweep import load_sweep
from orchestrator.planning.planner import make_plan
from orchestrator.program.candidate_command import last_step, problem, render, script_command
from tests.orchestrator.config.test_script import changed, write
from trials.files import from_json, to_json
from trials.script.command import ScriptCommand
from trials.spec import Protocol

PROTOCOL = Protocol(min_warmup_steps=2, num_steps=5)


def candidate(spec, **own):
    return dataclasses.replace(spec.candidate_of({}, own))


def test_overlays_are_written_to_copies(tmp_path):
    run = ["python", "train.py", "config.json", "--bs", "{micro_batch_size}", "--accum={accumulation}",
           "--all={total_accumulation}", "--steps", "{steps}", "--seed={seed}", "--out={out}", "--text={{plain}}",
           "--opt", "sgd", "{mode}"]  # fmt: skip
    own = {"--opt": ["sgd", "adam"], "--fused": [True, False], "$RING": ["a", "b"], "config:zero.stage": [1, 2],
           "mode": ["x", "y"], "compile_all": {"values": [True, False], "flag": "--compile-all"}}  # fmt: skip
    data = changed({"workload.run": run, "workload.env": {"KEPT": "1", "RING": "a"}, "workload.seed": 7,
                    "space.own": own, "baseline.own": {"mode": "x"}})  # fmt: skip
    spec = load_sweep(write(tmp_path, data))
    wanted = {"--opt": "adam", "--fused": True, "$RING": "b", "config:zero.stage": 2, "mode": "y", "compile_all": True}
    command = script_command(spec.script, candidate(spec, **wanted), PROTOCOL, device="cpu")
    assert command.argv == (
        "python", "train.py", "{config}", "--bs", "4", "--accum=4", "--all=8", "--steps", str(last_step(PROTOCOL)),
        "--seed=7", "--out={out}", "--text={plain}", "--opt", "adam", "y", "--fused", "--compile-all",
    )  # fmt: skip
    assert dict(command.env) == {"KEPT": "1", "RING": "b"}
    (file,) = command.files
    assert (file.name, file.file_name) == ("config", "config.json")
    assert json.loads(file.text) == {"zero": {"stage": 2}}
    assert json.loads((tmp_path / "config.json").read_text()) == {"zero": {"stage": 1}}
    assert (command.num_devices, command.tokens_per_step, command.expected.micro_batch_size) == (2, 512, 4)
    assert command.expected.num_microbatches == 4 and last_step(PROTOCOL) >= command.num_required_steps
    assert from_json(ScriptCommand, to_json(command)) == command
    less = script_command(spec.script, candidate(spec, **{"--fused": False}), PROTOCOL, device="cpu")
    assert "--fused" not in less.argv and "config.json" in less.argv


def test_the_baseline_is_the_unchanged_command(tmp_path):
    run = ["python", "train.py", "--bs", "8", "--fused"]
    data = changed({"workload.run": run, "baseline": "from_run", "space": {"own": {"--fused": [True, False]}}})
    spec = load_sweep(write(tmp_path, data))
    assert spec.baseline_candidate == spec.script.unchanged
    assert render(spec.script, spec.baseline_candidate).argv == tuple(run)
    assert script_command(spec.script, spec.baseline_candidate, PROTOCOL, device="cpu").argv == tuple(run)
    assert len(make_plan(spec).candidates) == 2  # one of them is the baseline


def test_data_parallelism_takes_the_remaining_devices(tmp_path):
    run = ["python", "train.py", "--tp", "{tp}", "--pp", "{pp}", "--zero", "{zero_stage}"]
    data = changed({
        "workload.run": run, "workload.num_layers": 4, "cluster.devices_per_node": 8,
        "baseline": {"tp": 1, "pp": 1, "zero_stage": 0},
        "space": {"tp": [1, 2], "pp": [1, 2], "zero_stage": [0, 1]},
    })  # fmt: skip
    plan = make_plan(load_sweep(write(tmp_path, data)))
    layouts = {(c.layout.tp, c.layout.pp, c.layout.zero_stage, c.layout.dp_replicate, c.layout.dp_shard)
               for c in plan.candidates}  # fmt: skip
    assert layouts == {(tp, pp, zero, 1 if zero else 8 // tp // pp, 8 // tp // pp if zero else 1)
                       for tp in (1, 2) for pp in (1, 2) for zero in (0, 1)}  # fmt: skip
    assert plan.baseline.layout.dp_replicate == 8


def test_rules_of_the_built_in_runner_do_not_apply_to_programs(tmp_path):
    """DDP with tensor parallelism by DTensors is nothing that our runner does; others have their own way."""
    run = ["python", "train.py", "--tp", "{tp}", "--compile", "{compile}", "--recompute", "{recompute}"]
    data = changed({
        "workload.run": run, "cluster.devices_per_node": 4, "workload.files": None,
        "baseline": {"tp": 1, "compile": "off", "recompute": "none"},
        "space": {"tp": [2], "compile": ["off", "model"], "recompute": ["none", "full"]},
    })  # fmt: skip
    spec = load_sweep(write(tmp_path, data))
    plan = make_plan(spec)
    assert len(plan.candidates) == 4 and plan.num_rejected == {}
    words = {render(spec.script, c).argv[5] + " " + render(spec.script, c).argv[7] for c in plan.candidates}
    assert words == {"off none", "model none", "off full", "model full"}
    assert all(problem(spec.script, c) is None for c in plan.candidates)
