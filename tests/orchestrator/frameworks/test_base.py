"""What keeps a recipe from losing anything: paths of all fields, reading every export back, and the documents."""

import dataclasses

import pytest
from hypothesis import given, settings

from orchestrator.errors import ConfigError
from orchestrator.frameworks import catalog
from orchestrator.frameworks.catalog import export, export_all, formats, recipe
from orchestrator.frameworks.spelling import Recipe, audited, candidate_of, flatten
from tests.orchestrator.frameworks.all_fields import all_paths
from tests.orchestrator.frameworks.configurations import WORKLOAD
from tests.orchestrator.frameworks.matrix import table
from tests.orchestrator.space.candidate_strategies import CANDIDATES, OTHER_WORKLOADS, WORKLOADS
from tests.support import ROOT
from trials.spec import (
    Candidate,
    Layout,
    Loader,
    ModuleFacts,
    Offload,
    OwnChoice,
    Precision,
    PythonData,
    PythonModel,
    ScriptData,
    ScriptModel,
    Workload,
)


@settings(max_examples=50, deadline=None)
@given(candidate=CANDIDATES, workload=WORKLOADS | OTHER_WORKLOADS)
def test_paths_hold_a_configuration_whole(candidate, workload):
    values = flatten(candidate, workload)
    assert candidate_of(values) == candidate
    assert set(values) <= all_paths()


def test_every_field_has_its_path():
    paths = all_paths()
    for prefix, cls in (("", Candidate), ("layout.", Layout), ("loader.", Loader), ("precision.", Precision)):
        for field in dataclasses.fields(cls):
            path = prefix + field.name
            assert path in paths or any(other.startswith(path + ".") for other in paths), path
    for field in dataclasses.fields(Workload):
        path = f"workload.{field.name}"
        assert path in paths or any(other.startswith(path + ".") for other in paths), path


def forgetful(*forgotten):
    """Megatron-LM's recipe as if these fields had been forgotten: a knob added later."""
    whole = recipe("megatron")
    kept = tuple(setting for setting in whole.settings if not set(setting.paths) & set(forgotten))
    return Recipe(**{**{f.name: getattr(whole, f.name) for f in dataclasses.fields(whole)}, "settings": kept})


def test_a_forgotten_knob_is_refused_and_not_dropped(monkeypatch):
    candidate = Candidate(layout=Layout(dp_replicate=2, cp=2, cp_method="ulysses"))
    notes = audited(forgetful("layout.cp_method"), candidate, WORKLOAD).notes
    (note,) = [note for note in notes if note.severity == "error"]
    assert (note.knob, note.message) == ("layout.cp_method", "asked for ulysses, but these files say all_gather")
    monkeypatch.setattr(catalog, "recipe", lambda _: forgetful("layout.cp_method"))
    with pytest.raises(ConfigError, match=r"layout\.cp_method: asked for ulysses"):
        export("megatron", candidate, WORKLOAD)


def test_a_forgotten_field_of_the_workload_is_refused_too():
    notes = audited(forgetful("workload.optimizer.lr"), Candidate(), WORKLOAD).notes
    (note,) = [note for note in notes if note.severity == "error"]
    assert (note.knob, note.message) == (
        "workload.optimizer.lr",
        f"asked for {WORKLOAD.optimizer.lr}, but these files say nothing",
    )


def test_all_formats_at_once_with_reasons_for_those_that_cannot():
    candidate = Candidate(layout=Layout(pp=2, schedule="zbv", num_virtual_stages=2, stage_layers=((2, 2), (2, 2))))
    made = export_all(candidate, WORKLOAD)
    assert list(made) == formats()
    refused = {name for name, result in made.items() if isinstance(result, ConfigError)}
    assert refused == {"megatron", "deepspeed", "paddlenlp", "accelerate"}
    assert "layout.schedule: Megatron-LM has no zero-bubble schedule" in str(made["megatron"])


def test_modules_of_the_users_own_go_where_their_code_is_called():
    facts = ModuleFacts(num_layers=4)
    model = PythonModel(model="mine:build", loss="mine:loss", layers="blocks", cwd="/code", facts=facts)
    workload = dataclasses.replace(WORKLOAD, model=model, data=PythonData(dataset="mine:data", cwd="/code"))
    made = export_all(Candidate(layout=Layout(dp_replicate=2)), workload)
    exported = {name: result for name, result in made.items() if not isinstance(result, ConfigError)}
    assert set(exported) == {"accelerate", "deepspeed", "torchrun"}
    for result in exported.values():
        assert "your own code builds it: mine:build in /code" in [note.message for note in result.notes]


def test_no_format_takes_programs_of_the_users_own():
    model = ScriptModel(recipe="transformers", run=("python", "train.py"), cwd="/")
    workload = dataclasses.replace(WORKLOAD, model=model, data=ScriptData())
    candidate = Candidate(own=(OwnChoice(name="--optim", value="adafactor"),))
    for name, result in export_all(candidate, workload).items():
        assert isinstance(result, ConfigError), name
        assert "own: knobs of one's own belong" in str(result) and "workload.model.script: the program" in str(result)


def test_an_unknown_format_is_answered_with_those_there_are():
    with pytest.raises(ConfigError, match=r"no format called 'nemo'.*megatron, torchtitan"):
        export("nemo", Candidate(), WORKLOAD)


def test_the_document_shows_what_each_format_has_a_setting_for():
    assert table() in (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


ELSEWHERE = sorted(set(formats()) - {"torchrun"})


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_not_the_same_elsewhere_is_refused(name):
    """Neither approximated nor left out in silence: 8-bit floats everywhere, and what is offloaded in other ways."""
    fp8 = Candidate(precision=Precision(level="O1-fp8", dtype="bfloat16"))
    refused = {note.knob: note for note in recipe(name).export(fp8, WORKLOAD).notes if note.severity == "error"}
    assert set(refused) == {"precision.level"}
    sharded = Layout(dp_shard=2, zero_stage=2)
    both = Candidate(layout=sharded, offload=Offload(activations=True, optimizer=True))
    refused = {note.knob: note for note in recipe(name).export(both, WORKLOAD).notes if note.severity == "error"}
    taken = {"deepspeed": {"offload.optimizer"}}.get(name, set())
    assert set(refused) == {"offload.activations", "offload.optimizer"} - taken
    others = {knob for knob, note in refused.items() if note.message != "there is no such setting"}
    lacking = {"mindformers": {"offload.activations", "offload.optimizer"}, "torchtitan": {"offload.activations"}}
    assert others == set(refused) - lacking.get(name, set()), "what there is has to be named"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_rings_are_rings_or_refused(name):
    candidate = Candidate(layout=Layout(cp=2, cp_method="ring", dp_shard=2, zero_stage=3))
    made = recipe(name).export(candidate, WORKLOAD)
    is_refused = any(note.knob == "layout.cp_method" and note.severity == "error" for note in made.notes)
    said = recipe(name).parse(made.files).values.get("layout.cp_method", "all_gather")
    assert (said == "ring") != is_refused
    assert is_refused == (name not in ("megatron", "paddlenlp"))
    if name == "megatron":
        assert any("--cp-comm-type p2p" in text for text in made.files.values())
