"""Searches of made problems, in which memory binds.

python -m benchmarks.search.made [--half tune|report] [--families buffers mixed/large] [--problems 2] [--json]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Sequence

from benchmarks.search.made.judge import judge_all
from benchmarks.search.made.problem import NUM_PER_FAMILY, problem_names
from benchmarks.search.made.tables import lines, report

COMPARED = ("guided", "tpe", "plain_order", "random")


def main(argv: Sequence[str] | None = None) -> None:
    """Search and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=["tune", "report"], default="tune", help="problems to tune on, or to report")
    parser.add_argument("--families", nargs="+", help="only families whose name contains one of these")
    parser.add_argument("--problems", type=int, default=NUM_PER_FAMILY, help="numbers per family, both halves together")
    parser.add_argument("--samplers", nargs="+", choices=COMPARED, default=list(COMPARED))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes; all CPU cores")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    names = list(problem_names(options.half, options.families, options.problems))
    judged = list(judge_all(names, options.samplers, options.seeds, options.jobs))
    if not judged:
        parser.error("no problem has such a name")
    found = report(judged, options.samplers)
    print(json.dumps(found, indent=1) if options.json else "\n".join(lines(found)))


if __name__ == "__main__":
    main()
