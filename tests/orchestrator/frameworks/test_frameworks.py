"""Every framework by the same tests: exports and overlays contain every request or a note.

What exactly is written stands in ``tests/goldens``, whose seeded candidates and commands are those of these tests.
"""

import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import orchestrator.frameworks
from orchestrator.errors import ConfigError
from orchestrator.frameworks import catalog
from orchestrator.frameworks.catalog import export, export_all, formats, recipe, recognise, training, trainings
from orchestrator.frameworks.edit import Overlay, Run
from orchestrator.frameworks.spelling import Recipe, audited, candidate_of, differences, flatten, is_at_or_below
from orchestrator.frameworks.torchtitan_config import settings_of
from orchestrator.space.space import canonical_part
from tests.goldens import frameworks as goldens
from tests.goldens.answers import command
from tests.orchestrator.frameworks import commands, programs
from tests.orchestrator.frameworks.all_fields import all_paths, handled, parts
from tests.orchestrator.frameworks.commands import as_it_stands, differing, errors, request_for, run_of
from tests.orchestrator.frameworks.configurations import MODEL, WORKLOAD
from tests.orchestrator.frameworks.matrix import table
from tests.support import ROOT
from trials.files import from_json
from trials.outcome import RankReport
from trials.script.logs import make_parser
from trials.sizes import num_parameters
from trials.spec import (
    Candidate,
    Experts,
    ImageFolderData,
    Kernels,
    Layout,
    Precision,
    Recompute,
    ResNetModel,
    SelectiveRecompute,
    Workload,
    gather_pattern,
)

FORMATS, TRAININGS = formats(), trainings()
O1, O2 = (Precision(level=level, dtype="bfloat16") for level in ("O1", "O2"))
ALL, V = ((2, 2), (2, 2)), {"schedule": "zbv", "num_virtual_stages": 2, "stage_layers": ((2, 2), (2, 2))}


# ---- exports ----


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_contains_every_setting_or_a_note(name):
    known = recipe(name)
    declared = {setting_name for setting in known.settings for setting_name in setting.names}
    for candidate, workload in goldens.configurations()[::4]:
        made = known.export(candidate, workload)
        assert audited(known, candidate, workload).notes == made.notes
        assert set(known.load(made.files)) <= declared
        parsed = known.parse(made.files)
        changed = differences(flatten(candidate, workload), parsed.values)
        if not any(not path.startswith(("workload.", "own")) for path in changed):
            assert repr(replace(parsed.candidate, own=())) == repr(replace(candidate, own=()))


@pytest.mark.parametrize("name", FORMATS)
def test_a_parsed_export_is_exported_again_without_loss(name):
    known, count = recipe(name), 0
    for candidate, workload in goldens.configurations()[::3]:
        candidate = replace(candidate, loader=canonical_part(replace(candidate.loader, tuning=None)))
        made = known.export(candidate, workload)
        if not errors(made):
            parsed = known.parse(made.files).candidate
            assert repr(known.parse(known.export(parsed, workload).files).candidate) == repr(parsed)
            count += 1
    assert count > 5


@pytest.mark.parametrize("name", FORMATS)
def test_the_limit_of_the_gradient_norm_is_written_and_read(name):
    found = {}
    for limit in (0.0, 1.0, 0.25):
        workload = replace(WORKLOAD, optimizer=replace(WORKLOAD.optimizer, clip_norm=limit))
        made = export(name, Candidate(), workload)
        assert recipe(name).parse(made.files).values["workload.optimizer.clip_norm"] == limit
        assert [note for note in made.notes if "clip_norm" in note.knob] == []
        found[limit] = made.files
    assert found[0.0] != found[1.0] != found[0.25]


@pytest.mark.parametrize("name", FORMATS)
def test_fused_operators_are_written_or_noted(name):
    _, workload = goldens.configurations()[-2]
    for fused in ("auto", "torch", "liger"):
        made = audited(recipe(name), Candidate(kernels=Kernels(fused=fused)), workload)
        is_read = recipe(name).parse(made.files).candidate.kernels.fused == fused
        assert is_read != ("kernels.fused" in [note.knob for note in made.notes]), fused
        assert ("liger" in str(made.files)) == (fused == "liger" and name in ("accelerate", "torchrun"))


@pytest.mark.parametrize("name", FORMATS)
def test_gathers_of_one_sub_layer_are_written_and_read_or_noted(name):
    layout = Layout(tp=2, tp_engine="local", sequence_parallel=True)
    gathers = SelectiveRecompute(pattern=gather_pattern("feed_forward"), num_layers=((MODEL.num_layers,),))
    candidate = Candidate(layout=layout, recompute=Recompute(selective=(gathers,)))
    made = export(name, candidate, WORKLOAD, allow_lossy=True)
    noted = {note.knob for note in made.notes}
    assert "recompute.selective" in noted or recipe(name).parse(made.files).candidate.recompute == candidate.recompute
    assert ("recompute.selective" in noted) == (name not in ("mindformers", "torchrun"))


def test_torchtitan_recomputes_some_layers_and_modules_of_others():
    layout = Layout(pp=2, schedule="interleaved", num_virtual_stages=2, stage_layers=((2, 2), (2, 2)))
    attention = SelectiveRecompute(pattern="attention", num_layers=((1, 0), (2, 1)))
    candidate = Candidate(layout=layout, recompute=Recompute(full=((1, 0), (0, 1)), selective=(attention,)))
    made = export("torchtitan", candidate, WORKLOAD, allow_lossy=True)
    assert not any(note.knob.startswith("recompute") for note in made.notes)
    assert recipe("torchtitan").parse(made.files).candidate.recompute == candidate.recompute
    (text,) = made.files.values()
    assert "full=[0, 6]" in text and "modules={'attention': [0, 4, 5, 6]}" in text


EXPERT_PARALLEL = {"torchrun", "megatron", "torchtitan", "mindformers"}


@pytest.mark.parametrize("name", FORMATS)
def test_the_degree_that_splits_experts_is_written_and_read_or_refused(name):
    candidate = Candidate(layout=Layout(dp_shard=4, zero_stage=3, ep=2))
    made = audited(recipe(name), candidate, with_experts(EXPERTS["plain"]))
    notes = {note.knob for note in made.notes if note.severity == "error"}
    assert ("layout.ep" in notes) == (name not in EXPERT_PARALLEL)
    assert recipe(name).parse(made.files).values["layout.ep"] == (2 if name in EXPERT_PARALLEL else 1)


def test_torchtitan_splits_no_experts_over_replicas():
    candidate = Candidate(layout=Layout(dp_replicate=2, ep=2))
    made = audited(recipe("torchtitan"), candidate, with_experts(EXPERTS["plain"]))
    assert ["not split over replicas" in note.message for note in made.notes if note.knob == "layout.ep"] == [True]


MIXTURE = Experts(
    num_experts=8, top_k=2, ffn_hidden_size=96, scores="sigmoid", balance_rate=2e-3, aux_loss=1e-4, z_loss=1e-3
)
EXPERTS = {
    "bias": MIXTURE,
    "shared": replace(MIXTURE, shared_ffn_hidden_size=64, num_dense_layers=1, aux_loss=0.0, z_loss=0.0),
    "softmax": replace(MIXTURE, scores="softmax", balance_rate=0.0),
    "unscaled": replace(MIXTURE, scores="softmax", normalizes=False, balance_rate=0.0, top_k=1),
    "whole": Experts(
        num_experts=8, top_k=2, ffn_hidden_size=96, shared_ffn_hidden_size=192, scores="sigmoid", balance_rate=0.0
    ),
    "plain": Experts(num_experts=8, top_k=2, ffn_hidden_size=96, balance_rate=0.0),
}
SPELLED = {
    "megatron": set(EXPERTS),
    "torchrun": set(EXPERTS),
    "torchtitan": {"shared", "whole", "plain"},
    "mindformers": {"whole", "plain"},
    "paddlenlp": {"plain"},
    "accelerate": {"plain"},
    "deepspeed": {"plain"},
}
"""The mixtures of experts that formats express without loss; any other is refused."""
NOTED = {
    "capacity": (replace(MIXTURE, capacity=1.25), "slots are counted per micro-batch"),
    "routing": (replace(MIXTURE, routing="balanced"), "exported as learned"),
    "normalizes": (replace(MIXTURE, normalizes=False), "always scaled"),
    "balance_rate": (replace(MIXTURE, scores="softmax"), "requires sigmoid scores"),
}


def with_experts(experts):
    return replace(WORKLOAD, model=replace(MODEL, experts=experts))


@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_written_and_read_or_refused(name):
    for kind, experts in EXPERTS.items():
        workload = with_experts(experts)
        made = audited(recipe(name), Candidate(), workload)
        found = recipe(name).parse(made.files).values
        expected = {path: value for path, value in flatten(Candidate(), workload).items() if ".experts." in path}
        if kind in SPELLED.get(name, ()):
            assert [note for note in made.notes if "experts" in note.knob] == []
            assert {path: value for path, value in found.items() if ".experts." in path} == expected
        else:
            assert any("experts" in note.knob and note.severity == "error" for note in made.notes), kind


@pytest.mark.parametrize("name", ["accelerate", "deepspeed"])
def test_transformers_builds_the_exported_mixture(name):
    transformers = pytest.importorskip("transformers")
    workload = with_experts(replace(EXPERTS["plain"], aux_loss=1e-3))
    layout = Layout(dp_shard=2, zero_stage=3)
    made = audited(recipe(name), Candidate(layout=layout), workload)
    assert [note.knob for note in made.notes if "experts" in note.knob] == ["workload.model.llama.experts.aux_loss"]
    config = transformers.MixtralConfig.from_dict(json.loads(made.files["model.json"]))
    built = transformers.MixtralForCausalLM(config)
    assert sum(weight.numel() for weight in built.parameters()) == num_parameters(workload.model)
    assert (config.output_router_logits, config.router_aux_loss_coef) == (True, 1e-3)
    if name == "accelerate":
        assert type(built.model.layers[0]).__name__ in made.files["accelerate.yaml"]


@pytest.mark.parametrize("field", NOTED)
def test_megatron_notes_what_its_experts_do_differently(field):
    experts, message = NOTED[field]
    made = audited(recipe("megatron"), Candidate(), with_experts(experts))
    assert [message in note.message for note in made.notes if note.knob.endswith(f"experts.{field}")] == [True]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--num-experts 8", Experts(num_experts=8, top_k=2, ffn_hidden_size=1024, balance_rate=0.0)),
        (
            "--num-experts 64 --moe-router-topk 6 --moe-ffn-hidden-size 1408 --moe-layer-freq ([0]*1+[1]*3) "
            "--moe-shared-expert-intermediate-size 2816 --moe-router-score-function sigmoid "
            "--moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-3 --moe-router-load-balancing-type seq_aux_loss",
            Experts(
                num_experts=64,
                top_k=6,
                ffn_hidden_size=1408,
                shared_ffn_hidden_size=2816,
                num_dense_layers=1,
                scores="sigmoid",
                aux_loss=1e-3,
            ),
        ),
        ("--num-experts 8 --moe-layer-freq [0,0,1,1]", Experts(num_experts=8, top_k=2, ffn_hidden_size=1024)),
        ("--num-experts 8 --moe-layer-freq 2", None),
    ],
)
def test_commands_of_megatron_are_predicted_with_their_experts(words, expected):
    argv = (
        "pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 1024 --swiglu "
        f"--padded-vocab-size 1024 --seq-length 128 --micro-batch-size 1 --global-batch-size 8 {words}"
    )
    known = training("megatron").read(Run(argv=tuple(argv.split()), cwd="/"))
    shape = known.shape
    if expected is None:
        assert shape is None and any("--moe-layer-freq 2" in note.message for note in known.notes)
    elif "[0,0" in words:
        assert shape.experts.num_dense_layers == 2
    else:
        assert shape.experts == expected


def test_fsdp_of_megatron_shards_nothing_by_default():
    argv = "pretrain_gpt.py --micro-batch-size 1 --global-batch-size 8 --use-megatron-fsdp"
    for words, stage in {"": 0, " --data-parallel-sharding-strategy optim_grads_params": 3}.items():
        found = training("megatron").read(Run(argv=tuple((argv + words).split()), cwd="/"))
        assert found.values["layout.zero_stage"] == stage


def test_torchrun_loses_nothing():
    for candidate, workload in goldens.configurations()[:150:5]:
        made = export("torchrun", candidate, workload)
        assert (made.notes, recipe("torchrun").parse(made.files).values) == ((), flatten(candidate, workload))


@pytest.mark.parametrize("name", FORMATS)
def test_every_field_is_handled_by_name(name):
    spoken_for = handled(recipe(name))
    assert [path for path in sorted(all_paths()) if not any(is_at_or_below(path, part) for part in spoken_for)] == []
    groups = {path.rpartition(".")[0] for path in all_paths()} - {"workload.data", "loader", "layout", "workload"}
    hiding = [part for part in spoken_for if part in groups - parts()]  # which would hide fields added later
    assert name == "torchrun" or hiding == []


def test_paths_hold_a_complete_configuration():
    for candidate, workload in goldens.configurations():
        values = flatten(candidate, workload)
        assert candidate_of(values) == candidate
        assert set(values) <= all_paths()


def test_the_document_shows_the_settings_of_each_format():
    assert table() in (ROOT / "docs" / "frameworks" / "README.md").read_text(encoding="utf-8")


def forgetful(*forgotten):
    """Megatron-LM's recipe as if these fields had been forgotten: a knob added later."""
    whole = recipe("megatron")
    kept = tuple(setting for setting in whole.settings if not set(setting.paths) & set(forgotten))
    return Recipe(**{**{f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}, "settings": kept})


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("layout.cp_method", "the configuration has ulysses, but these files set all_gather"),
        ("workload.optimizer.lr", f"the configuration has {WORKLOAD.optimizer.lr}, but these files set nothing"),
    ],
)
def test_an_unhandled_field_is_refused_and_not_dropped(path, message, monkeypatch):
    candidate = Candidate(layout=Layout(dp_replicate=2, cp=2, cp_method="ulysses"))
    made = audited(forgetful(path), candidate, WORKLOAD)
    (note,) = [note for note in made.notes if note.severity == "error"]
    assert (note.knob, note.message) == (path, message)
    monkeypatch.setattr(catalog, "recipe", lambda _: forgetful(path))
    with pytest.raises(ConfigError, match=path):
        export("megatron", candidate, WORKLOAD)


RESNET = Workload(model=ResNetModel(depth=18), data=ImageFolderData(), seq_length=1, global_batch_size=16)


def test_all_formats_at_once_with_reasons_for_those_that_cannot():
    made = export_all(Candidate(layout=Layout(pp=2, **V)), WORKLOAD)
    assert list(made) == FORMATS
    refused = {name for name, result in made.items() if isinstance(result, ConfigError)}
    assert refused == {"megatron", "deepspeed", "paddlenlp", "accelerate"}
    resnet = export_all(Candidate(), RESNET)
    assert {name for name, result in resnet.items() if not isinstance(result, ConfigError)} == {
        "accelerate",
        "deepspeed",
        "torchrun",
    }
    with pytest.raises(ConfigError, match=r"unknown format 'nemo'.*megatron, torchtitan"):
        export("nemo", Candidate(), WORKLOAD)


def test_user_modules_are_exported_where_their_code_is_called_and_programs_nowhere():
    module, script = (export_all(*configuration) for configuration in goldens.configurations()[-2:])
    exported = {name: result for name, result in module.items() if not isinstance(result, ConfigError)}
    assert set(exported) == {"accelerate", "deepspeed", "torchrun"}
    for result in exported.values():
        assert "built by your code: mine:build in /c" in [note.message for note in result.notes]
    for name, result in script.items():
        assert "own: custom knobs apply" in str(result) and "workload.model.script: a custom program" in str(result)
        assert isinstance(result, ConfigError), name


def test_torchtitan_reads_edited_values_and_refuses_another_file():
    ((file, text),) = export("torchtitan", Candidate(precision=O2), WORKLOAD).files.items()
    compile(text, file, "exec")
    changed = text.replace("global_batch_size=96", "global_batch_size=192")
    assert recipe("torchtitan").parse({file: changed}).values["workload.global_batch_size"] == 192
    with pytest.raises(ConfigError, match="cannot read"):
        recipe("torchtitan").parse({file: "def train():\n    return 3\n"})


@pytest.mark.slow
def test_the_exported_script_trains_on_two_ranks(tmp_path):
    workload = Workload(model=replace(MODEL, num_layers=2), data=WORKLOAD.data, seq_length=32, global_batch_size=4)
    made = export("torchrun", Candidate(layout=Layout(dp_replicate=2)), workload)
    for name, text in made.files.items():
        (tmp_path / name).write_text(text)
    bin_ = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run(["sh", str(tmp_path / "run.sh")], check=True, env=env, cwd="/", capture_output=True, timeout=150)
    report = from_json(RankReport, json.loads((tmp_path / "report.json").read_text()))
    assert report.world_size == 2
    assert len(report.losses) > 0


# ---- programs ----


KINDS = [*commands.FRAMEWORKS, *programs.COMMANDS]


@pytest.mark.parametrize("kind", KINDS)
def test_a_command_is_recognised_and_unchanged_by_its_own_candidate(kind):
    known, run = command(kind, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NPROC_PER_NODE": "2"})
    assert recognise(run) is known
    make_parser(known.log)
    candidate = as_it_stands(run, known.name, 8 if kind in commands.FRAMEWORKS else 2)
    parsed = known.read(run)
    request = replace(request_for(run, known.name, candidate), seed=None)
    if kind in programs.COMMANDS:
        total = 2 * candidate.micro_batch_size * (parsed.num_microbatches or 1)
        request = programs.request(known, run, candidate, total=total)
    laid = known.overlay(run, request)
    assert errors(laid) == set()
    assert differing(run_of(laid, run), known.name, candidate) == set()
    gone = [word for word in run.argv if word.startswith("--") and word not in laid.argv]
    assert set(gone) <= {"--nproc-per-node", "--num_gpus", "--config_file"}  # of launchers, which we take off
    if kind in commands.FRAMEWORKS:
        added = ("--trainer.devices=8",) if kind == "lightning" else ()  # which Lightning compares with its ranks
        placed = tuple(run.argv[at] if word.startswith("{") else word for at, word in enumerate(laid.argv))
        assert (placed, laid.env) == ((*run.argv, *added), {})
        assert all(text == run.files[file] for file, text in laid.files.items())


@pytest.mark.parametrize("name", [name for name in TRAININGS if name != "custom"])
def test_an_overlaid_command_reads_as_the_candidate_or_has_an_error(name):
    known, folder, count = training(name), programs.written(goldens.folder()), 0
    for _, run, request in goldens.requests(name)[:100]:
        laid = known.overlay(run, request)
        if errors(laid) or request.templated:
            continue
        count += 1
        again = run_of(laid, run)
        parsed = known.read(again)
        assert differing(again, name, request.candidate) == set()
        assert parsed.global_batch_size in (None, request.global_batch_size)
        assert parsed.num_microbatches in (None, request.num_microbatches)
        assert differing(run_of(known.trial_mode(laid, 9), run), name, request.candidate) == set()
    assert count > 5
    assert {file: (folder / file).read_text() for file in programs.FILES} == programs.FILES


@pytest.mark.parametrize("kind", ["accelerate", "transformers"])
@pytest.mark.parametrize(
    ("strategy", "stage"),
    [("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("2", 2), ("NO_SHARD", None), ("HYBRID_SHARD", None)],
)
def test_version_1_of_fsdp_shards_by_its_strategy(tmp_path, kind, strategy, stage):
    """Accelerate ignores ``FSDP_RESHARD_AFTER_FORWARD`` there, which its launcher always sets."""
    known, run = programs.program(kind, programs.written(tmp_path))
    launcher = f"accelerate launch --use_fsdp --num_processes 2 --fsdp_sharding_strategy {strategy}"
    run = replace(run, argv=(*launcher.split(), "loop.py" if kind == "accelerate" else "trainer.py"))
    parsed = known.read(run)
    assert parsed.values.get("layout.zero_stage") == stage
    assert (stage is None) == any("the configuration of fsdp" in note.message for note in parsed.notes)
    for wanted, name in ((2, "SHARD_GRAD_OP"), (3, "FULL_SHARD")):
        base = candidate_of(parsed.values)
        candidate = replace(base, layout=replace(base.layout, dp_shard=2, dp_replicate=1, zero_stage=wanted))
        laid = known.overlay(run, programs.request(known, run, candidate, named=["layout.zero_stage"]))
        assert "layout.zero_stage" not in programs.errors(laid)
        assert laid.env["FSDP_SHARDING_STRATEGY"] == (strategy if wanted == stage else name)
        assert known.read(run_of(laid, run)).values["layout.zero_stage"] == wanted


@pytest.mark.parametrize(("given", "expected"), [("8", "4"), ("auto", "auto")])
def test_the_trainer_and_its_launcher_agree_on_accumulation(tmp_path, given, expected):
    """Under DeepSpeed, the Trainer compares its argument with the launcher's variable."""
    known, run = programs.program("transformers", programs.written(tmp_path))
    launcher = f"accelerate launch --use_deepspeed --num_processes 2 --gradient_accumulation_steps {given} trainer.py"
    sizes = "--per_device_train_batch_size 1 --gradient_accumulation_steps 8"
    run = replace(run, argv=(*launcher.split(), *sizes.split()))
    base = candidate_of(known.read(run).values)
    candidate = replace(base, micro_batch_size=2, layout=replace(base.layout, dp_shard=2, dp_replicate=1))
    laid = known.overlay(run, programs.request(known, run, candidate))
    assert programs.errors(laid) == {}
    assert laid.argv[laid.argv.index("--gradient_accumulation_steps") + 1] == "4"
    assert laid.env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == expected


def with_layout(**changes):
    return lambda base: commands.canonical(replace(base, layout=replace(base.layout, **changes)))


SPLITTING = {  # a command with experts split over two ranks, the option for it, and a layout that its framework refuses
    "megatron": (
        {"more": ["--num-experts", "8", "--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"]},
        "--expert-model-parallel-size {}",
        {"sequence_parallel": False, "ep": 4},
    ),
    "torchtitan": ({}, "--parallelism.expert_parallel_degree {}", {"dp_replicate": 4, "dp_shard": 1, "ep": 4}),
    "mindformers": ({}, "expert_parallel: {}", {"ep": 4}),
    "paddlenlp": ({"more": ["--expert_parallel_degree=2"]}, "--expert_parallel_degree={}", {"ep": 8}),
}


def splitting(name):
    """The command of a framework with a model whose experts are split over two ranks."""
    given, spelling, refused = SPLITTING[name]
    more, files = list(given.get("more", ())), {}
    if name == "torchtitan":
        more = spelling.format(2).split()
    elif name == "mindformers":
        known = "parallel_config:\n"
        text = commands.MINDFORMERS_CONFIG.replace(known, f"{known}  expert_parallel: 2\n")
        text = text.replace("  model_config:\n", "  model_config:\n    type: LlamaConfig\n")
        files = {"config": f"{text}moe_config:\n  expert_num: 8\n  use_gmm: True\n"}
    elif name == "paddlenlp":
        files = {"model_config": json.dumps({"model_type": "deepseek_v2", "n_routed_experts": 8})}
    run = commands.program(name, files=files)
    at = next((at for at, word in enumerate(run.argv) if word.startswith("activation")), len(run.argv))
    return replace(run, argv=(*run.argv[:at], *more, *run.argv[at:])), spelling, refused


@pytest.mark.parametrize("name", SPLITTING)
def test_the_degree_that_splits_experts_is_read_from_commands_and_changed_in_them(name):
    known, (run, spelling, refused) = training(name), splitting(name)
    base = as_it_stands(run, name)
    assert base.layout.ep == 2
    for degree in (1, 2):
        candidate = with_layout(ep=degree)(base)
        laid = known.overlay(run, request_for(run, name, candidate))
        assert errors(laid) == set()
        text = " ".join((*laid.argv, *laid.files.values()))
        assert spelling.format(degree) in text
        assert differing(run_of(laid, run), name, candidate) == set()
    assert "layout.ep" in errors(known.overlay(run, request_for(run, name, with_layout(**refused)(base))))


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("megatron", ("--save", "--load", "--tensorboard-dir", "--profile ", "--exit-duration-in-mins")),
        ("torchtitan", ("--checkpoint.enable", "--metrics.enable_wandb")),
        ("lightning", ("--trainer.max_epochs=3",)),
        ("mindformers", ("CheckpointMonitor", "/ckpt", "--log_dir=msrun_log")),
        ("paddlenlp", ("./checkpoints", '"do_eval": true', '"warmup_ratio": 0.01')),
    ],
)
def test_a_trial_leaves_nothing_behind(name, gone):
    known, run = command(name)
    laid = known.trial_mode(known.overlay(run, request_for(run, name, as_it_stands(run, name))), 12)
    text = " ".join((*laid.argv, *laid.files.values()))
    assert [words for words in gone if words in text] == []


def test_files_of_a_lightning_script_go_into_the_trial_folder():
    laid = training("lightning").trial_mode(Overlay(argv=("python", "fit.py", "--bs", "4"), env={"A": "1"}), 9)
    assert laid.argv == ("python", "fit.py", "--bs", "4")
    assert laid.env == {"A": "1", "PL_TRAINER_DEFAULT_ROOT_DIR": "{out}"}


def test_a_step_limit_moves_only_where_it_comes_too_early():
    for limit, kept in ((10, "16"), (1000, "1000")):
        known, run = command("transformers", ("--max_steps", str(limit), "--resume_from_checkpoint", "x"))
        laid = known.overlay(run, programs.request(known, run, Candidate(layout=Layout(dp_replicate=2))))
        trial = known.trial_mode(laid, 16)
        assert trial.argv[trial.argv.index("--max_steps") + 1] == kept
        assert "--resume_from_checkpoint" not in trial.argv
        assert any(note.knob == "workload" for note in trial.notes) == (kept == "16")


def test_a_configuration_function_of_torchtitan_is_read_without_being_run():
    parsed = settings_of(commands.TITAN_CONFIG, "mine")
    assert (parsed["training.local_batch_size"], parsed["training.seq_len"], parsed["model_spec"]) == (2, 128, "mine")
    assert (parsed["activation_checkpoint"], parsed["compile.enable"]) == ("full", True)
    branch = "def f():\n    c = Trainer.Config()\n    if x:\n        c.training.steps = 3\n    return c\n"
    assert settings_of(branch, "f") == {"training.steps": "unknown"}
    assert settings_of("def f(:", "f") is None


def test_megatron_gets_the_hardware_queue_that_it_insists_on(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    known, run = command("megatron")
    request = request_for(run, "megatron", as_it_stands(run, "megatron"))
    assert known.overlay(run, request).env == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    sharded = with_layout(pp=1, num_virtual_stages=1, zero_stage=3)(request.candidate)
    _, other = command("megatron", env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    laid = known.overlay(other, request_for(other, "megatron", sharded))
    assert any("above 1 or unset" in note.message for note in laid.notes)


# ---- a framework is one file and one line ----

TINY = '''
"""Tiny: ``tiny.json``, read by its program, too."""

import json

from orchestrator.frameworks.custom import TRAINING as CUSTOM
from orchestrator.frameworks.spelling import Recipe, flatten, lacking, option
from dataclasses import replace
from trials.spec import Candidate
from tests.orchestrator.frameworks.configurations import WORKLOAD

HAS = ("layout.tp", "micro_batch_size")
RECIPE = Recipe(
    name="tiny",
    title="Tiny",
    settings=(
        *(option(path, path) for path in HAS),
        *(lacking(path, "not in Tiny", severity="error") for path in flatten(Candidate(), WORKLOAD) if path not in HAS),
    ),
    render=lambda draft: {"tiny.json": json.dumps(draft.settings)},
    load=lambda files: json.loads(files["tiny.json"]),
    command=lambda draft: "tiny train",
)
TRAINING = replace(CUSTOM, name="tiny", title="Tiny", recognises=lambda run: run.argv[0] == "tiny")
'''


def test_a_framework_is_added_by_one_file_and_one_line_of_the_catalog(tmp_path, monkeypatch):
    (tmp_path / "tiny.py").write_text(TINY)
    monkeypatch.setattr(orchestrator.frameworks, "__path__", [*orchestrator.frameworks.__path__, str(tmp_path)])
    monkeypatch.setattr(catalog, "FRAMEWORKS", (catalog.Framework("tiny"), *catalog.FRAMEWORKS))
    monkeypatch.delitem(sys.modules, "orchestrator.frameworks.tiny", raising=False)
    made = export("tiny", Candidate(layout=Layout(tp=2)), WORKLOAD, allow_lossy=True)
    assert json.loads(made.files["tiny.json"]) == {"layout.tp": 2, "micro_batch_size": 1}
    assert formats() == ["tiny", *FORMATS] and trainings() == ["tiny", *TRAININGS]
    with pytest.raises(ConfigError, match=r"precision\.dtype: not in Tiny"):
        export("tiny", Candidate(precision=O1), WORKLOAD)
    run = replace(command("megatron")[1], argv=("tiny", "train"))
    assert recognise(run) is training("tiny")
