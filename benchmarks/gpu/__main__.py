"""What a machine with accelerators really does: one command of at most ten minutes, with nothing but torch installed.

Trains models of ours on every device, compares dry runs with the allocator, compiles with empty caches, injects faults
into gangs. Each part runs in a process of its own with a deadline, and either has rows or says why not. Figures are
written as they come, so what was measured before an interruption is kept. Runs on CPUs too, with tiny models.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --parts training,memory --budget-s 300 --json
    python -m benchmarks.gpu --device cpu --quick
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import ROOT
from benchmarks.gpu.child import NOT_HERE, run_process
from benchmarks.gpu.machine import describe
from benchmarks.gpu.parts import NAMES, Part, Setting, known
from benchmarks.gpu.report import file_name, markdown, row_text

MEASURED = ROOT / "docs" / "measured"


def main() -> None:
    args = parse(sys.argv[1:])
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as folder:
        machine = describe(args.device, Path(folder))
        result: dict[str, Any] = {"machine": machine, "quick": args.quick, "budget_s": args.budget_s, "parts": []}
        for part in [known(name) for name in args.parts]:
            left_s = args.budget_s - (time.monotonic() - start_s)
            result["parts"].append(run_part(part, machine, left_s, folder=Path(folder), quick=args.quick))
            result["took_s"] = round(time.monotonic() - start_s, 1)
            keep(result, args.out)
    print(json.dumps(result, indent=1) if args.json else markdown(result))
    if not any(part["rows"] for part in result["parts"]):
        sys.exit(1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of Markdown")
    parser.add_argument(
        "--out", type=Path, help="folder for gpu-DEVICE.json and .md (default: docs/measured; of CPUs none)"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "rocm", "xpu", "npu"], default="auto")
    parser.add_argument("--parts", type=parts_of, default=NAMES, help=f"some of {','.join(NAMES)} (default: all)")
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for all parts (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny models and few repetitions: does all of it work?")
    args = parser.parse_args(arguments)
    if args.budget_s <= 0:
        parser.error(f"--budget-s {args.budget_s:g}: give a number of seconds above 0")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        parser.error(f"--out {args.out}: this is no folder")
    return args


def parts_of(text: str) -> tuple[str, ...]:
    """Names of parts, in the order in which they run."""
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    for name in wanted:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"there is no part {name!r}; there are {', '.join(NAMES)}")
    return tuple(name for name in NAMES if name in wanted)


def run_part(part: Part, machine: dict[str, Any], left_s: float, *, folder: Path, quick: bool) -> dict[str, Any]:
    """Run one part within what is left of the budget; its rows, and why there are not more of them."""
    told: dict[str, Any] = {"name": part.name, "shows": part.shows, "rows": [], "why": "", "took_s": 0.0}
    if machine["num_devices"] < part.least_devices:
        return told | {"why": f"needs {part.least_devices} devices, here is {machine['num_devices']}"}
    if left_s < part.least_s:
        return told | {
            "why": f"left out: {max(0.0, left_s):.0f} s of the budget were left, it wants {part.least_s:.0f}"
        }
    limit_s = min(part.limit_s, left_s)
    rows = folder / f"{part.name}.rows"
    setting = Setting(
        device=machine["kind"],
        num_devices=machine["num_devices"],
        quick=quick,
        folder=str(folder),
        rows=str(rows),
        until_s=time.time() + limit_s,
    )
    command = [sys.executable, "-m", "benchmarks.gpu.child", part.function, setting.to_json()]
    shown = Shown(part, rows)
    ended = run_process(command, folder / f"{part.name}.log", timeout_s=limit_s, while_waiting=shown)
    told |= {"rows": shown.rows(), "took_s": round(ended.seconds, 1)}
    if ended.code is None:
        told["why"] = f"ended after {limit_s:.0f} s, all that it was given"
    elif ended.code == NOT_HERE:
        told["why"] = ended.last_line
    elif ended.code:
        told["why"] = f"failed with exit status {ended.code}: {ended.last_line}"
        told["log"] = ended.text.splitlines()[-30:]
    if told["why"]:
        print(f"{part.name}: {told['why']}", file=sys.stderr, flush=True)
    return told


class Shown:
    """Shows on the terminal the rows that a part has told by now."""

    def __init__(self, part: Part, path: Path) -> None:
        self._part, self._path, self._shown = part, path, 0

    def rows(self) -> list[dict[str, Any]]:
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True) if self._path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def __call__(self) -> None:
        rows = self.rows()
        for row in rows[self._shown :]:
            print(f"{self._part.name}: {row_text(row)}", file=sys.stderr, flush=True)
        self._shown = len(rows)


def keep(result: dict[str, Any], out: Path | None) -> None:
    """Write what there is by now. A CPU's figures go nowhere unless a folder is named."""
    is_cpu = result["machine"]["kind"] == "cpu"
    if out is None and is_cpu:
        return
    folder = out or MEASURED
    folder.mkdir(parents=True, exist_ok=True)
    base = folder / file_name(result["machine"])
    base.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    base.with_suffix(".md").write_text(markdown(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
