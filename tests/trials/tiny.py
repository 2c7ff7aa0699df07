"""The tiny workload every gang of the tests trains."""

from __future__ import annotations

from trials.spec import AdamW, Candidate, Layout, LlamaModel, Protocol, TextData, TrialSpec, Workload

SHAPE = LlamaModel(hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, ffn_hidden_size=70)
"""The feed-forward size divides by tensor-parallel 2 but not by 4, so that shards come out uneven."""
WORKLOAD = Workload(model=SHAPE, data=TextData(), seq_length=16, global_batch_size=8, optimizer=AdamW(lr=1e-3), seed=3)
FIVE_STEPS = Protocol(
    min_warmup_steps=2, max_warmup_steps=2, num_steps=3, max_steps=3, warmup_tolerance=0.2, max_relative_spread=0.1
)


def tiny_spec(layout=None, *, workload=WORKLOAD, **candidate):
    """A trial of five steps; ``num_microbatches`` (default 1) sets the micro-batch size."""
    layout = layout or Layout()
    num_microbatches = candidate.pop("num_microbatches", 1)
    micro_batch_size = workload.global_batch_size // (num_microbatches * layout.dp)
    chosen = Candidate(layout=layout, micro_batch_size=micro_batch_size, **candidate)
    return TrialSpec(workload=workload, candidate=chosen, protocol=FIVE_STEPS)
