"""Searches of made problems, in which memory binds. Every run draws new problems.

python -m benchmarks.search.made [--problems 36] [--families buffers mixed/large] [--seed 4711] [--tuning] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Sequence

from benchmarks.search.made.judge import judge_all
from benchmarks.search.made.problem import problem_names
from benchmarks.search.made.tables import lines, report
from benchmarks.search.seeds import add_seed, chosen

COMPARED = ("guided", "tpe", "plain_order", "random")


def main(argv: Sequence[str] | None = None) -> None:
    """Search and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", help="only families whose name contains one of these")
    parser.add_argument("--problems", type=int, default=36, help="how many, drawn evenly from the families")
    add_seed(parser)
    parser.add_argument("--tuning", action="store_true", help="without structures that no choice should be made on")
    parser.add_argument("--samplers", nargs="+", choices=COMPARED, default=list(COMPARED))
    parser.add_argument("--seeds", type=int, default=3, help="searches by each random sampler")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; all CPU cores")
    parser.add_argument("--contrary", action="store_true", help="problems on which the cost model's order is wrong")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    seed = chosen(options.seed)
    names = problem_names(seed, options.problems, options.families, tuning=options.tuning, contrary=options.contrary)
    judged = list(judge_all(names, options.samplers, options.seeds, options.jobs))
    if not judged:
        parser.error("no problem has such a name")
    found = report(judged, options.samplers, seed)
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines(found)))


if __name__ == "__main__":
    main()
