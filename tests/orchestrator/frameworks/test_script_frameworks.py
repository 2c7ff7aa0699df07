"""torchtitan, DeepSpeed, Accelerate and our own runner: exports say what was asked for, or say that they do not."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from orchestrator.errors import ConfigError
from orchestrator.frameworks.catalog import export, recipe
from orchestrator.frameworks.spelling import audited, differences, flatten, is_at_or_below
from tests.orchestrator.frameworks.all_fields import all_paths, handled
from tests.orchestrator.frameworks.configurations import MODEL, WORKLOAD, configurations, errors, random_configuration
from tests.orchestrator.space.candidate_strategies import SEEDS
from trials.files import from_json
from trials.outcome import RankReport
from trials.spec import (
    Candidate,
    ImageFolderData,
    Kernels,
    Layout,
    Loader,
    LossScale,
    Precision,
    Recompute,
    ResNetModel,
    Workload,
)

FORMATS = ("torchtitan", "deepspeed", "accelerate", "torchrun")
O2 = Precision(level="O2", dtype="bfloat16")
ALL = Recompute(full=((MODEL.num_layers,),))


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=60, deadline=None)
@given(rng=SEEDS)
def test_what_reads_back_differently_has_a_note_of_the_recipes_own(name, rng):
    candidate, workload = random_configuration(rng)
    made = recipe(name).export(candidate, workload)
    assert audited(recipe(name), candidate, workload).notes == made.notes
    said = recipe(name).parse(made.files)
    changed = differences(flatten(candidate, workload), said.values)
    if not any(not path.startswith("workload.") for path in changed):
        assert said.candidate == candidate


@pytest.mark.parametrize("name", FORMATS)
def test_every_field_is_spoken_for(name):
    spoken_for = handled(recipe(name))
    assert [path for path in sorted(all_paths()) if not any(is_at_or_below(path, part) for part in spoken_for)] == []


@pytest.mark.parametrize("name", FORMATS)
def test_names_a_recipe_may_write_are_all_it_writes(name):
    declared = {name for setting in recipe(name).settings for name in setting.names}
    for candidate, workload in configurations(60):
        made = recipe(name).export(candidate, workload)
        assert set(recipe(name).load(made.files)) <= declared


def test_torchtitan_says_a_pipeline_of_uneven_stages_in_v_order():
    layout = Layout(
        pp=2,
        dp_shard=2,
        zero_stage=3,
        gradient_reduction="last",
        shard_embedding=True,
        tp=2,
        sequence_parallel=True,
        schedule="zbv",
        num_virtual_stages=2,
        stage_layers=((1, 2), (3, 2)),
    )
    candidate = Candidate(
        layout=layout, micro_batch_size=2, precision=O2, loader=Loader(num_workers=2, prefetch_factor=4)
    )
    made = export("torchtitan", candidate, WORKLOAD)
    assert [note.knob for note in made.notes] == ["workload.data"]
    said = recipe("torchtitan").load(made.files)
    assert said["parallelism.module_fqns_per_model_part"] == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "layers.4"],
        ["layers.5", "layers.6", "layers.7", "norm", "lm_head"],
    ]
    assert said["training.local_batch_size"] == 48  # a step's micro-batches together
    assert said["parallelism.pipeline_parallel_microbatch_size"] == 2
    assert recipe("torchtitan").parse(made.files).candidate == candidate


def test_torchtitan_reads_values_that_somebody_changed_and_refuses_another_file():
    made = export("torchtitan", Candidate(precision=O2), WORKLOAD)
    (text,) = made.files.values()
    compile(text, "tune_cluster_recipe.py", "exec")
    changed = text.replace("global_batch_size=96", "global_batch_size=192")
    assert recipe("torchtitan").parse({next(iter(made.files)): changed}).values["workload.global_batch_size"] == 192
    with pytest.raises(ConfigError, match="cannot be read"):
        recipe("torchtitan").parse({next(iter(made.files)): "def train():\n    return 3\n"})


@pytest.mark.parametrize(
    ("name", "candidate", "refused"),
    [
        ("deepspeed", Candidate(layout=Layout(tp=2, sequence_parallel=True)), {"layout.sequence_parallel"}),
        ("deepspeed", Candidate(layout=Layout(cp=2)), {"layout.cp_method"}),
        ("accelerate", Candidate(layout=Layout(tp=2)), {"layout.tp"}),
        ("accelerate", Candidate(precision=O2), {"precision.level"}),
        ("torchtitan", Candidate(precision=replace(O2, level="O1")), {"precision.level"}),
        ("torchtitan", Candidate(layout=Layout(cp=2, cp_method="ulysses")), {"layout.cp_method"}),
        ("torchtitan", Candidate(precision=replace(O2, dtype="float16", loss_scale=LossScale())), {"precision"}),
        ("torchtitan", Candidate(kernels=Kernels(compile="block", backend="cudagraphs")), {"kernels.backend"}),
    ],
)
def test_what_would_train_otherwise_is_refused_unless_allowed(name, candidate, refused):
    with pytest.raises(ConfigError) as refusal:
        export(name, candidate, WORKLOAD)
    made = export(name, candidate, WORKLOAD, allow_lossy=True)
    assert refused <= errors(made)
    for knob in refused:
        assert knob in str(refusal.value)


@pytest.mark.parametrize("name", ["accelerate", "torchtitan"])
def test_recompute_of_some_layers_becomes_that_of_all(name):
    made = export(name, Candidate(recompute=Recompute(full=((3,),))), WORKLOAD)
    assert "recompute.full" in {note.knob for note in made.notes}
    assert recipe(name).parse(made.files).candidate.recompute == ALL


def test_every_reason_is_told_at_once():
    layout = Layout(pp=2, schedule="gpipe", stage_layers=((4, 4),))
    candidate = Candidate(layout=layout, precision=replace(O2, level="O1", white=("softmax",)))
    with pytest.raises(ConfigError) as refusal:
        export("deepspeed", candidate, WORKLOAD)
    for words in ("layout.pp: a pipeline is code", "layout.schedule: ", "precision.white: ", "--allow-lossy"):
        assert words in str(refusal.value)


def test_a_model_of_another_kind_is_left_to_the_script_or_refused():
    workload = Workload(model=ResNetModel(depth=18), data=ImageFolderData(), seq_length=1, global_batch_size=16)
    assert {note.knob for note in export("deepspeed", Candidate(), workload).notes} >= {"workload.model"}
    assert "model.json" not in export("accelerate", Candidate(), workload).files
    with pytest.raises(ConfigError, match="no model like this resnet"):
        export("torchtitan", Candidate(), workload)


def test_torchrun_loses_nothing():
    for candidate, workload in configurations(30, seed=3):
        made = export("torchrun", candidate, workload)
        assert made.notes == ()
        said = recipe("torchrun").parse(made.files)
        assert said.values == flatten(candidate, workload)


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
