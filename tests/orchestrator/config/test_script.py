"""Sweep files with a user's training program: what they mean, and what is wrong before anything runs."""

import copy
import json
import shlex

import pytest
import yaml

from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.errors import ConfigError
from orchestrator.space.notation import short_name
from tests.support.sweep_files import SCRIPT
from trials.spec import CustomChoice, ScriptData, ScriptModel

CUSTOM = {
    "name": "mine",
    "workload": {
        "recipe": "custom",
        "run": ["python", "train.py", "--bs", "{micro_batch_size}", "--accum={accumulation}", "--lr", 0.001],
        "global_batch_size": 32,
        "seq_length": 16,
        "files": {"config": "config.json"},
        "metrics": {"log": r"iter (?P<step>\d+): loss (?P<loss>\S+)"},
    },
    "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 2},
    "baseline": {"micro_batch_size": 4},
    "space": {"micro_batch_size": [4, 8], "own": {"--fused": [True, False]}},
}


def changed(changes):
    """The sweep with values at dotted paths replaced; None takes a key away."""
    content = copy.deepcopy(CUSTOM)
    for path, value in changes.items():
        *above, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        node = content
        for part in above:
            node = node[part]
        if value is None:
            del node[last]
        else:
            node[last] = value
    return content


def write(folder, data):
    (folder / "train.py").write_text("print()\n")
    (folder / "config.json").write_text('{"zero": {"stage": 1}}')
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(data, sort_keys=False))
    return file


def test_keys_become_a_script_workload(tmp_path):
    spec = load_sweep(write(tmp_path, CUSTOM))
    workload = spec.to_workload()
    assert isinstance(workload.model, ScriptModel) and isinstance(workload.data, ScriptData)
    assert workload.model.run[-1] == "0.001" and workload.model.cwd == str(tmp_path)
    assert (workload.tokens_per_step, workload.speed_unit) == (512, "tokens/s/p")
    assert short_name(spec.baseline_candidate) == "dp2 mbs4 O0 fused=off"  # it runs on all devices held, as it stands
    assert spec.script.env_pass == () and spec.script.log.name == "pattern"


def test_a_stored_sweep_keeps_what_was_read_and_another_content_is_another_sweep(tmp_path):
    spec = load_sweep(write(tmp_path, CUSTOM))
    stored = json.loads(json.dumps(spec.to_json()))
    (tmp_path / "config.json").write_text('{"zero": {"stage": 2}}')
    again = SweepSpec.from_json(stored)
    assert again == spec and again.script == spec.script
    assert again.script.run.files["config"] == '{"zero": {"stage": 1}}'
    assert load_sweep(tmp_path / "sweep.yaml").spec_hash != spec.spec_hash
    (tmp_path / "config.json").unlink()
    assert SweepSpec.from_json(stored).spec_hash == spec.spec_hash


@pytest.mark.parametrize("number", ["9.0", "8.10", "1:30:00", "0123", "1_000", "1e-3", "-.5"])
def test_numbers_reach_the_program_as_written(tmp_path, number):
    env = {"A": "NUMBER"}
    changes = {"workload.run.6": "NUMBER", "workload.trial_args": ["--x", "NUMBER"]}
    file = write(tmp_path, changed(changes | {"workload.env": env, "cluster.env": env}))
    file.write_text(file.read_text().replace("NUMBER", number))
    spec = load_sweep(file)
    script = spec.script
    assert (script.run.argv[-1], script.trial_args, dict(script.run.env)) == (number, ("--x", number), {"A": number})
    assert spec.cluster.env == {"A": number}


def test_a_number_in_the_command_is_the_value_of_a_knob_in_any_spelling(tmp_path):
    file = write(tmp_path, changed({"workload.run.6": "NUMBER", "space.own": {"--lr": [0.01, 0.001]}}))
    file.write_text(file.read_text().replace("NUMBER", "1e-3"))
    assert load_sweep(file).baseline_candidate.own == (CustomChoice(name="--lr", value=0.001),)


BAD = {
    "text": ({"workload.run": "python train.py --bs '4 5'"}, "workload.run", 'Use [python, train.py, --bs, "4 5"]'),
    "truth": ({"workload.run.1": True}, "workload.run.1", "in quotes"),
    "typo": ({"workload.run.3": "{micro_batchsize}"}, "workload.run.3", "Did you mean '{micro_batch_size}'?"),
    "launcher": ({"workload.run": ["torchrun", "train.py"]}, "workload.run", "Use run: [python, train.py]"),
    "cwd": ({"workload.cwd": "gone"}, "workload.cwd", "relative to the sweep file"),
    "script": ({"workload.run.1": "gone.py"}, "workload.run.1", "relative to cwd"),
    "program": ({"workload.run.0": "no-such-program"}, "workload.run.0", "Install the program"),
    "file": ({"workload.files": {"config": "gone.json"}}, "workload.files.config", "relative to cwd"),
    "recipe": ({"workload.recipe": "megatorn"}, "workload.recipe", "megatron"),
    "pattern": ({"workload.metrics": {"log": "(?P<step>"}}, "workload.metrics.log", "backslash"),
    "no step": ({"workload.metrics": {"log": "(?P<loss>.*)"}}, "workload.metrics.log", "(?P<step>"),
    "group": ({"workload.metrics": {"log": "(?P<step>.*)(?P<x>.*)"}}, "workload.metrics.log", "Allowed groups: step"),
    "secret": ({"workload.env": {"HF_TOKEN": "abc"}}, "workload.env.HF_TOKEN", "environment"),
    "batch": ({"workload.global_batch_size": None}, "workload.global_batch_size", "Set the number of samples"),
    "tokens": ({"workload.tokens_per_step": 100}, "workload.tokens_per_step", "Set a multiple"),
    "devices": ({"cluster.devices_per_node": None}, "cluster.devices_per_node", "dp_replicate"),
    "untold": ({"space.tp": [1, 2]}, "space.tp", "Put {tp} in workload.run"),
    "layers": ({"workload.run.5": "{pp}", "space.pp": [1, 2], "baseline.pp": 1}, "workload.num_layers", "num_layers"),
    "today": ({"baseline": "from_run"}, "baseline.micro_batch_size", "value that you use today"),
    "virtual": ({"cluster.kind": "simulated", "cluster.simulation": {"accelerator": "h100"}}, "cluster", ""),
    "ours": ({"space.own": {"tp": [1, 2]}}, "space.own.tp", "rename"),
    "own name": ({"space.own": {"two words": [1, 2]}}, "space.own.two words", "--flag"),
    "own file": ({"space.own": {"other:a.b": [1, 2]}}, "space.own.other:a.b", "workload.files"),
    "own untold": ({"space.own": {"dtype": ["a", "b"]}}, "space.own.dtype", "--dtype"),
    "own twice": (
        {"workload.run": ["python", "train.py", "--bs={micro_batch_size}"], "space.own": {"--bs": [4, 8]}},
        "space.own.--bs", "Remove --bs",
    ),
    "own nothing": ({"space.own": {"--x": None}}, "space.own.--x", "keep a knob's current value"),
    "condition": (
        {"space.own": {"--a": {"values": [1, 2], "when": {"--b": 1}}}}, "space.own.--a.when", "Defined knobs: "
    ),
    "circle": (
        {"space.own": {"--a": {"values": [1], "when": {"--b": 1}}, "--b": {"values": [1], "when": {"--a": 1}}}},
        "space.own.--a.when",
        "Remove one of them",
    ),
    "inside value": ({"space.inside": {"precision": "O2"}}, "space.inside.precision", "Use 'O0' or 'O1'"),
    "inside layers": ({"space.inside": {"recompute": {"full": 3}}}, "space.inside.recompute", "'none' or 'full'"),
    "inside format": ({"space.inside": {"memory_format": ["auto"]}}, "space.inside.memory_format", "'nchw' or 'nhwc'"),
    "inside key": ({"space.inside": {"num_worker": 2}}, "space.inside.num_worker", "num_workers"),
    "inside field": ({"space.inside": {"training_arguments": {"b f": 1}}}, "space.inside", "field name"),
    "inside twice": ({"space.inside": {"num_workers": 2}, "workload.run.5": "{num_workers}", "baseline.num_workers": 0},
                     "space.inside.num_workers", "one of the two"),
    "inside and space": ({"space.inside": {"compile": "model"}, "space.compile": "model"},
                         "space.inside.compile", "one of the two"),
    "inside batch twice": (
        {"space.inside": {"micro_batch_size": 2, "training_arguments": {"gradient_accumulation_steps": 2}},
         "space.micro_batch_size": None, "workload.run.3": "8"},
        "space.inside.training_arguments.gradient_accumulation_steps", "Remove the key",
    ),
    "inside unhooked": ({"space.inside": {"num_workers": 2}, "workload.metrics": {"hook": False}},
                        "space.inside", "Set workload.metrics.hook to true"),
    "inside file": ({"space.inside": {"num_workers": 2}, "workload.files": {"inside": "config.json"}},
                    "workload.files.inside", "Use another name for the file"),
    "inside of ours": ({"space.own": {"inside:ddp_bucket_mb": 2}}, "space.own.inside:ddp_bucket_mb", "workload.files"),
    "a setting of the framework": (
        {"workload": {"recipe": "transformers", "run": ["python", "train.py", "--per_device_train_batch_size=4",
                                                        "--output_dir=x"]},
         "space": {"inside": {"num_workers": 2}}, "baseline": "from_run"},
        "space.inside.num_workers", "Move the knob to space.num_workers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_errors_name_key_and_remedy(tmp_path, case):
    changes, key, remedy = BAD[case]
    file = write(tmp_path, changed(changes))
    with pytest.raises(ConfigError) as caught:
        load_sweep(file)
    assert caught.value.key.startswith(key) and remedy in (caught.value.remedy or ""), str(caught.value)
    assert caught.value.file == str(file) and caught.value.line is not None


def test_programs_of_another_host_are_not_looked_for(tmp_path):
    file = write(tmp_path, changed({"cluster": {"kind": "ray", "devices_per_node": 2}, "workload.cwd": "gone",
                                            "workload.files": None}))  # fmt: skip
    assert load_sweep(file, address="ray://elsewhere:10001").script.run.cwd.endswith("gone")
    with pytest.raises(ConfigError):
        load_sweep(file)


def test_the_remedy_splits_like_the_shell(tmp_path):
    text = """python train.py --name 'a "b"' --path /x/y"""
    with pytest.raises(ConfigError) as caught:
        load_sweep(write(tmp_path, changed({"workload.run": text})))
    shown = caught.value.remedy.removeprefix("Use ").partition(";")[0]
    assert yaml.safe_load(shown) == shlex.split(text)


def test_baseline_values_of_custom_knobs_come_from_the_command(tmp_path):
    run = [*CUSTOM["workload"]["run"], "--fused", "--opt=sgd", "--other", "7", "{config}"]
    own = {"--fused": [True, False], "--opt": ["adam", "sgd"], "--other": [1, 2], "config:zero.stage": [1, 2],
           "$X": ["a", "b"]}  # fmt: skip
    data = changed({"workload.run": run, "workload.env": {"X": "b"}, "space.own": own})
    spec = load_sweep(write(tmp_path, data))
    # the command has --other 7, which is none of its values: it is inherited
    assert spec.baseline_candidate.own == tuple(
        CustomChoice(name=name, value=value)
        for name, value in (("$X", "b"), ("--fused", True), ("--opt", "sgd"), ("config:zero.stage", 1))
    )


def test_every_key_arrives(tmp_path):
    (tmp_path / "settings.json").write_text("{}")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000}
    (tmp_path / "model.json").write_text(json.dumps(sizes))
    spec = load_sweep(write(tmp_path, SCRIPT))
    script, workload = spec.script, spec.to_workload()
    assert (script.model.launcher, script.model.num_layers, script.model.shape.ffn_hidden_size) == ("own", 2, 256)
    assert (script.run.files["settings"], script.run.env, script.env_pass) == ("{}", {"MODE": "fast"}, ("HF_TOKEN",))
    assert (script.log.files, script.log.pattern, script.hook) == (("{out}/*.log",), r"step (?P<step>\d+)", False)
    assert (workload.seq_length, workload.seed, script.seed) == (16, 1, 1)
    assert spec.baseline_candidate.own == (CustomChoice(name="--fused", value=True),)
    assert {knob.name: (knob.values, knob.memory, knob.when) for knob in spec.custom_knobs} == {
        "--fused": ((True,), None, ()),
        "--dtype": (("a", "b"), "falls", (("--fused", (True,)),)),
    }
