"""Two published tuning cases: the shipped sweeps, what their experts did step by step, and the gain to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.acceptance.measures import MEASURES
from configs import CONFIGS

SWEEPS = CONFIGS / "sweeps"
SILU_MUL = {r"feed_forward\.(silu|mul)": "all"}
COMPILED = {"compile": "block"}
"""The guide's last two steps fuse operators in a compiled graph."""
NEARLY_ALL = r"feed_forward|add|.*norm|.*\.(wo|sc.*)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A published configuration, as knobs that differ from the sweep's baseline."""

    name: str
    published: float
    """tokens/s/p"""
    knobs: Mapping[str, Any]
    global_batch_size: int | None = None
    """None: the sweep's."""


TWO_NODES = {"pp": 2, "zero_stage": 1}
LLAMA2_13B = (
    Step(name="one node, full recompute", published=1860, knobs={"zero_stage": 1}, global_batch_size=8),
    Step(name="two nodes, PP2, full recompute", published=2136, knobs=TWO_NODES),
    Step(
        name="selective recompute",
        published=2189,
        knobs={**TWO_NODES, "recompute": {"select": {NEARLY_ALL: "all"}}},
    ),
    Step(
        name="uneven recompute, [20, 8] layers",
        published=2210,
        knobs={
            **TWO_NODES,
            "recompute": {"select": {NEARLY_ALL: [20, 0], r"feed_forward\.(silu|mul)": [20, 8]}},
        },
    ),
    Step(
        name="13 / 5 layers in full, SiLU x Mul elsewhere",
        published=2353,
        knobs={**TWO_NODES, "recompute": {"full": [13, 5], "select": SILU_MUL}, **COMPILED},
    ),
    Step(
        name="4 / 0 layers in full, SiLU x Mul elsewhere",
        published=2562,
        knobs={**TWO_NODES, "recompute": {"full": [4, 0], "select": SILU_MUL}, **COMPILED},
    ),
)


SHARDED = Step(
    name="one node, weights sharded as well (ZeRO-3)",
    published=1860,
    knobs={"zero_stage": 3},
    global_batch_size=8,
)
"""MindFormers' optimiser parallelism also shards weights, and with ZeRO-1 the model expects more than the card has."""
TWO_SEQUENCES = Step(
    name="one node, micro-batches of two sequences",
    published=1860,
    knobs={"zero_stage": 1, "micro_batch_size": 2},
    global_batch_size=16,
)
"""MindFormers' own configuration has batches of two; the published text does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shipped sweep with what was published of it."""

    name: str
    goal: float
    """Speed over the expert's start."""
    expert: Mapping[str, Any]
    """Knobs of the expert's last configuration."""
    steps: tuple[Step, ...] = ()
    other_starts: tuple[Step, ...] = ()
    """The first step under other plausible assumptions."""
    measures: bool = False

    @property
    def file(self) -> Path:
        return SWEEPS / f"{self.name}.yaml"


CASES = (
    Case(
        name="llama2-13b-ascend",
        goal=1.37,
        expert=LLAMA2_13B[-1].knobs,
        steps=LLAMA2_13B,
        other_starts=(SHARDED, TWO_SEQUENCES),
    ),
    Case(
        name="llama-1024-ascend",
        goal=1.7,
        expert={name: value for knobs in MEASURES.values() for name, value in knobs.items()},
        measures=True,
    ),
)

LAYOUTS: Mapping[str, tuple[Step, ...]] = {
    "mixtral-8x7b-ascend": (
        Step(name="ModelLink: PP8 DP2 EP2", published=1054, knobs={}),
        Step(
            name="MindFormers: PP2 DP8 EP8",
            published=1678,
            knobs={"pp": 2, "dp_shard": 8, "ep": 8, "zero_stage": 3},
        ),
    ),
    "deepseek-v3-h800": (Step(name="DeepSeek-V3: PP16 DP128 EP64", published=1543, knobs={}),),
}
"""Published layouts of mixtures of experts by the shipped sweep that starts from them: predicted, without a goal."""
