"""A sweep of very many trials over a space of many knobs, as ``explain SWEEP`` has to cope with."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from cluster.hardware.topology import Device, Topology
from orchestrator.config.sweep import SweepSpec, load_sweep
from orchestrator.planning.dry_runs import known_topology
from orchestrator.planning.planner import make_plan
from orchestrator.sweep.checkpoint import CheckpointWriter
from orchestrator.sweep.events import (
    AttemptEnded,
    AttemptLaunched,
    Budget,
    ControllerStarted,
    Hardware,
    LedgerEvent,
    TrialProposed,
)
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home
from tests.support.story import created, failures, measured
from trials.spec import Candidate

FILE = """\
name: wide
workload:
  model: {kind: llama, hidden_size: 5120, num_layers: 40, num_heads: 40, num_kv_heads: 40, ffn_hidden_size: 13824}
  seq_length: 4096
  global_batch_size: 512
cluster: {kind: simulated, num_nodes: 2, devices_per_node: 8, simulation: {accelerator: h100}}
baseline: {dp_shard: 16, zero_stage: 3, micro_batch_size: 1, recompute: full}
space:
  pp: [1, 2, 4]
  tp: [1, 2, 4, 8]
  dp_shard: [1, 2, 4, 8, 16]
  dp_replicate: [1, 2, 4]
  zero_stage: [1, 2, 3]
  micro_batch_size: [1, 2, 4, 8]
  sequence_parallel: [true, false]
  schedule: [1f1b, gpipe]
  compile: ["off", block]
  attention: [auto, flash]
  recompute: [full, none, {select: {"feed_forward.*": all}}]
  num_workers: [0, 2]
  pin_memory: [true, false]
  precision: [O1, O2]
budget: {max_trials: 1000000}
"""


def fill_wide(home: Home, name: str, num_trials: int, scratch: Path, *, seed: int = 0) -> Path:
    """The ledger of a sweep that has tried ``num_trials`` candidates of a large plan, in an order of chance; one in ten
    ran out of memory. Without a controller."""
    (scratch / "wide.yaml").write_text(FILE, encoding="utf-8")
    spec = load_sweep(scratch / "wide.yaml")
    topology = known_topology(spec, home)
    assert topology is not None
    with Ledger(home.sweep_folder(name)) as ledger:
        writer = CheckpointWriter(ledger)
        for event in _story(spec, topology, name, num_trials, seed):
            ledger.append(event)
            writer.write_if_due()
        ledger.put_document("spec", spec.to_json())
        ledger.put_document("tracking", {"uri": None})
        return ledger.path


def _story(spec: SweepSpec, topology: Topology, name: str, num_trials: int, seed: int) -> Iterator[LedgerEvent]:
    rng = random.Random(seed)
    candidates = list(make_plan(spec, topology).candidates)
    assert len(candidates) > num_trials, f"the plan has {len(candidates)} candidates only"
    baseline, at_s = candidates.pop(0), 1_700_000_000.0
    rng.shuffle(candidates)
    budget = Budget(max_trials=2 * num_trials, lost_attempts_per_trial=1)
    yield replace(
        created(at_s=at_s, sweep=name, budget=budget, workload=spec.to_workload(), num_legal=len(candidates)),
        devices=Hardware.of(topology),
        fingerprint={"device_memory_bytes": str(topology.nodes[0].device_memory_bytes)},
    )
    yield ControllerStarted(at_s=at_s, epoch=1, pid=1, host="head")
    oom = failures()["oom"]
    for number, candidate in enumerate([baseline, *candidates[: num_trials - 1]]):
        at_s += 60.0
        token, size = f"{number:032x}", candidate.layout.world_size
        ranks = tuple(Device(node=f"node{i // 8}", index=i % 8) for i in range(size))
        origin = "sampler" if number else "baseline"
        yield TrialProposed(at_s=at_s, trial=number, candidate=candidate, origin=origin, reason="at random")
        yield AttemptLaunched(at_s=at_s, trial=number, attempt=0, token=token, ranks=ranks, num_devices=size)
        outcome = oom if number and rng.random() < 0.1 else measured(_step_s(candidate, rng), world_size=size)
        yield AttemptEnded(at_s=at_s + 50.0, trial=number, token=token, outcome=outcome, device_seconds=800.0)


def _step_s(candidate: Candidate, rng: random.Random) -> float:
    """Seconds of a step: some knobs matter, the rest is noise."""
    layout = candidate.layout
    slower = 0.2 * layout.pp + 0.1 * math.log2(layout.tp) + 0.3 * bool(candidate.recompute.full)
    faster = 0.2 * (candidate.kernels.compile != "off") + 0.05 * math.log2(candidate.micro_batch_size)
    return 10.0 * math.exp(slower - faster + rng.gauss(0.0, 0.05)) * 16 / layout.world_size
