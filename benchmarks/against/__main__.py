"""One table: what this tuner costs and finds next to Ray Tune, Ray Train, Optuna, Ax, plain PyTorch, MLflow and others.

    make bench                                     # all of it: at most 25 minutes on two idle cores
    python -m benchmarks.against --only search     # one part of it
    python -m benchmarks.against --json

Every part runs in a process of its own; ours and the peer take turns. Ratios are the peer's figure divided by ours,
lowest first: below 1, the peer is ahead. ``--write`` replaces the table in docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from benchmarks import ROOT
from benchmarks.against.rows import Row, table
from benchmarks.search.seeds import add_seed, chosen
from cluster.hardware.topology import cpu_model

PAGE = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- begin table -->", "<!-- end table -->"
SEARCH_PROGRAMS = ("resnet-loader", "resnet-cpu", "linear", "script-text", "script-ranks")
MAX_TRIALS = 30
STEP_CASES = ("single", "ddp", "fsdp2", "tp")


def orchestration(seed: int) -> Iterator[Row]:
    """No-op trials at 1, 2 and 8 at a time, and the start of a gang of two ranks."""
    del seed
    from benchmarks.overhead import __main__ as overhead

    peers = {"ray_tune": "Ray Tune, a process per trial", "ray_tune_reuse": "Ray Tune, `reuse_actors`"}
    for slots, trials in (((1, 2), 24), ((8,), 48)):
        samples = overhead.measure(trials, 3, slots)["samples"]
        for num in slots:
            for peer, name in peers.items():
                ours, theirs = samples[f"ours@{num}"], samples[f"{peer}@{num}"]
                what = f"no-op trial, {num} at a time"
                yield Row(what=what, peer_name=name, unit="ms", ours=tuple(ours), peer=tuple(theirs))
        if 2 in slots:
            ours, theirs = samples["ours"], samples["torch_trainer"]
            what = "start of a gang of two ranks"
            yield Row(what=what, peer_name="Ray Train's TorchTrainer", unit="s", ours=tuple(ours), peer=tuple(theirs))


def programs(seed: int) -> Iterator[Row]:
    """A training program of two ranks as a trial, and started by hand."""
    del seed
    from benchmarks.foreign_overhead import alternate

    runs = alternate(4, 40)
    for place, (what, unit) in enumerate((("custom program, start to end", "s"), ("custom program, step", "ms"))):
        ours, bare = (tuple(run[place] for run in runs[kind]) for kind in ("ours", "bare"))
        yield Row(what=what, peer_name="the bare command", unit=unit, ours=ours, peer=bare)


def search(seed: int) -> Iterator[Row]:
    """Trials until within 2% of the best, on synthetic programs drawn with a seed of their own."""
    from benchmarks.against.peers import optimisers
    from benchmarks.against.peers import search as theirs
    from benchmarks.search.generic.programs import MADE
    from benchmarks.search.generic.sweeps import search as ours

    made = [program for make in MADE if (program := make(seed)).name in SEARCH_PROGRAMS]
    found = tuple(float(ours(program, "guided", seed, MAX_TRIALS).to_best) for program in made)
    for name, make in optimisers().items():
        peer = []
        for program in made:
            peer.append(float(theirs(program, make, seed, MAX_TRIALS).to_best))
            print(f"{program.name}: {name} {peer[-1]:.0f}", file=sys.stderr, flush=True)
        yield Row(what="search, trials to 2% of the best", peer_name=name, unit="trials", ours=found, peer=tuple(peer))


def memory(seed: int) -> Iterator[Row]:
    """Predicted peak memory."""
    del seed
    from benchmarks.against.estimators import rows

    yield from rows()


def steps(seed: int) -> Iterator[Row]:
    """Steps of the built-in runner, and of loops written by hand."""
    del seed
    from benchmarks.runner.trial_speed import MODEL, Plan, cases, compare

    for name, case in cases(MODEL).items():
        if name not in STEP_CASES:
            continue
        for row in compare(name, case, Plan(7, 4, grad_norm=True))[0]:
            if row["peer"] not in case.peers.values():  # no loop by hand runs here
                continue
            what = f"step, built-in runner, {row['ours']}"
            ours, peer = tuple(row["turns_ours_s"]), tuple(row["turns_peer_s"])
            yield Row(what=what, peer_name=row["peer"], unit="s", ours=ours, peer=peer)


def records(seed: int) -> Iterator[Row]:
    """Recording trials in MLflow."""
    del seed
    from benchmarks.against.records import rows

    yield from rows()


PARTS: dict[str, Callable[[int], Iterator[Row]]] = {
    part.__name__: part for part in (orchestration, programs, search, memory, steps, records)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run")
    add_seed(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--write", action="store_true", help=f"replace the table in {PAGE.name}")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    seed = chosen(args.seed)
    if args.part:
        _run_part(args.part, seed)
        return
    load, begun_s = os.getloadavg()[0], time.monotonic()
    rows: list[Row] = []
    for part in args.only:
        started_s = time.monotonic()
        rows += _part(part, seed)
        print(f"{part}: {time.monotonic() - started_s:.0f} s", file=sys.stderr, flush=True)
    minutes = (time.monotonic() - begun_s) / 60
    about = (
        f"{len(os.sched_getaffinity(0))} cores of {cpu_model()}, {time.strftime('%d %B %Y')}, {minutes:.0f} minutes, "
        f"load average at the start {load:.1f}, seed {seed}."
    )
    if args.json:
        print(json.dumps({"about": about, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}, indent=2))
    else:
        print(f"{about}\n\n{table(rows)}")
    if args.write:
        _write(f"{about}\n\n{table(rows)}")


def _part(part: str, seed: int) -> list[Row]:
    argv = [sys.executable, "-W", "ignore", "-m", "benchmarks.against", "--part", part, "--seed", str(seed)]
    env = {"OMP_NUM_THREADS": "1", **os.environ, "RAY_TRAIN_V2_ENABLED": "1", "RAY_AIR_NEW_OUTPUT": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    made = subprocess.run(argv, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(made.stdout.splitlines()[-1])
    return [Row(**{**row, "ours": tuple(row["ours"]), "peer": tuple(row["peer"])}) for row in found]


def _run_part(part: str, seed: int) -> None:
    """Print the rows of a part as the last line of stdout, on which libraries print as well."""
    warnings.simplefilter("ignore")
    rows = [asdict(row) for row in PARTS[part](seed)]
    print("\n" + json.dumps(rows), flush=True)


def _write(content: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    PAGE.write_text(f"{head}{BEGIN}\n{content}\n{END}{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
