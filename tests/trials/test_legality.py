from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from tests.trials.tiny import SHAPE, WORKLOAD, tiny_spec
from trials.failure import InfeasibleSpec
from trials.legality import check
from trials.spec import FullRecompute, Layout, Loader, LossScale, Precision, Protocol, TrialSpec


def with_model(**changes: Any) -> TrialSpec:
    shape = dataclasses.replace(SHAPE, **changes)
    return tiny_spec(Layout(tp=2), workload=dataclasses.replace(WORKLOAD, model=shape))


ODD_LENGTH = dataclasses.replace(WORKLOAD, seq_length=15)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (tiny_spec(Layout(tp=2, dp_replicate=2)), "DDP does not compose with tp"),
        (tiny_spec(Layout(tp=2, dp_shard=2, zero_stage=1)), "ZeRO stage 1 does not compose with tp"),
        (tiny_spec(Layout(dp_shard=2)), "zero_stage 0 does not go with dp_shard 2"),
        (tiny_spec(Layout(zero_stage=3)), "zero_stage 3 does not go with dp_shard 1"),
        (tiny_spec(Layout(sequence_parallel=True)), "sequence_parallel needs tp > 1"),
        (tiny_spec(Layout(tp=4)), "num_kv_heads 2 is not divisible by tp 4"),
        (with_model(ffn_hidden_size=71), "ffn_hidden_size 71 is not divisible by tp 2"),
        (with_model(vocab_size=257), "vocab_size 257 is not divisible by tp 2"),
        (with_model(vocab_size=128), "below the 256 values"),
        (with_model(hidden_size=30), "hidden_size 30 is not divisible by num_heads 4"),
        (with_model(hidden_size=20), "head size 5 is odd"),
        (with_model(num_kv_heads=3), "num_heads 4 is not divisible by num_kv_heads 3"),
        (tiny_spec(Layout(tp=2, sequence_parallel=True), workload=ODD_LENGTH), "seq_length 15 is not divisible"),
        (tiny_spec(Layout(dp_replicate=3)), "not a multiple of micro_batch_size 2 * dp 3"),
        (tiny_spec(precision=Precision(level="O1")), "AMP level O1 does not go with float32"),
        (tiny_spec(precision=Precision(level="O1", dtype="float16")), "exactly when dtype is float16"),
        (tiny_spec(precision=Precision(loss_scale=LossScale())), "exactly when dtype is float16"),
        (tiny_spec(recompute=FullRecompute(num_layers=3)), "recompute of 3 layers is outside 1..2"),
        (tiny_spec(loader=Loader(num_workers=1)), "prefetch_factor is 0 exactly when"),
    ],
)
def test_refuses(spec: TrialSpec, words: str) -> None:
    with pytest.raises(InfeasibleSpec, match=words.replace("*", r"\*").replace(".", r"\.")):
        check(spec)


@pytest.mark.parametrize("protocol", [Protocol(num_steps=0), Protocol(num_steps=9, max_steps=8)])
def test_refuses_a_protocol_that_measures_nothing(protocol: Protocol) -> None:
    with pytest.raises(InfeasibleSpec, match=r"num_steps \d is outside 1\.\."):
        check(dataclasses.replace(tiny_spec(), protocol=protocol))


def test_refuses_a_warmup_that_cannot_end() -> None:
    with pytest.raises(InfeasibleSpec, match=r"min_warmup_steps 7 is outside 0\.\."):
        check(dataclasses.replace(tiny_spec(), protocol=Protocol(min_warmup_steps=7)))


def test_one_message_names_every_broken_rule() -> None:
    with pytest.raises(InfeasibleSpec, match=r"DDP does not compose.*; .*outside 1\.\.2"):
        check(tiny_spec(Layout(tp=2, dp_replicate=2), recompute=FullRecompute(num_layers=9)))


def test_odd_sequences_are_fine_without_sequence_parallel() -> None:
    check(tiny_spec(Layout(tp=2), workload=ODD_LENGTH))


def test_planning_can_ask_without_importing_torch() -> None:
    code = "import sys, trials.legality, trials.flops, trials.failure; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
