"""Hypothesis strategies for candidates and workloads; candidates need not be canonical or legal."""

import dataclasses
import random

from hypothesis import strategies as st

from orchestrator.space.file_types import layers_of, resolve_recompute
from orchestrator.space.space import canonical_part, canonical_precision
from trials.spec import (
    Candidate,
    Experts,
    ImageFolderData,
    Kernels,
    LatentAttention,
    Layout,
    LinearModel,
    LlamaModel,
    Loader,
    LoaderTuning,
    LossScale,
    Offload,
    Precision,
    RandomData,
    Recompute,
    ResNetModel,
    SelectiveRecompute,
    TextData,
    Workload,
)

NUM_LAYERS = 4
DEGREES = st.sampled_from([1, 2, 3, 4, 6, 8])


def random_candidate(rng, *, fitting=False):
    """Drawn by hand: a strategy per field takes a hundred times as long. Only ``fitting`` layers always add up."""
    pp = rng.choice([1, 1, 2, 4])
    chunks = rng.choice([1, 2, 2, 3, 5])
    good = fitting or rng.random() < 0.7
    schedule = rng.choice(["gpipe", "1f1b", "interleaved", "zbv"])
    if good:
        chunks = {"1f1b": 1, "zbv": 2}.get(schedule, chunks) if pp > 1 else 1
    layout = Layout(
        pp=pp,
        dp_replicate=rng.choice([1, 1, 2, 3, 8]),
        dp_shard=rng.choice([1, 1, 2, 4]),
        cp=rng.choice([1, 1, 2, 4]),
        tp=rng.choice([1, 1, 2, 3, 4]),
        zero_stage=rng.choice([0, 0, 1, 2, 3]),
        gradient_reduction=rng.choice(["each", "each", "each", "last"]),
        replicate_with=rng.choice(["ddp", "fsdp2"]),
        shard_embedding=rng.random() < 0.3,
        sequence_parallel=rng.random() < 0.5,
        tp_engine=rng.choice(["dtensor", "local"]),
        num_copies=rng.choice([1, 1, 2]),
        cp_method=rng.choice(["all_gather", "ulysses", "ring", "hybrid"]),
        ulysses_degree=rng.choice([1, 2]),
        schedule=schedule,
        num_virtual_stages=chunks,
        stage_layers=(split(rng, chunks, pp) if good else counts(rng, chunks, pp, low=-1))
        if pp > 1 or not good
        else (),
        ep=rng.choice([*[1] * 8, 2, 3]),
    )
    return Candidate(
        layout=layout,
        micro_batch_size=rng.choice([1, 1, 2, 3, 4, 8]),
        recompute=random_recompute(rng, layout),
        precision=random_precision(rng),
        loader=random_loader(rng),
        kernels=random_kernels(rng),
        offload=Offload(activations=rng.random() < 0.1, optimizer=rng.random() < 0.1),
    )


def counts(rng, rows, columns, low=0):
    """Mostly of the given shape."""
    columns += rng.random() < 0.1
    return tuple(tuple(rng.randint(low, NUM_LAYERS) for _ in range(columns)) for _ in range(rows))


def split(rng, rows, columns):
    """Layers of every stage, summing to those of the model."""
    cuts = sorted(rng.randint(0, NUM_LAYERS) for _ in range(rows * columns - 1))
    flat = [high - low for low, high in zip([0, *cuts], [*cuts, NUM_LAYERS], strict=True)]
    return tuple(tuple(flat[i * columns : (i + 1) * columns]) for i in range(rows))


def random_recompute(rng, layout):
    rows, columns = (layout.num_virtual_stages, layout.pp) if layout.pp > 1 else (1, 1)
    patterns = rng.sample([r"feed_forward\.mul", "attention", ".*norm"], rng.choice([0, 0, 1, 2]))
    patterns += rng.choice([[], [], [], ["("], ["x" * 300], [r"(\w*\w*)*!"]])
    return Recompute(
        full=rng.choice([(), counts(rng, rows, columns)]),
        selective=tuple(SelectiveRecompute(pattern=p, num_layers=counts(rng, rows, columns)) for p in patterns),
        communication=rng.choice([(), (), counts(rng, rows, columns)]),
    )


def random_precision(rng):
    names = ["linear", "softmax", "rms_norm", "no name"]
    level = rng.choice([*["O0", "O1", "O2"] * 3, "O0", "O1", "O2-fp8", "O1-fp8"])
    return Precision(
        level=level,
        dtype=rng.choice(["bfloat16", "float16"]),
        loss_scale=rng.choice(
            [None, LossScale(), LossScale(initial=8.0), LossScale(initial=1e60), LossScale(dynamic=False)]
        ),
        white=tuple(rng.sample(names, rng.choice([0, 0, 1, 2]))),
        black=tuple(rng.sample(names, rng.choice([0, 0, 0, 2]))),
        keep_fp32=tuple(rng.sample([".*norm", "output", "("], 1)) if rng.random() < 0.2 else (),
    )


def random_loader(rng):
    return Loader(
        num_workers=rng.randint(0, 3),
        prefetch_factor=rng.randint(0, 4),
        pin_memory=rng.random() < 0.5,
        persistent_workers=rng.random() < 0.5,
        full_batch=rng.random() < 0.5,
        tuning=rng.choice([None, None, LoaderTuning(), LoaderTuning(max_workers=2)]),
        batching=rng.choice([*["padding"] * 10, "packing", "buckets"]),
    )


def random_kernels(rng):
    drawn = Kernels(
        compile=rng.choice(["off", "off", "block", "model"]),
        compile_mode=rng.choice(["default", "max-autotune", "reduce-overhead"]),
        attention=rng.choice(["auto", "math"]),
        matmul_precision=rng.choice(["highest", "high"]),
        cudnn_tuning_range=rng.choice([(), (), (1, 4), (3, 2), (1,)]),
        memory_format=rng.choice(["nchw", "nhwc", "auto"]),
        loss_chunks=rng.choice([*[1] * 8, 2, 8]),
        dynamic=rng.random() < 0.1,
    )
    fused = random.Random(repr(drawn)).choice(["auto", "auto", "torch", "liger"])  # other draws keep theirs
    return dataclasses.replace(drawn, fused=fused)


SEEDS = st.integers(0, 2**32).map(random.Random)
CANDIDATES = SEEDS.map(random_candidate)
FITTING = SEEDS.map(lambda rng: random_candidate(rng, fitting=True))
LATENT = LatentAttention(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=8)
LLAMAS = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4]), st.integers(1, 6)).map(
    lambda drawn: LlamaModel(
        num_kv_heads=drawn[0],
        num_heads=drawn[0] * drawn[1],
        hidden_size=drawn[0] * drawn[1] * 8,
        num_layers=NUM_LAYERS,
        ffn_hidden_size=drawn[2] * 8,
        vocab_size=256 + drawn[2],
        experts=Experts(num_experts=4, top_k=2, ffn_hidden_size=16, aux_loss=0.1) if drawn[2] % 3 == 0 else None,
        latent=LATENT if drawn[1] == 1 and drawn[2] % 2 == 0 else None,
    )
)
BATCHES = st.sampled_from([1, 6, 16, 24, 64])
WORKLOADS = st.builds(
    Workload,
    model=LLAMAS,
    data=st.just(TextData()),
    seq_length=st.sampled_from([6, 16, 30, 64]),
    global_batch_size=BATCHES,
)
OTHER_WORKLOADS = st.builds(
    Workload, model=st.just(LinearModel()), data=st.just(RandomData()), seq_length=st.just(1), global_batch_size=BATCHES
) | st.builds(
    Workload,
    model=st.just(ResNetModel()),
    data=st.just(ImageFolderData()),
    seq_length=st.just(1),
    global_batch_size=BATCHES,
)
MODELS = st.sampled_from(
    [
        LlamaModel(hidden_size=32, num_layers=NUM_LAYERS, num_heads=4, num_kv_heads=2, ffn_hidden_size=64),
        LinearModel(num_layers=NUM_LAYERS),
        ResNetModel(depth=18),
    ]
)


def canonicalize(candidate, model):
    """Give knobs without effect their neutral value, so that candidates that run alike are equal."""
    layout = canonical_part(candidate.layout)
    return dataclasses.replace(
        candidate,
        layout=layout,
        recompute=resolve_recompute(candidate.recompute, layers_of(layout, model.num_layers)),
        precision=canonical_precision(candidate.precision),
        loader=canonical_part(candidate.loader),
        kernels=canonical_part(candidate.kernels, model),
    )
