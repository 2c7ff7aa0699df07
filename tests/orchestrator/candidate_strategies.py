"""Hypothesis strategies for candidates and workloads; candidates need not be canonical or legal."""

from hypothesis import strategies as st

from trials.spec import (
    Candidate,
    FullRecompute,
    Kernels,
    Layout,
    LlamaModel,
    Loader,
    LossScale,
    NoRecompute,
    Precision,
    TextData,
    Workload,
)

DEGREES = st.sampled_from([1, 2, 3, 4, 6, 8])
LAYOUTS = st.builds(
    Layout,
    dp_replicate=DEGREES,
    dp_shard=DEGREES,
    tp=DEGREES,
    zero_stage=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    replicate_with=st.sampled_from(["ddp", "fsdp2"]),
)
PRECISIONS = st.builds(
    Precision,
    level=st.sampled_from(["O0", "O1", "O2"]),
    dtype=st.sampled_from(["bfloat16", "float16"]),
    loss_scale=st.none() | st.builds(LossScale, initial=st.sampled_from([8.0, 2.0**15]), dynamic=st.booleans()),
)
CANDIDATES = st.builds(
    Candidate,
    layout=LAYOUTS,
    micro_batch_size=st.sampled_from([1, 2, 3, 4, 8]),
    recompute=st.just(NoRecompute()) | st.builds(FullRecompute, num_layers=st.integers(0, 12)),
    precision=PRECISIONS,
    loader=st.builds(Loader, num_workers=st.integers(0, 3), prefetch_factor=st.integers(0, 4)),
    kernels=st.builds(Kernels, compile=st.sampled_from(["off", "block"])),
)
MODELS = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3, 4]), st.integers(1, 6)).map(
    lambda drawn: LlamaModel(
        num_kv_heads=drawn[0],
        num_heads=drawn[0] * drawn[1],
        hidden_size=drawn[0] * drawn[1] * 8,
        num_layers=4,
        ffn_hidden_size=drawn[2] * 8,
        vocab_size=256 + drawn[2],
    )
)
WORKLOADS = st.builds(
    Workload,
    model=MODELS,
    data=st.just(TextData()),
    seq_length=st.sampled_from([6, 16, 30, 64]),
    global_batch_size=st.sampled_from([1, 6, 16, 24, 64]),
)
