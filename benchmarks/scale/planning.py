"""What a plan costs, and the first proposal of the search, by the size of the space.

    python -m benchmarks.scale.planning [--size 100k | 1m | 8m] [--beyond] [--json]

Plans a 13B Llama on 64 simulated devices from a sweep file on: the legal candidates, their predictions, and what
``submit`` does before its first trial. CPU-seconds, and the peak memory of this process above what it had before.

``--beyond``: of a space too large to be listed, how much worse the best that was drawn is by the cost model than the
best of all, which is listed for once without a limit. Takes some minutes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from benchmarks.cost.speed import Meter, text
from cluster.hardware.topology import Topology
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.controller.controller import make_search
from orchestrator.planning import planner as planning
from orchestrator.planning.dry_runs import known_topology
from orchestrator.planning.planner import Plan, make_plan
from orchestrator.planning.predictions import PriorKnowledge, plan_predictor, predict_plan
from orchestrator.search import predictor
from orchestrator.sweep.events import Budget
from orchestrator.sweep.fold import fold
from orchestrator.sweep.snapshot import Home
from tests.support.story import created

MODEL = {"kind": "llama", "hidden_size": 5120, "num_layers": 40, "num_heads": 40, "num_kv_heads": 40}
SPACE = {
    "pp": [1, 2, 4, 8],
    "tp": [1, 2, 4, 8],
    "dp_shard": [1, 2, 4, 8, 16, 32, 64],
    "dp_replicate": [1, 2, 4, 8],
    "zero_stage": [1, 2, 3],
    "micro_batch_size": [1, 2, 4, 8],
    "sequence_parallel": [True, False],
    "schedule": ["1f1b", "gpipe"],
    "compile": ["off", "block"],
    "attention": ["auto", "flash"],
    "recompute": ["full", "none", {"select": {"feed_forward.*": "all"}}],
    "num_workers": [0, 2],
    "pin_memory": [True, False],
    "precision": ["O1", "O2"],
}
MORE = {"num_workers": [0, 2, 4], "offload_optimizer": [True, False], "loss_chunks": [1, 4, 8]}
MOST = {
    **MORE,
    "num_workers": [0, 2, 4, 6, 8],
    "recompute": [*SPACE["recompute"], *({"full": count} for count in (1, 2, 3, 4, 5, 6, 8, 10))],
}
SIZES = {"100k": SPACE, "1m": {**SPACE, **MORE}, "8m": {**SPACE, **MOST}}
"""Spaces by about how many candidates their legal layouts have."""


def sweep_of(space: dict[str, Any], folder: Path) -> tuple[SweepSpec, Topology]:
    """The sweep over that space and its nodes."""
    content = {
        "name": "wide",
        "workload": {"model": {**MODEL, "ffn_hidden_size": 13824}, "seq_length": 4096, "global_batch_size": 512},
        "cluster": {
            "kind": "simulated",
            "num_nodes": 8,
            "devices_per_node": 8,
            "simulation": {"accelerator": "h100"},
        },
        "baseline": {"dp_shard": 64, "zero_stage": 3, "micro_batch_size": 1, "recompute": "full"},
        "space": space,
        "budget": {"max_trials": 20},
    }
    (folder / "wide.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    spec = load_sweep(folder / "wide.yaml")
    topology = known_topology(spec, Home(folder / "home"))
    assert topology is not None
    return spec, topology


def measure(size: str) -> dict[str, float]:
    """Seconds of plan, predictions and first proposal, and the memory they take."""
    with TemporaryDirectory() as folder:
        spec, topology = sweep_of(SIZES[size], Path(folder))
    meter = Meter()
    plan = make_plan(spec, topology)
    found = meter.read("plan")
    predict_plan(plan, spec, topology)
    found |= meter.read("predictions")
    search = make_search(spec, plan, topology, PriorKnowledge())
    state = fold([created(workload=spec.to_workload(), budget=Budget(max_trials=20))])
    assert search.suggest(1, state) is not None
    found |= meter.read("proposal")
    return {"num_candidates": len(plan.candidates), "num_combinations": plan.product_size, **found, **meter.memory()}


def compare(size: str) -> dict[str, float]:
    """The best candidate drawn from a space that is not listed, and the best of the whole space."""
    with TemporaryDirectory() as folder:
        spec, topology = sweep_of(SIZES[size], Path(folder))
    drawn = make_plan(spec, topology)
    assert drawn.beyond is not None, "the space is small enough to be listed"
    planning.MAX_ENUMERATED = predictor.MAX_CANDIDATES = len(drawn.beyond.space) + 1
    whole = make_plan(spec, topology)
    score = best_score(whole, spec, topology)
    return {
        "num_legal": len(whole.candidates),
        "num_drawn": len(drawn.candidates),
        "best_of_drawn": best_score(drawn, spec, topology),
        "best_of_all": score,
        "loss_percent": 100 * (1 - best_score(drawn, spec, topology) / score),
    }


def best_score(plan: Plan, spec: SweepSpec, topology: Topology) -> float:
    """Tokens per second and device, times the probability to fit, of the best candidate by the cost model."""
    workload = spec.to_workload()
    found = plan_predictor(plan, workload, topology, objective=spec.to_objective(topology))
    speeds = workload.tokens_per_step / found.estimates.step_s / found.inputs.world_size
    return float(np.max(speeds * found.probability_fits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="100k")
    parser.add_argument("--beyond", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = (compare if arguments.beyond else measure)(arguments.size)
    print(json.dumps(found) if arguments.json else text(found))


if __name__ == "__main__":
    main()
