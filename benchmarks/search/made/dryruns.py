"""Peaks of our own runner as dry runs count them, kept in ``dryruns.json``: the exact truth of family ``dry-run``.

    python -m benchmarks.search.made.dryruns [--only 8B]

adds to the file what is missing: of each of ``TASKS`` a random part of the legal candidates, some 4 CPU-seconds each.
What is there is kept; remove the file to have all made again. Peaks do not depend on the card, so that one task serves
problems on several.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.search.made.shapes import CARDS, SIZES
from benchmarks.search.made.spaces import Setup, legal
from cluster.cost.inputs import Array
from orchestrator.planning.dry_runs import estimate_all
from orchestrator.space.notation import short_name
from trials.dryrun.estimate import FRAGMENTATION, DryRunEstimate, context_bytes
from trials.spec import Candidate, LlamaModel, TextData, Workload

FILE = Path(__file__).with_name("dryruns.json")
COMMAND = "python -m benchmarks.search.made.dryruns"
NUM_CANDIDATES = 64
"""Of each task, at least."""
BATCH = 8
"""Candidates whose dry runs are kept together."""

SPACE: Mapping[str, list[Any]] = {
    "tp": [1, 2, 4, 8],
    "pp": [1, 2],
    "zero_stage": [0, 1, 2, 3],
    "micro_batch_size": [1, 2, 4],
    "recompute": ["none", "full", {"select": {"feed_forward": "all"}}],
    "precision": [{"level": "O2", "dtype": "bfloat16"}],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained on how many nodes; of each size class one."""

    size: str
    model: str
    num_nodes: int
    seq_length: int
    global_batch_size: int

    @property
    def workload(self) -> Workload:
        model: LlamaModel = SIZES[self.size][self.model]
        return Workload(
            model=model, data=TextData(), seq_length=self.seq_length, global_batch_size=self.global_batch_size
        )

    @property
    def legal(self) -> tuple[Candidate, ...]:
        """All legal candidates, in random order."""
        found = legal(self.workload, "a100-80", self.num_nodes, SPACE, 10**6)
        return tuple(random.Random(self.model).sample(found, len(found)))


TASKS: Mapping[str, Task] = {
    task.size: task
    for task in (
        Task(size="small", model="3B", num_nodes=1, seq_length=8192, global_batch_size=32),
        Task(size="medium", model="8B", num_nodes=2, seq_length=4096, global_batch_size=64),
        Task(size="large", model="32B", num_nodes=8, seq_length=4096, global_batch_size=128),
        Task(size="huge", model="111B", num_nodes=32, seq_length=4096, global_batch_size=512),
    )
}


def draw(rng: random.Random, size: str) -> Setup | None:
    """The task of that size class, on a card drawn."""
    task, kept = TASKS[size], _kept().get(TASKS[size].model, {})
    candidates = tuple(c for c in task.legal if short_name(c) in kept)
    card = rng.choice([name for name, (_, number_format) in CARDS.items() if number_format == "bfloat16"])
    if not candidates:
        return None
    return Setup(
        workload=task.workload, model_name=task.model, card=card, num_nodes=task.num_nodes, candidates=candidates
    )


def peaks(setup: Setup) -> Array:
    """Bytes that every candidate needs: what its dry run counted, with what lies outside of tensors."""
    kept = _kept()[setup.model_name]
    found = [kept[short_name(candidate)] for candidate in setup.candidates]
    context = [context_bytes(candidate.layout) for candidate in setup.candidates]
    return np.asarray(np.array(found, dtype=float) * (1 + FRAGMENTATION) + np.array(context, dtype=float))


@functools.cache
def _kept() -> Mapping[str, Mapping[str, int]]:
    """Peak bytes of live tensors by model and candidate."""
    if not FILE.is_file():
        return {}
    found: Mapping[str, Mapping[str, int]] = json.loads(FILE.read_text(encoding="utf-8"))["peak_bytes"]
    return found


def make(only: str | None) -> None:
    """Run what is missing and keep it, batch by batch."""
    kept = {name: dict(found) for name, found in _kept().items()}
    for task in TASKS.values():
        if only in (None, task.model):
            found = kept.setdefault(task.model, {})
            missing = [candidate for candidate in task.legal if short_name(candidate) not in found]
            missing = missing[: max(0, NUM_CANDIDATES - len(found))]
            for start in range(0, len(missing), BATCH):
                batch = missing[start : start + BATCH]
                made = estimate_all(task.workload, batch)
                found |= {
                    short_name(candidate): estimate.peak_bytes
                    for candidate, estimate in zip(batch, made, strict=True)
                    if isinstance(estimate, DryRunEstimate)
                }
                FILE.write_text(json.dumps({"made_by": COMMAND, "peak_bytes": kept}, indent=1) + "\n", encoding="utf-8")
                print(f"{task.model}: {start + len(batch)} of {len(missing)}", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="only the task of this model")
    make(parser.parse_args(argv).only)


if __name__ == "__main__":
    main()
