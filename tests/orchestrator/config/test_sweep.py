"""SweepSpec: what a good file means, its hash, its schema and its documentation."""

import dataclasses
import functools
import json
import re

import jsonschema
import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from cluster.base import Deadlines
from orchestrator.config.schema import DOCS_FILE, SCHEMA_FILE, schema_text, sweep_schema, with_table
from orchestrator.config.settings import DeadlinesSection, MeasureSection
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.config.workload import (
    ImageFolderSection,
    LinearSection,
    LlamaSection,
    OptimizerSection,
    ResNetSection,
    TextSection,
    TokenFileSection,
)
from orchestrator.errors import ConfigError
from orchestrator.planning.planner import make_plan
from orchestrator.space.file_types import ALL_LAYERS, LossScaleSection, RecomputeChoice, RecomputeValue, StageSplit
from tests.support import ROOT
from tests.support.sweep_files import (
    FULL,
    INSIDE,
    LINEAR,
    OWN_MODULE,
    RESNET,
    SCRIPT,
    SIMULATED,
    SMALL,
    TOKENS,
    changed,
    topology,
    write,
)
from trials.spec import (
    AdamW,
    ImageFolderData,
    Kernels,
    Layout,
    LinearModel,
    LlamaModel,
    Loader,
    LoaderTuning,
    LossScale,
    Precision,
    Protocol,
    RandomData,
    Recompute,
    ResNetModel,
    SelectiveRecompute,
    TextData,
    TokenFileData,
    gather_pattern,
)

QUICKSTART = ROOT / "configs/sweeps/quickstart.yaml"
SHIPPED = sorted((ROOT / "configs/sweeps").glob("*.yaml"))
VERIFIED = {
    "name": "verified",
    "confirm": {"promoted": {"own": [1.0], "baseline": [1.0], "tolerance": 0.05, "hardware": {"gpu": "H100"}}},
}
"""What `verify` writes into the sweep file of a verification."""
LLAMA = SMALL["workload"]["model"]
EXPERTS = {
    "num_experts": 8,
    "top_k": 2,
    "ffn_hidden_size": 64,
    "shared_ffn_hidden_size": 32,
    "num_dense_layers": 1,
    "scores": "sigmoid",
    "normalizes": False,
    "balance_rate": 0.01,
    "aux_loss": 1e-4,
    "z_loss": 1e-3,
    "capacity": 1.25,
    "routing": "balanced",
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6}
DEEPSEEK = {**LLAMA, "num_kv_heads": LLAMA["num_heads"], "experts": EXPERTS, "latent": LATENT}
MIXTURE = {"name": "mixture", "workload": {**SMALL["workload"], "model": DEEPSEEK}}
EVERY_KEY = (MIXTURE, VERIFIED, FULL, RESNET, LINEAR, TOKENS, SIMULATED, SCRIPT, OWN_MODULE, INSIDE)


def test_every_key_of_experts_and_latent_attention_arrives(tmp_path):
    model = load_sweep(write(tmp_path, {**SMALL, **MIXTURE})).to_workload().model
    assert dataclasses.asdict(model.experts) == EXPERTS and dataclasses.asdict(model.latent) == LATENT


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("latent.qk_rope_head_dim", {"latent": {**LATENT, "qk_rope_head_dim": 3}}),
        ("latent.v_head_dim", {"latent": {**LATENT, "v_head_dim": 7}}),
        ("num_kv_heads", {"num_kv_heads": 1}),
    ],
)
def test_latent_attention_that_does_not_fit_is_refused(tmp_path, key, changes):
    workload = {**MIXTURE["workload"], "model": {**DEEPSEEK, **changes}}
    with pytest.raises(ConfigError, match=key):
        load_sweep(write(tmp_path, {**SMALL, "workload": workload}))


@pytest.mark.parametrize(("key", "value"), [("top_k", 9), ("num_dense_layers", 99)])
def test_experts_that_do_not_fit_the_model_are_refused(tmp_path, key, value):
    workload = {**MIXTURE["workload"], "model": {**LLAMA, "experts": {**EXPERTS, key: value}}}
    with pytest.raises(ConfigError, match=f"experts.{key}"):
        load_sweep(write(tmp_path, {**SMALL, "workload": workload}))


def test_every_key_arrives(tmp_path):
    spec = load_sweep(write(tmp_path, FULL))
    workload = spec.to_workload()
    assert workload.model.ffn_hidden_size == 96
    assert workload.data == TextData(path=str(tmp_path / "text.txt"), pattern="*.txt", lengths=(8, 32))
    assert workload.optimizer == AdamW(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-7, weight_decay=0.0, clip_norm=1.0)
    assert (workload.seq_length, workload.global_batch_size, workload.seed) == (32, 16, 3)
    assert spec.to_protocol() == Protocol(
        min_warmup_steps=1, max_warmup_steps=2, warmup_tolerance=0.5, num_steps=3, max_steps=4, max_relative_spread=0.2
    )
    assert spec.to_deadlines() == Deadlines(
        starting_s=10.0, warmup_s=20.0, measuring_s=30.0, stall_s=5.0, compile_s=60.0
    )
    assert (spec.cluster.device_memory_bytes, spec.budget.wall_time_s) == (2**31, 90.0)
    assert spec.choices["recompute"] == (
        RecomputeChoice(),
        RecomputeChoice(full=2),
        RecomputeChoice(full=ALL_LAYERS),
        RecomputeChoice(select=((r"feed_forward\.mul", ((2, 1),)),)),
    )
    assert spec.choices["stage_layers"][1:] == (
        StageSplit(kind="counts", rows=((3, 1),)),
        StageSplit(kind="offset", rows=((-1, 1),)),
    )
    assert spec.choices["precision"][1] == Precision(
        level="O1", dtype="float16", loss_scale=LossScale(initial=8.0, dynamic=False)
    )
    assert spec.filters.world_size == (1, 2, 4)
    baseline = spec.baseline_candidate
    assert baseline.layout == Layout(pp=2, schedule="interleaved", num_virtual_stages=2, stage_layers=((2, 0), (1, 1)))
    assert baseline.recompute == Recompute(
        full=((1, 0), (1, 1)),
        selective=(SelectiveRecompute(pattern=r"feed_forward\.mul", num_layers=((2, 0), (0, 0))),),
    )
    assert (baseline.precision.white, baseline.precision.black) == (("softmax",), ("linear",))
    assert baseline.loader == Loader(
        pin_memory=True,
        persistent_workers=True,
        full_batch=True,
        tuning=LoaderTuning(tuning_steps=100, max_workers=4),
    )
    assert baseline.kernels == Kernels(attention="efficient", matmul_precision="high")


@pytest.mark.parametrize(
    ("content", "model", "data"),
    [
        (RESNET, ResNetModel(depth=18, num_classes=10, image_size=32, width=8), ImageFolderData),
        (LINEAR, LinearModel(num_layers=3, size=64), RandomData),
        (TOKENS, LlamaModel(**{k: v for k, v in SMALL["workload"]["model"].items() if k != "kind"}), TokenFileData),
    ],
    ids=["resnet", "linear", "tokens"],
)
def test_kinds_of_workloads(tmp_path, content, model, data):
    workload = load_sweep(write(tmp_path, content)).to_workload()
    assert workload.model == model
    assert isinstance(workload.data, data)
    assert getattr(workload.data, "path", str(tmp_path)).startswith(str(tmp_path))
    assert workload.seq_length == (32 if isinstance(model, LlamaModel) else 1)


def test_the_kind_of_data_follows_from_the_model(tmp_path):
    for content, data in ((RESNET, ImageFolderData()), (LINEAR, RandomData()), (SMALL, TextData())):
        bare = changed(content, ("workload", "data"), {})
        assert load_sweep(write(tmp_path, bare)).to_workload().data == data
        del bare["workload"]["data"]
        assert load_sweep(write(tmp_path, bare)).to_workload().data == data


def test_kernels_for_convolutions(tmp_path):
    plan = make_plan(load_sweep(write(tmp_path, RESNET)))
    assert len(plan.candidates) == 6
    assert {c.kernels.cudnn_tuning_range for c in plan.candidates} == {(), (1, 4)}


def test_defaults_are_those_of_the_trial(tmp_path):
    spec = load_sweep(write(tmp_path, SMALL))
    assert spec.to_protocol() == Protocol()
    assert spec.to_deadlines() == Deadlines()
    assert spec.to_workload().optimizer == AdamW()
    assert spec.to_workload().data == TextData()
    assert spec.runner == "trials.worker:run_rank"


@pytest.mark.parametrize(
    ("section", "cls"),
    [
        (LlamaSection, LlamaModel),
        (ResNetSection, ResNetModel),
        (LinearSection, LinearModel),
        (TextSection, TextData),
        (TokenFileSection, TokenFileData),
        (ImageFolderSection, ImageFolderData),
        (OptimizerSection, AdamW),
        (MeasureSection, Protocol),
        (DeadlinesSection, Deadlines),
        (LossScaleSection, LossScale),
    ],
)
def test_sections_match_the_fields_and_defaults_of_their_types(section, cls):
    ours = {name: field.default for name, field in section.model_fields.items() if name not in ("kind", "placing_s")}
    theirs = {field.name: field.default for field in dataclasses.fields(cls)}
    if "clip_norm" in ours:  # null, as keys without a value are not part of a sweep's identity
        ours["clip_norm"] = ours["clip_norm"] or 0.0
    if "lengths" in ours:
        ours["lengths"] = ours["lengths"] or ()
    assert ours.keys() == theirs.keys()
    assert {name: value for name, value in theirs.items() if value is not dataclasses.MISSING} == {
        name: ours[name] for name, value in theirs.items() if value is not dataclasses.MISSING
    }


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({r"attention\.w[qk]": "all"}, {"attention": "all"}),
        ({"feed_forward.w1": [4, 0], "feed_forward.w3": [4, 0]}, {"feed_forward": [4, 0]}),
        ({".*": 3}, {"attention": 3, "feed_forward": 3}),
        ({"attention": "all", "feed_forward": 0}, {"attention": "all"}),
        ({"wq": 1}, "matches no module that reads gathered sequences"),
        ({"(": 1}, "invalid regular expression"),
        ({"attention.wq": 1, "attention.wk": 2}, "different layer counts for projections in attention"),
    ],
)
def test_gathers_are_selected_by_their_consumer(written, read):
    adapter = TypeAdapter(RecomputeValue)
    if isinstance(read, str):
        with pytest.raises(ValidationError, match=read):
            adapter.validate_python({"communication": written})
        return
    choice = adapter.validate_python({"communication": written})
    assert choice.communication == 0
    assert adapter.dump_python(choice) == {"communication": read}
    assert adapter.validate_python({"communication": read}) == choice


def test_gathers_are_not_selected_twice():
    with pytest.raises(ValidationError, match="also selected by communication"):
        twice = {"communication": {"attention": 1}, "select": {gather_pattern("attention"): 2}}
        TypeAdapter(RecomputeValue).validate_python(twice)


@pytest.mark.parametrize("content", [FULL, SMALL, RESNET, LINEAR, TOKENS], ids=lambda content: content["name"])
def test_json_round_trip(tmp_path, content):
    spec = load_sweep(write(tmp_path, content))
    again = SweepSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert again.spec_hash == spec.spec_hash
    assert again.to_workload() == spec.to_workload()
    assert again.baseline_candidate == spec.baseline_candidate
    assert make_plan(again) == make_plan(spec)


def test_the_stored_form_does_not_need_the_training_text(tmp_path):
    spec = load_sweep(write(tmp_path, FULL))
    (tmp_path / "text.txt").unlink()
    assert SweepSpec.from_json(spec.to_json()) == spec


def test_the_hash_depends_on_meaning_only(tmp_path):
    spec = load_sweep(write(tmp_path, SMALL))
    reordered = dict(reversed(SMALL.items()))
    spelt_out = {**reordered, "runner": "trials.worker:run_rank", "baseline": {"recompute": "none"}}
    same = load_sweep(write(tmp_path, "# a comment\n" + yaml.safe_dump(spelt_out)))
    other = load_sweep(write(tmp_path, changed(SMALL, ("workload", "seq_length"), 64)))
    assert same.spec_hash == spec.spec_hash and same == spec and hash(same) == hash(spec)
    assert other.spec_hash != spec.spec_hash and other != spec
    longer = load_sweep(write(tmp_path, {**SMALL, "budget": {"max_trials": 99}, "search": {"patience": 7}}))
    assert longer.spec_hash == spec.spec_hash and longer != spec, "the budget may change"


def test_the_model_may_stand_in_a_file_of_its_own(tmp_path):
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(SMALL["workload"]["model"]))
    inline = load_sweep(write(tmp_path, SMALL))
    by_path = load_sweep(write(tmp_path, changed(SMALL, ("workload", "model"), "model.yaml")))
    assert by_path == inline


def test_a_folder_of_text_is_searched_as_the_runner_does(tmp_path):
    (tmp_path / "corpus" / "site-packages").mkdir(parents=True)
    (tmp_path / "corpus" / "site-packages" / "a.py").write_text("x" * 100)
    content = changed(SMALL, ("workload", "data"), {"path": "corpus"})
    with pytest.raises(ConfigError, match="found 0"):
        load_sweep(write(tmp_path, content))
    (tmp_path / "corpus" / "b.py").write_text("x" * 33)
    assert load_sweep(write(tmp_path, content)).to_workload().data.path == str(tmp_path / "corpus")


def lengths_of(tmp_path, lengths, **data):
    content = changed(SMALL, ("workload", "data"), {"kind": "text", **data, "lengths": lengths})
    spec = load_sweep(write(tmp_path, content))
    assert SweepSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    return spec.to_workload().data.lengths


def test_lengths_come_from_a_list_percentiles_a_file_or_the_documents_of_a_token_file(tmp_path):
    assert lengths_of(tmp_path, [32, 4, 8]) == (4, 8, 32)
    found = lengths_of(tmp_path, {"p0": 0.5, "p50": 10, "p100": 30})
    assert len(found) == 100 and (found[0], found[49], found[50], found[-1]) == (1, 10, 10, 30)
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, range(1, 5001))))
    found = lengths_of(tmp_path, "lengths.txt")
    assert len(found) == 1000 and (found[0], found[-1]) == (3, 4998)
    (tmp_path / "documents.bin").write_bytes(bytes([5, 6, 2, 7, 2, *[8] * 40, 2, 9]))
    file = {"kind": "token_file", "path": "documents.bin", "dtype": "uint8"}
    assert lengths_of(tmp_path, {"end_token": 2}, **file) == (2, 3, 41)


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        ([0, 5], "expected a length"),
        ({"p10": 5, "p100": 8}, "must include p0 and p100"),
        ({"p0": 5, "p100": 2}, "must include p0 and p100"),
        ({"end_token": 2}, "requires a token file"),
        ("missing.txt", "cannot read"),
    ],
)
def test_lengths_that_are_no_distribution_are_refused(tmp_path, lengths, reason):
    with pytest.raises(ConfigError, match=reason):
        lengths_of(tmp_path, lengths)


def test_specs_cannot_be_changed(tmp_path):
    spec = load_sweep(write(tmp_path, SMALL))
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"
    with pytest.raises(ValueError, match="frozen"):
        spec.budget.max_trials = 3


def test_the_quickstart_has_the_documented_space():
    spec = load_sweep(QUICKSTART)
    plan = make_plan(spec, topology(2))
    assert len(plan.candidates) >= 40
    assert {candidate.layout.world_size for candidate in plan.candidates} == {2}
    assert plan.baseline.layout.dp_replicate == 2 and plan.baseline.micro_batch_size == 1
    assert plan.baseline.recompute.full == ((4,),) and plan.baseline.precision.level == "O0"
    assert spec.budget.max_trials == 12


def test_the_shipped_schema_is_up_to_date():
    assert (ROOT / SCHEMA_FILE).read_text() == schema_text(), "run python -m orchestrator.config.schema"


@functools.cache
def validator():
    """Checking the schema itself takes longer than all the files."""
    jsonschema.Draft202012Validator.check_schema(sweep_schema())
    return jsonschema.Draft202012Validator(sweep_schema())


@pytest.mark.parametrize(
    "content",
    [FULL, SMALL, RESNET, LINEAR, TOKENS, SIMULATED, *(yaml.safe_load(file.read_text()) for file in SHIPPED)],
    ids=lambda content: content["name"],
)
def test_the_schema_accepts_good_files(content):
    validator().validate(content)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("nonsense",), 1),
        (("name",), "a/b"),
        (("space", "tp"), []),
        (("space", "tp"), "2"),
        (("space", "recompute"), "half"),
        (("space", "forbid"), [{"no_such_knob": 1}]),
        (("baseline", "tp"), [1]),
        (("budget", "wall_time"), 600),
        (("workload", "seq_length"), 0),
    ],
)
def test_the_schema_refuses_bad_files(path, value):
    with pytest.raises(jsonschema.ValidationError):
        validator().validate(changed(FULL, path, value))


def test_shipped_files_name_their_schema():
    for file in SHIPPED:
        first = file.read_text().splitlines()[0]
        assert first.startswith("# yaml-language-server: $schema=")
        assert (file.parent / first.split("=")[1]).is_file()


def docs():
    return (ROOT / DOCS_FILE).read_text()


def test_the_documented_keys_are_up_to_date():
    assert docs() == with_table(docs()), "run python -m orchestrator.config.schema"


def keys(node):
    for key, value in node.items():
        yield key
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                yield from keys(item)


ALL_KEYS = {key for content in EVERY_KEY for key in keys(content)} - {
    r"feed_forward\.mul",
    "node0001",
    "crash",
    "MODE",
    "batch_size",
    "settings",
    "gpu",
    "--fused",
    "--dtype",
    *("values", "flag", "when"),  # docs/knobs.md#own
}


@pytest.mark.parametrize("key", sorted(ALL_KEYS))
def test_every_key_has_a_description(key):
    row = next(line for line in docs().splitlines() if re.match(rf"\| `([a-z_]+\.)*{re.escape(key)}` \|", line))
    assert all(cell.strip() for cell in row.strip("|").split("|"))


def test_full_has_every_key_of_the_models():
    documented = set(
        re.findall(r"^\| `(?:[a-z_]+\.)*([a-z_0-9]+)` \|", docs().partition("## All keys")[2], flags=re.MULTILINE)
    )
    assert documented == ALL_KEYS


def test_the_documented_example_loads(tmp_path):
    example = re.search(r"```yaml\n(.*?)```", docs(), flags=re.DOTALL).group(1)
    spec = load_sweep(write(tmp_path, example))
    assert len(make_plan(spec, topology(2)).candidates) > 20


def test_the_documented_richer_knobs_load(tmp_path):
    _, space, learn_from = re.findall(r"```yaml\n(.*?)```", docs().partition("## All keys")[0], flags=re.DOTALL)
    spec = load_sweep(write(tmp_path, {**SMALL, **yaml.safe_load(space)}))
    assert len(spec.choices["recompute"]) == 4
    assert spec.choices["recompute"][-1].select == (
        (gather_pattern("attention"), ALL_LAYERS),
        (gather_pattern("feed_forward"), 2),
    )
    assert spec.choices["compile"] == ("off", "block")
    own = {"params": {"batch_size": "micro_batch_size"}}
    found = yaml.safe_load(learn_from.replace("  search:", "search:"))["search"]["learn_from"]
    spec = load_sweep(write(tmp_path, {**SMALL, "search": {"learn_from": {**found, **own}}}))
    assert spec.search.learn_from is not None and spec.search.learn_from.unit == "tokens/s"


def test_the_documented_errors_are_the_actual_ones(tmp_path):
    bad, shown = re.search(r"```yaml\n([^`]*)```\n\ngives\n\n```text\n([^`]*)```\n$", docs()).groups()
    (tmp_path / "sweep.yaml").write_text(bad)
    with pytest.raises(ConfigError) as caught:
        load_sweep(tmp_path / "sweep.yaml")
    assert str(caught.value).replace(f"{tmp_path}/", "") + "\n" == shown
