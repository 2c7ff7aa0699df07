"""What every framework makes of seeded candidates: its exports, and its overlays on commands that people write.

``python -m tests.goldens.frameworks --write`` makes ``frameworks/NAME.json`` again, which holds hashes of 300
candidates and a few whole texts. ``--check`` compares all of them, a test every third. ``--dump FOLDER`` writes all
texts, to compare those of two versions with ``diff -r``.
"""

import argparse
import atexit
import dataclasses
import functools
import hashlib
import json
import os
import random
import tempfile
from pathlib import Path
from unittest import mock

from orchestrator.frameworks.catalog import export, formats, recipe, training, trainings
from orchestrator.space.file_types import (
    ALL_LAYERS,
    RecomputeChoice,
    StageSplit,
    layers_of,
    resolve_recompute,
    resolve_stage_layers,
)
from orchestrator.space.space import canonical_part
from tests.orchestrator.frameworks import commands, programs
from tests.orchestrator.frameworks.configurations import MODEL, WORKLOAD, random_configuration, random_workload
from tests.orchestrator.space.candidate_strategies import canonicalize, random_candidate, random_kernels, random_loader
from trials.legality import violations
from trials.spec import (
    Candidate,
    CustomChoice,
    ImageFolderData,
    Kernels,
    Layout,
    LoaderTuning,
    LossScale,
    ModuleFacts,
    Offload,
    Precision,
    PythonData,
    PythonModel,
    Recompute,
    ResNetModel,
    ScriptData,
    ScriptModel,
    SelectiveRecompute,
    Workload,
)

FOLDER = Path(__file__).parent / "frameworks"
NUMBER = 300
SHOWN = (0, 72)
"""Candidates whose texts stand in the file as they are, but for what is read back."""
NAMES = tuple(sorted({*formats(), *trainings()}))


def record(name, step=1):
    """What stands in a framework's file; with a ``step`` of more than 1 hashes of so many candidates less."""
    found = {}
    if name in formats():
        found |= _summary("export", exports(name, step))
    if name in trainings():
        found["reading"] = {kind: _hash(text) for kind, text in readings(name).items()}
        found |= _summary("overlay", overlays(name, step))
    return found


def thinned(kept, step):
    """The same of what stands in a file."""
    found = dict(kept)
    for what in {"export", "overlay"} & kept.keys():
        found[what] = {at: text for at, text in kept[what].items() if int(at) % step == 0}
    return found


def texts(name):
    """Everything a framework makes, by a path for each part."""
    found = {}
    if name in formats():
        found |= {f"export/{at:03d}-{part}": text for at, parts in exports(name).items() for part, text in parts}
    if name in trainings():
        found |= {f"reading/{kind}": text for kind, text in readings(name).items()}
        found |= {f"overlay/{at:03d}-{part}": text for at, parts in overlays(name).items() for part, text in parts}
    return {f"{name}/{path}": text for path, text in found.items()}


def stored(name):
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _summary(what, made):
    """Per candidate a hash of each part, in the order of ``made``'s parts; and the texts of a few candidates."""
    shown = {at: [(part, text) for part, text in made[at] if part not in ("parsed", "said")] for at in SHOWN}
    return {
        f"{what} parts": [part for part, _ in made[0]],
        what: {str(at): " ".join(_hash(text) for _, text in parts) for at, parts in made.items()},
        f"{what} texts": {str(at): {part: text.splitlines() for part, text in parts} for at, parts in shown.items()},
    }


def _hash(text):
    return hashlib.sha256(text.encode()).hexdigest()[:4]


def notes_of(notes):
    return "\n".join(sorted(map(str, notes)))


def _values(values):
    return "\n".join(f"{path} {value!r}" for path, value in sorted(values.items()))


# ---- exports ----


def exports(name, step=1):
    """Per candidate: files, command and notes, and what is read back from the files."""
    return {at: _export(name, *configurations()[at]) for at in range(0, NUMBER, step)}


def _export(name, candidate, workload):
    made = export(name, candidate, workload, allow_lossy=True)
    files = "\n".join(f"=== {file}\n{text}" for file, text in sorted(made.files.items()))
    said = _values(recipe(name).parse(made.files).values)
    return (("files", files), ("command", made.command), ("notes", notes_of(made.notes)), ("parsed", said))


@functools.cache
def configurations():
    """Legal ones, ones of any kind, and models of every kind."""
    rng = random.Random("exports")
    small = dataclasses.replace(MODEL, num_layers=4)
    found = [random_configuration(rng) for _ in range(NUMBER * 3 // 5)]
    while len(found) < NUMBER - len(_OTHERS):
        workload = dataclasses.replace(random_workload(rng), model=small)
        candidate = canonicalize(random_candidate(rng, fitting=True), small)
        if not list(violations(workload, candidate)):
            found.append((candidate, workload))
    return (*found, *_OTHERS)


_MODULE = PythonModel(model="mine:build", loss="mine:loss", layers="blocks", cwd="/c", facts=ModuleFacts(num_layers=4))
_SCRIPT = ScriptModel(recipe="transformers", run=("python", "train.py"), cwd="/")
_OTHERS = (
    (Candidate(), Workload(model=ResNetModel(depth=18), data=ImageFolderData(), seq_length=1, global_batch_size=16)),
    (
        Candidate(layout=Layout(dp_replicate=2)),
        dataclasses.replace(WORKLOAD, model=_MODULE, data=PythonData(dataset="m:d", cwd="/c")),
    ),
    (
        Candidate(own=(CustomChoice(name="--optim", value="ada"),)),
        dataclasses.replace(WORKLOAD, model=_SCRIPT, data=ScriptData()),
    ),
)


# ---- overlays ----


def readings(name):
    """By command: its reading, and which frameworks recognise it."""
    found = {}
    for kind, (run, _) in _runs(name).items():
        known = [other for other in trainings() if training(other).recognises(run)]
        found[kind] = anywhere(f"{reading(training(name).read(run))}\nrecognised: {known}")
    return found


def reading(said):
    rest = {field.name: getattr(said, field.name) for field in dataclasses.fields(said)}
    values, notes = rest.pop("values"), rest.pop("notes")
    return f"{_values(values)}\n{_values(rest)}\n{notes_of(notes)}"


def overlays(name, step=1):
    """Per candidate: the command with files and notes, its reading then, its trial, and what that has to show."""
    with mock.patch.dict(os.environ):
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
        drawn = requests(name)
        return {at: _overlay(name, *drawn[at]) for at in range(0, NUMBER, step)}


def requests(name):
    """Kinds of command, the commands, and requests, for all candidates."""
    rng, runs = random.Random(name), list(_runs(name).items())
    return [(kind, run, draw(rng)) for at in range(NUMBER) for kind, (run, draw) in [runs[at % len(runs)]]]


def _overlay(name, kind, run, request):
    known = training(name)
    try:
        made = known.overlay(run, request)
    except KeyError as error:
        return tuple((part, f"{error!r}") for part in ("made", "notes", "said", "trial", "expected"))
    trial = known.trial_mode(made, 12)
    again = dataclasses.replace(run, argv=made.argv, env={**run.env, **made.env}, files={**run.files, **made.files})
    parts = {
        "made": f"{kind}\n{_laid(made)}",
        "notes": notes_of(made.notes),
        "said": reading(known.read(again)),
        "trial": _laid(trial) + notes_of(trial.notes),
        "expected": repr(known.expected(request)),
    }
    return tuple((part, anywhere(text)) for part, text in parts.items())


def anywhere(text):
    """The text without the folder of this process."""
    return text.replace(str(folder()), "/project")


def _laid(made):
    files = "".join(f"=== {file}\n{text}" for file, text in sorted(made.files.items()))
    argv = "\n".join(made.argv)
    return f"{argv}\nenv: {dict(sorted(made.env.items()))}\n{files}"


def _runs(name):
    """By kind: a command, and what draws a request for it."""
    if name in commands.FRAMEWORKS:
        found = {f"{name}-{at}": _varied(name, change) for at, change in enumerate(_VARIANTS[name])}
        return {
            kind: (run, functools.partial(_request, commands.request_for(run, name, commands.as_it_stands(run, name))))
            for kind, run in found.items()
        }
    if name == "custom":
        run = dataclasses.replace(commands.program("megatron"), argv=("python", "x.py", "--bs", "{micro_batch_size}"))
        return {name: (run, functools.partial(_trainer_request, training(name), run))}
    kinds = [kind for kind in programs.COMMANDS if programs.recipe_of(kind) == name]
    found = {kind: programs.program(kind, programs.written(folder())) for kind in kinds}
    return {kind: (run, functools.partial(_trainer_request, known, run)) for kind, (known, run) in found.items()}


@functools.cache
def folder():
    """A folder of the Hugging Face programs, gone with the process."""
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)


_TITAN_LONG = commands.TITAN_CONFIG.replace("def mine", "def other").replace("config = small()", "config = theirs()")
_TITAN_PARTS = (
    "tok_embeddings,layers.0,layers.1",
    "layers.2,layers.3,layers.4,layers.5,layers.6,layers.7,norm,lm_head",
)
_VARIANTS = {
    "megatron": (
        "",
        "--pipeline-model-parallel-size 1 --recompute-method block --recompute-num-layers=3",
        "--decoder-first-pipeline-num-layers 3 -num-layers-per-virtual-pipeline-stage",
        "--pipeline-model-parallel-layout Ettt|t*5L --recompute-granularity selective --recompute-modules mlp",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --context-parallel-size 2 --seed 5",
        "-bf16 --fp16 --loss-scale-window 500 --hysteresis=3 --attention-backend unfused --num-workers 0",
        "-bf16 --fp16 --loss-scale 1024 --use-torch-fsdp2 --optimizer-cpu-offload --kv-channels 4",
        "--rampup-batch-size 8 8 1000 --fp8-format hybrid --expert-model-parallel-size 2 --num-experts 8",
        "-swiglu -use-distributed-optimizer -sequence-parallel --context-parallel-size 2 --vocab-size 321",
    ),
    "torchtitan": (
        "",
        "--parallelism.data_parallel_shard_degree=2 --parallelism.fsdp_reshard_after_forward never --debug.seed 3",
        f"--parallelism.pipeline_parallel_degree 2 --parallelism.pipeline_parallel_schedule 1F1B "
        f"--parallelism.module-fqns-per-model-part {' '.join(_TITAN_PARTS)}",
        "--config small --training.steps 50 --compile.no_enable --dataloader.num_workers 4 --dataloader.pin_memory",
        "--config other",
        "--training.mixed_precision_param float32 --training.enable_cpu_offload --parallelism.expert_parallel_degree 2",
        "--module llama3 --config absent --parallelism.context_parallel_degree 2",
        "--job.config_file train.toml",
    ),
    "lightning": (
        "",
        "--trainer.strategy fsdp --trainer.precision bf16-mixed",
        "--trainer.strategy deepspeed_stage_3 --trainer.precision 16-mixed",
        "--trainer.strategy my.Strategy --trainer.precision bf16-true",
        "--trainer.accumulate_grad_batches 4 --trainer.devices 2",
    ),
    "mindformers": (
        "",
        "--parallel_config.model_parallel 4",
        "--config other.yaml",
    ),
    "paddlenlp": (
        "",
        "--sharding stage2 --sharding_parallel_degree 4 --bf16 true --fp16_opt_level O2",
        "--sharding stage1 --tensor_parallel_degree 2 --pipeline_parallel_degree 2 --sequence_parallel 1",
        "--recompute 1 --recompute_granularity core_attn --sep_parallel_degree 2",
        "--fp16 true --fp16_opt_level O1 --context_parallel_degree 2 --dataloader_num_workers 2 --seed 7",
        "--sharding stage2_offload --fp16_opt_level O3",
    ),
}
"""Words that are added to a framework's command; ``-name`` takes away the flag of this name, or the option with its
value."""


def _varied(name, words):
    given = words.split()
    gone = [f"-{word}" for word in given if word.startswith("-") and not word.startswith("--")]
    more = [word for word in given if word not in [name[1:] for name in gone]]
    run = commands.program(
        name, files={"titan_config": commands.TITAN_CONFIG + _TITAN_LONG} if name == "torchtitan" else {}
    )
    argv = list(run.argv)
    for option in gone:
        at = argv.index(option)
        del argv[at : at + (2 if option.startswith("--num") else 1)]
    policy = next((at for at, word in enumerate(argv) if word.startswith("activation-checkpoint:")), len(argv))
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if "--fp16" in given or "fsdp" in words else {}
    return dataclasses.replace(run, argv=(*argv[:policy], *more, *argv[policy:]), env=env)


def _request(first, rng):
    candidate = _candidate(rng, first.candidate, narrow=rng.random() < 0.6)
    number = max(1, candidate.num_microbatches(commands.BATCH))
    world_size = candidate.layout.world_size
    request = dataclasses.replace(first, candidate=candidate, world_size=world_size, num_microbatches=number)
    return _with_rest(rng, request)


def _trainer_request(known, run, rng):
    candidate = programs.drawn(rng, known.read(run).num_layers or 1)
    if rng.random() < 0.3:
        candidate = _candidate(rng, candidate, narrow=True)
    return _with_rest(rng, programs.request(known, run, candidate, world=candidate.layout.world_size))


def _with_rest(rng, request):
    paths = ("layout.tp", "layout.zero_stage", "micro_batch_size", "precision", "loader", "kernels.attention")
    paths += ("kernels.compile", "recompute.full", "kernels.matmul_precision", "layout.cp_method", "offload.optimizer")
    return dataclasses.replace(
        request,
        named=frozenset(path for path in paths if rng.random() < 0.4),
        templated=frozenset({"micro_batch_size"} if rng.random() < 0.1 else ()),
        seed=rng.choice([None, 7]),
        device=rng.choice([None, "cpu", "cuda"]),
    )


def _candidate(rng, base, *, narrow):
    """The command's own candidate with other values in some groups; without ``narrow`` in most."""
    share = 0.25 if narrow else 0.6
    changes = {name: draw(rng, base) for name, draw in _DRAWS.items() if rng.random() < share}
    layout = changes.get("layout", base.layout)
    if "layout" in changes or rng.random() < share:
        changes["recompute"] = _recompute(rng, layout)
    return commands.canonical(dataclasses.replace(base, **changes))


def _layout(rng, base):
    pp, chunks = rng.choice([1, 1, 2, 4]), rng.choice([1, 1, 2])
    schedule = (
        rng.choice(["interleaved", "interleaved", "zbv"]) if chunks > 1 else rng.choice(["1f1b", "1f1b", "gpipe"])
    )
    stage = rng.choice([0, 0, 1, 2, 3])
    offset = StageSplit(kind="offset", rows=((1, *(0,) * (pp - 2), -1),) * chunks)
    split = rng.choice([StageSplit(), StageSplit(), offset]) if pp > 1 else StageSplit()
    layers = resolve_stage_layers(split, num_layers=8, pp=pp, num_virtual_stages=chunks, schedule=schedule)
    return dataclasses.replace(
        base.layout,
        pp=pp,
        tp=rng.choice([1, 1, 2, 4, 8]),
        cp=rng.choice([1, 1, 1, 2]),
        dp_replicate=rng.choice([1, 1, 2]),
        dp_shard=rng.choice([1, 2, 4]) if stage else 1,
        zero_stage=stage,
        sequence_parallel=rng.random() < 0.5,
        cp_method=rng.choice(["all_gather", "ulysses", "ring"]),
        gradient_reduction=rng.choice(["each", "each", "each", "last"]),
        schedule=schedule,
        num_virtual_stages=chunks,
        stage_layers=layers,
    )


def _recompute(rng, layout):
    held = layers_of(layout, MODEL.num_layers)
    patterns = (r"attention\.scaled_dot_product_attention", "attention_norm", "feed_forward_norm", "feed_forward")
    some = tuple(SelectiveRecompute(pattern=pattern, num_layers=held) for pattern in sorted(rng.sample(patterns, 2)))
    choice = rng.choice([RecomputeChoice(), RecomputeChoice(full=ALL_LAYERS), RecomputeChoice(full=2)])
    return rng.choice([resolve_recompute(choice, held)] * 4 + [Recompute(selective=some)])


def _precision(rng, base):
    scale = rng.choice([LossScale(), LossScale(initial=2.0**12, growth_interval=500), LossScale(dynamic=False)])
    level, dtype = rng.choice(["O0", "O1", "O2", "O2"]), rng.choice(["bfloat16", "bfloat16", "float16"])
    words = {"white": ("softmax",)} if level == "O1" and rng.random() < 0.2 else {}
    return rng.choice([base.precision, Precision(level=level, dtype=dtype, loss_scale=scale, **words)])


def _kernels(rng, base):
    drawn = canonical_part(random_kernels(rng), MODEL)
    attention = rng.choice(["auto", "flash", "math", "cudnn", "efficient"])
    plain = Kernels(compile=rng.choice(["off", "block", "model"]), attention=attention)
    return rng.choice([plain, drawn, dataclasses.replace(base.kernels, attention=attention)])


def _loader(rng, base):
    drawn = dataclasses.replace(random_loader(rng), full_batch=False, tuning=None)
    return rng.choice([drawn, drawn, dataclasses.replace(base.loader, tuning=LoaderTuning())])


_DRAWS = {
    "layout": _layout,
    "micro_batch_size": lambda rng, _: rng.choice([1, 2, 3]),
    "precision": _precision,
    "loader": _loader,
    "kernels": _kernels,
    "offload": lambda rng, _: Offload(activations=rng.random() < 0.1, optimizer=rng.random() < 0.2),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--dump", type=Path)
    parser.add_argument("names", nargs="*", default=NAMES)
    given = parser.parse_args()
    for name in given.names:
        if given.write:
            FOLDER.mkdir(exist_ok=True)
            text = json.dumps(record(name), indent=0, ensure_ascii=False)
            (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        if given.check:
            made, kept = record(name), stored(name)
            for what in ("reading", "export", "overlay"):
                wrong = [at for at, text in kept.get(what, {}).items() if made[what][at] != text]
                print(f"{name}: {what}: {len(wrong)} of {len(kept.get(what, {}))} differ: {' '.join(wrong)}")
        if given.dump:
            for path, text in texts(name).items():
                (given.dump / path).parent.mkdir(parents=True, exist_ok=True)
                (given.dump / path).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
