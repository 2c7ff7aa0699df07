"""False fits, false alarms and errors of the peak memory predicted for custom programs from their first trials.

Every program of ``train.py`` runs as a trial does, with the hook, over a grid of micro-batches, recompute, precision.
Its baseline and one or two further trials drawn at random are what the search knows; all others are predicted by the
guided sampler's own predictor and compared with their measured peaks, at limits between all neighbouring peaks.

    python -m benchmarks.program_memory --out memory.json             measure what is missing there, then judge
    python -m benchmarks.program_memory --out memory.json --judge     only judge

Peaks are those of the fullest rank's resident set. ``tensors`` judges the same for the bytes that the hook counted,
which is what an accelerator's allocator sees.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.program_memory.judge import PROGRAMS, Run, report
from cluster.base import Deadlines, GangEnded, GangLaunch
from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import Pool, cpu_model
from cluster.local import LocalCluster
from orchestrator.program.candidate_command import RUNNER
from trials.files import to_json
from trials.outcome import Measured, Outcome
from trials.script.command import ScriptCommand
from trials.spec import Protocol

BATCHES = (1, 2, 4, 8, 16, 32)
RECOMPUTED = (2, 8, 32)
LOW = (4, 16)
PROTOCOL = Protocol(min_warmup_steps=2, max_warmup_steps=2, num_steps=2, max_steps=2)
DEADLINE_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="measured runs; kept, so that it can be interrupted")
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--judge", action="store_true", help="measure nothing")
    options = parser.parse_args()
    runs = [Run(**one) for one in json.loads(options.out.read_text())] if options.out.exists() else []
    if not options.judge:
        with tempfile.TemporaryDirectory(prefix="program-memory-") as folder:
            node = discover_node(device="cpu", num_devices=2)
            with LocalCluster(Path(folder), node, preload=()) as cluster:
                for run in _missing(options.programs, runs):
                    try:
                        found = _measure(cluster, run)
                    except RuntimeError as error:
                        print(error, file=sys.stderr, flush=True)
                        continue
                    print(found, file=sys.stderr, flush=True)
                    runs.append(found)
                    options.out.write_text(json.dumps([to_json(one) for one in runs], indent=1))
    print(f"{cpu_model()}, 1 thread per rank")
    print(report(runs))


def _missing(programs: list[str], runs: list[Run]) -> Iterator[Run]:
    known = {run.key for run in runs}
    settings = [(batch, False, False) for batch in BATCHES]
    settings += [(batch, True, False) for batch in RECOMPUTED] + [(batch, False, True) for batch in LOW]
    for program in programs:
        for batch, recompute, low in settings:
            run = Run(program=program, batch=batch, recompute=recompute, low=low)
            if run.key not in known:
                yield run


def _measure(cluster: LocalCluster, run: Run) -> Run:
    outcome = _launched(cluster, run)
    if not isinstance(outcome, Measured):
        raise RuntimeError(f"{run} failed: {outcome}")
    found = outcome.measurement
    assert found.findings.script is not None, "the trial ran a program"
    facts: dict[str, Any] = to_json(found.findings.script.facts)
    return Run(
        program=run.program,
        batch=run.batch,
        recompute=run.recompute,
        low=run.low,
        peak_bytes=found.peak_bytes,
        facts={name: value for name, value in facts.items() if value is not None and name.endswith("_bytes")}
        | {"parameter_bytes_local": found.findings.script.facts.parameter_bytes_local},
    )


def _launched(cluster: LocalCluster, run: Run) -> Outcome:
    arguments = (*PROGRAMS[run.program].arguments, "--batch", str(run.batch))
    arguments += ("--recompute",) * run.recompute + ("--bf16",) * run.low
    ranks = PROGRAMS[run.program].ranks
    command = ScriptCommand(
        argv=(sys.executable, str(Path(__file__).with_name("train.py")), *arguments),
        cwd=str(Path(__file__).parent),
        protocol=PROTOCOL,
        num_devices=ranks,
        tokens_per_step=run.batch * ranks,
        samples_per_step=run.batch * ranks,
        env=(("OMP_NUM_THREADS", "1"), ("ACCELERATE_USE_CPU", "true"), ("DS_ACCELERATOR", "cpu")),
    )
    placement = Pool(cluster.topology).place(world_size=ranks, tp=1, isolation="node")
    assert placement is not None, "the cluster was made for as many"
    attempt = uuid4().hex[:8]
    cluster.launch(
        GangLaunch(
            attempt_id=attempt,
            token=attempt,
            runner=RUNNER,
            spec=to_json(command),
            placement=placement,
            deadlines=Deadlines(starting_s=DEADLINE_S, warmup_s=DEADLINE_S),
        )
    )
    while True:
        for event in cluster.poll(1.0):
            if isinstance(event, GangEnded):
                return event.outcome


if __name__ == "__main__":
    main()
