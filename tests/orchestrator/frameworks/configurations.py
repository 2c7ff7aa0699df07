"""Legal configurations, and what they are exported to."""

import random
from dataclasses import replace

from orchestrator.space.file_types import (
    ALL_LAYERS,
    RecomputeChoice,
    StageSplit,
    layers_of,
    resolve_recompute,
    resolve_stage_layers,
)
from orchestrator.space.space import canonical_part, canonical_precision
from tests.orchestrator.space.candidate_strategies import random_kernels, random_loader
from trials.legality import violations
from trials.spec import (
    AdamW,
    Candidate,
    Layout,
    LlamaModel,
    LossScale,
    Offload,
    Precision,
    TextData,
    TokenFileData,
    Workload,
)

MODEL = LlamaModel(
    hidden_size=64,
    num_layers=8,
    num_heads=8,
    num_kv_heads=4,
    ffn_hidden_size=192,
    vocab_size=320,
    rope_theta=500000.0,
    norm_eps=1e-6,
)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=128, global_batch_size=96, seed=5)


def random_workload(rng):
    optimizer = AdamW(lr=rng.choice([1e-3, 3e-4]), beta2=rng.choice([0.95, 0.999]), weight_decay=rng.choice([0.0, 0.1]))
    data = rng.choice([TextData(), TextData(path="/data/books", pattern="*.txt"), TokenFileData(path="/data/t.bin")])
    return replace(WORKLOAD, data=data, optimizer=optimizer, seed=rng.choice([0, 7]))


def random_configuration(rng):
    """A legal candidate in canonical form, and its workload."""
    while True:
        workload = random_workload(rng)
        candidate = _candidate(rng)
        if not list(violations(workload, candidate)):
            return candidate, workload


def configurations(number, seed=0):
    rng = random.Random(seed)
    return [random_configuration(rng) for _ in range(number)]


def _candidate(rng):
    layout = _layout(rng)
    held = layers_of(layout, MODEL.num_layers)
    return Candidate(
        layout=layout,
        micro_batch_size=rng.choice([1, 2, 4]),
        recompute=resolve_recompute(rng.choice([*PLAIN_RECOMPUTE, *PLAIN_RECOMPUTE, SELECTIVE]), held),
        precision=canonical_precision(_precision(rng)),
        loader=canonical_part(random_loader(rng)),
        kernels=canonical_part(random_kernels(rng), MODEL),
        offload=Offload(activations=rng.random() < 0.05, optimizer=rng.random() < 0.1),
    )


PLAIN_RECOMPUTE = (RecomputeChoice(), RecomputeChoice(full=ALL_LAYERS), RecomputeChoice(full=2))
SELECTIVE = RecomputeChoice(select=((r"feed_forward\.mul", ALL_LAYERS),))


def _layout(rng):
    pp = rng.choice([1, 1, 1, 2])
    schedule = rng.choice(["gpipe", "1f1b", "interleaved", "zbv"])
    chunks = {"1f1b": 1, "zbv": 2}.get(schedule, 2) if pp > 1 else 1
    layout = Layout(
        pp=pp,
        dp_replicate=rng.choice([1, 1, 2, 3]),
        dp_shard=rng.choice([1, 2, 4]),
        cp=rng.choice([1, 1, 2, 4]),
        tp=rng.choice([1, 1, 2, 4]),
        zero_stage=rng.choice([1, 2, 3]),
        replicate_with=rng.choice(["ddp", "fsdp2"]),
        shard_embedding=rng.random() < 0.3,
        sequence_parallel=rng.random() < 0.5,
        tp_engine=rng.choice(["dtensor", "local"]),
        cp_method=rng.choice(["all_gather", "ulysses", "ring", "hybrid"]),
        ulysses_degree=2,
        gradient_reduction=rng.choice(["each", "each", "each", "last"]),
        schedule=schedule,
        num_virtual_stages=chunks,
    )
    split = rng.choice([StageSplit(), StageSplit(kind="offset", rows=((1, -1),) * chunks)]) if pp > 1 else StageSplit()
    layers = resolve_stage_layers(
        split, num_layers=MODEL.num_layers, pp=pp, num_virtual_stages=chunks, schedule=schedule
    )
    return canonical_part(replace(layout, stage_layers=layers))


def _precision(rng):
    scale = rng.choice([LossScale(), LossScale(initial=2.0**12, growth_interval=500), LossScale(dynamic=False)])
    lists = {"white": ("softmax",)} if rng.random() < 0.1 else {}
    level = rng.choice(["O0", "O1", "O2"] * 4 + ["O0", "O1", "O2-fp8", "O1-fp8"])
    return Precision(
        level=level,
        dtype=rng.choice(["bfloat16", "bfloat16", "float16"]),
        loss_scale=scale,
        **(lists if level == "O1" else {}),
    )


def errors(made):
    """Knobs that an export cannot express."""
    return {note.knob for note in made.notes if note.severity == "error"}
