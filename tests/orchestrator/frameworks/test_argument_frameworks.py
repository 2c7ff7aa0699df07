"""Megatron-LM, MindFormers and PaddleNLP: exports say what was asked for, or say that they do not."""

import random
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings

from orchestrator.errors import ConfigError
from orchestrator.frameworks.catalog import export, recipe
from orchestrator.frameworks.spelling import audited, differences, flatten, is_at_or_below
from orchestrator.space.space import canonical_part
from tests.orchestrator.frameworks import facts
from tests.orchestrator.frameworks.all_fields import all_paths, handled, parts
from tests.orchestrator.frameworks.configurations import MODEL, WORKLOAD, errors, random_workload
from tests.orchestrator.space.candidate_strategies import SEEDS, canonicalize, random_candidate
from trials.legality import violations
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
    SelectiveRecompute,
    Workload,
)

FORMATS = ("megatron", "mindformers", "paddlenlp")
SMALL = replace(MODEL, num_layers=4)
PRECISION = Precision(level="O2", dtype="float16", loss_scale=LossScale(initial=2.0**12, backoff_interval=1))


def drawn(rng):
    """A candidate of any kind, and a workload it is legal for."""
    while True:
        candidate = canonicalize(random_candidate(rng, fitting=True), SMALL)
        workload = replace(random_workload(rng), model=SMALL)
        if not list(violations(workload, candidate)):
            return candidate, workload


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(rng=SEEDS)
def test_what_reads_back_differently_has_a_note_of_the_recipes_own(name, rng):
    candidate, workload = drawn(rng)
    made = recipe(name).export(candidate, workload)
    assert audited(recipe(name), candidate, workload).notes == made.notes
    said = recipe(name).parse(made.files)
    changed = differences(flatten(candidate, workload), said.values)
    assert (repr(said.candidate) == repr(candidate)) == all(path.startswith("workload.") for path in changed)


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(rng=SEEDS)
def test_what_files_say_is_said_again_without_loss(name, rng):
    candidate, workload = drawn(rng)
    candidate = replace(candidate, loader=canonical_part(replace(candidate.loader, tuning=None)))
    made = recipe(name).export(candidate, workload)
    assume(not errors(made))
    said = recipe(name).parse(made.files).candidate
    again = recipe(name).parse(recipe(name).export(said, workload).files)
    assert repr(again.candidate) == repr(said)


@pytest.mark.parametrize("name", FORMATS)
def test_every_field_is_spoken_for_by_name(name):
    spoken_for = handled(recipe(name))
    assert [path for path in sorted(all_paths()) if not any(is_at_or_below(path, part) for part in spoken_for)] == []
    groups = {path.rpartition(".")[0] for path in all_paths()} - {"workload.data"}
    assert [part for part in spoken_for if part in groups - parts()] == []  # which would hide fields added later


@pytest.mark.parametrize("package", ["megatron-0.16", "megatron-0.19", "mindformers", "paddlenlp"])
def test_every_setting_written_is_one_that_the_package_has(package):
    known, name = facts.frozen(package), package.partition("-")[0]
    declared = {name for setting in recipe(name).settings for name in setting.names}
    rng, written = random.Random(2), {}
    for _ in range(80):
        said = dict(recipe(name).load(recipe(name).export(*drawn(rng)).files))
        assert set(said) <= declared
        said.pop("WORLD_SIZE", None)
        written |= said
        typed = {name: as_typed(value, known["settings"].get(name)) for name, value in said.items()}
        assert list(facts.problems(known, typed)) == []
    assert len(written) > 45


def as_typed(value, fact):
    """A word of a command line, or the words of a list, as the parser's type for it."""
    types = (fact or {}).get("types") or []
    if isinstance(value, list) and value and "list" not in types:
        return as_typed(value[0], fact)
    words = {"int": int, "float": float}.get(types[0] if types else None)
    return words(value) if words and isinstance(value, str) else value


LAYOUT = Layout(
    pp=2,
    dp_replicate=2,
    dp_shard=2,
    zero_stage=1,
    tp=2,
    tp_engine="local",
    sequence_parallel=True,
    schedule="interleaved",
    num_virtual_stages=2,
    stage_layers=((2, 2), (2, 2)),
)
ALL = ((2, 2), (2, 2))
LOADER = Loader(num_workers=2, prefetch_factor=2, persistent_workers=True, pin_memory=True)
CANDIDATE = Candidate(
    layout=LAYOUT,
    micro_batch_size=2,
    precision=PRECISION,
    recompute=Recompute(full=((1, 1), (1, 1)), communication=ALL),
    loader=LOADER,
    kernels=Kernels(attention="flash"),
)


def test_megatron_says_an_interleaved_pipeline_with_a_sharded_optimiser():
    made = export("megatron", CANDIDATE, WORKLOAD)
    assert {note.knob for note in made.notes} == {"workload.data", "workload.optimizer.weight_decay"}
    said = recipe("megatron").load(made.files)
    assert said["WORLD_SIZE"] == 16
    assert said["--num-virtual-stages-per-pipeline-rank"] == "2"
    assert said["--num-distributed-optimizer-instances"] == "2"
    assert said["--use-distributed-optimizer"] is said["--sequence-parallel"] is said["--fp16"] is True
    assert (said["--recompute-granularity"], said["--recompute-method"]) == ("full", "block")
    assert (said["--recompute-num-layers"], said["--initial-loss-scale"], said["--hysteresis"]) == ("1", "4096.0", "1")
    assert said["--padded-vocab-size"] == str(MODEL.vocab_size)
    assert recipe("megatron").parse(made.files).candidate == CANDIDATE


def test_megatron_says_uneven_stages_in_model_order():
    layout = replace(LAYOUT, stage_layers=((0, 3), (3, 2)))
    candidate = replace(CANDIDATE, layout=layout, recompute=Recompute(communication=layout.stage_layers))
    made = export("megatron", candidate, WORKLOAD)
    said = recipe("megatron").load(made.files)
    assert said["--pipeline-model-parallel-layout"] == "E|t*3|t*3|t*2L"
    assert recipe("megatron").parse(made.files).candidate == candidate


def test_megatron_recomputes_modules_in_all_layers():
    patterns = ("attention_norm", r"attention\.scaled_dot_product_attention", "feed_forward_norm")
    selective = tuple(SelectiveRecompute(pattern=pattern, num_layers=ALL) for pattern in sorted(patterns))
    candidate = replace(CANDIDATE, recompute=Recompute(selective=selective, communication=ALL))
    made = export("megatron", candidate, WORKLOAD)
    assert recipe("megatron").load(made.files)["--recompute-modules"] == ["core_attn", "layernorm"]
    assert recipe("megatron").parse(made.files).candidate == candidate
    some = replace(selective[0], num_layers=((1, 2), (2, 2)))
    with pytest.raises(ConfigError, match="in all layers of all stages"):
        export("megatron", replace(candidate, recompute=Recompute(selective=(some,), communication=ALL)), WORKLOAD)


def test_mindformers_says_recompute_by_chunk_stage_and_operator():
    select = SelectiveRecompute(pattern=r"feed_forward\.silu", num_layers=((2, 1), (0, 2)))
    recompute = Recompute(full=((1, 0), (0, 1)), selective=(select,), communication=((2, 2), (0, 0)))
    layout = replace(LAYOUT, stage_layers=((3, 1), (2, 2)), num_copies=2)
    candidate = replace(CANDIDATE, layout=layout, recompute=recompute, loader=replace(LOADER, pin_memory=False))
    candidate = replace(candidate, kernels=Kernels(compile="model", attention="flash"))
    made = export("mindformers", candidate, WORKLOAD)
    assert {note.knob for note in made.notes} == {"workload.data", "workload.optimizer.weight_decay"}
    said = recipe("mindformers").load(made.files)
    assert said["recompute_config.recompute"] == [[1, 0], [0, 1]]
    assert said["recompute_config.select_recompute"] == {r"feed_forward\.w1\.activation\.silu": [[2, 1], [0, 2]]}
    assert said["model.model_config.offset"] == [[1, -1], [0, 0]]
    assert (said["runner_config.batch_size"], said["micro_batch_interleave_num"]) == (1, 2)
    assert said["parallel_config.micro_batch_num"] == 12
    assert said["parallel.parallel_optimizer_config.optimizer_weight_shard_size"] == 2
    assert recipe("mindformers").parse(made.files).candidate == candidate


def test_paddlenlp_says_which_layers_keep_their_activations():
    layout = Layout(dp_replicate=2, dp_shard=4, zero_stage=3)
    precision = Precision(level="O1", dtype="bfloat16", white=("linear", "softmax"))
    part = SelectiveRecompute(pattern="attention", num_layers=((6,),))
    candidate = replace(CANDIDATE, layout=layout, precision=precision, recompute=Recompute(selective=(part,)))
    candidate = replace(candidate, loader=Loader(num_workers=2, prefetch_factor=2))
    made = export("paddlenlp", candidate, WORKLOAD)
    assert not errors(made)
    said = recipe("paddlenlp").load(made.files)
    assert (said["WORLD_SIZE"], said["sharding"], said["sharding_parallel_degree"]) == (8, "stage3", 4)
    assert (said["recompute_granularity"], said["no_recompute_layers"]) == ("full_attn", [6, 7])
    assert (said["bf16"], said["fp16_opt_level"]) == (True, "O1")
    assert said["amp_custom_white_list"] == ["matmul_v2", "softmax"]
    assert (said["per_device_train_batch_size"], said["gradient_accumulation_steps"]) == (2, 6)
    assert recipe("paddlenlp").parse(made.files).candidate == candidate


def test_context_parallel_methods_have_degrees_of_their_own_in_paddlenlp():
    ulysses, ring = (Candidate(layout=Layout(cp=2, cp_method=method)) for method in ("ulysses", "all_gather"))
    made = {cp.layout.cp_method: export("paddlenlp", cp, WORKLOAD) for cp in (ulysses, ring)}
    degrees = {method: recipe("paddlenlp").load(export.files) for method, export in made.items()}
    assert degrees["ulysses"]["sep_parallel_degree"] == degrees["all_gather"]["context_parallel_degree"] == 2
    assert "sep_parallel_degree" not in degrees["all_gather"]
    assert [note.knob for note in made["all_gather"].notes if note.knob.startswith("layout")] == ["layout.cp_method"]


ZBV = Layout(pp=2, schedule="zbv", num_virtual_stages=2, stage_layers=ALL)
O1 = Precision(level="O1", dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "candidate", "refused"),
    [
        ("megatron", Candidate(layout=ZBV), {"layout.schedule", "layout.stage_layers"}),
        ("megatron", Candidate(precision=O1), {"precision.level"}),
        ("mindformers", Candidate(precision=replace(O1, black=("softmax",))), {"precision.black"}),
        ("paddlenlp", Candidate(layout=ZBV), {"layout.schedule", "layout.stage_layers"}),
        ("paddlenlp", Candidate(layout=replace(LAYOUT, zero_stage=2)), {"layout.zero_stage"}),
        ("paddlenlp", Candidate(layout=Layout(dp_shard=2, zero_stage=1, cp=2)), {"layout.dp_shard"}),
        ("paddlenlp", replace(CANDIDATE, recompute=Recompute(communication=ALL)), {"recompute.communication"}),
    ],
)
def test_what_would_train_otherwise_is_refused_unless_allowed(name, candidate, refused):
    with pytest.raises(ConfigError) as refusal:
        export(name, candidate, WORKLOAD)
    assert refused <= errors(export(name, candidate, WORKLOAD, allow_lossy=True))
    for knob in refused:
        assert knob in str(refusal.value)


@pytest.mark.parametrize("name", FORMATS)
def test_models_that_are_no_decoders_are_refused(name):
    workload = Workload(model=ResNetModel(depth=18), data=ImageFolderData(), seq_length=1, global_batch_size=16)
    with pytest.raises(ConfigError, match="models of kind resnet"):
        export(name, Candidate(), workload)
    assert errors(export(name, Candidate(), workload, allow_lossy=True)) == {"workload.model"}
