"""What a machine with accelerators really does: one command of ten minutes, with torch and numpy alone.

Trains models of ours on every device, compares dry runs with the allocator, compiles with empty caches, injects faults
into gangs. Each part runs in a process of its own with a deadline, and either has rows or says why not. Figures are
written as they come, next to those of earlier calls; what was left out for lack of time is measured by another call.
Runs on CPUs too, with tiny models. Model FLOPs utilisation needs PyYAML, fp8 torchao.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --continue
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
from benchmarks.gpu.kept import Kept, num_measured
from benchmarks.gpu.machine import describe
from benchmarks.gpu.parts import NAMES, Part, Setting, known, read_rows, rows_path
from benchmarks.gpu.report import file_name, markdown, row_text

MEASURED = ROOT / "docs" / "measured"


def main() -> None:
    args = parse(sys.argv[1:])
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as name:
        folder = Path(name)
        machine = describe(args.device, folder)
        try:
            kept = Kept(machine, base_of(machine, args.out, quick=args.quick), quick=args.quick)
        except ValueError as error:
            sys.exit(f"error: {error}")
        waiting = [known(name) for name in args.parts if not (args.goes_on and kept.is_whole(name))]
        has_rows = not waiting
        for name in NAMES:
            give_rows(folder, name, kept.rows(name))
        while waiting:
            left_s = args.budget_s - (time.monotonic() - start_s)
            limit_s = left_s * share_of(waiting, machine["num_devices"])
            part = waiting.pop(0)
            part_result = run_part(part, machine, left_s, limit_s=limit_s, folder=folder, quick=args.quick)
            has_rows = has_rows or num_measured(part_result) > 0
            if not kept.put(part_result):
                print(f"{part.name}: the former figures are kept, which are more", file=sys.stderr, flush=True)
                give_rows(folder, part.name, kept.rows(part.name))
    print(json.dumps(kept.result(), indent=1) if args.json else markdown(kept.result()))
    if not has_rows:
        sys.exit(1)


def share_of(waiting: Sequence[Part], num_devices: int) -> float:
    """How much of the time that is left is for the first of these parts, when all that can run here get theirs."""
    return waiting[0].share_s / sum(
        part.share_s for part in waiting if part is waiting[0] or part.least_devices <= num_devices
    )


def base_of(machine: dict[str, Any], out: Path | None, *, quick: bool) -> Path | None:
    """Path of the files less their endings. A CPU's figures go nowhere unless a folder is named."""
    if out is None and machine["kind"] == "cpu":
        return None
    return (out or MEASURED) / file_name(machine, quick=quick)


def give_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Show later parts what a former call has measured."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    rows_path(folder, name).write_text(text, encoding="utf-8")


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
    parser.add_argument(
        "--continue", dest="goes_on", action="store_true", help="only what earlier calls have left out or cut short"
    )
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


def run_part(
    part: Part, machine: dict[str, Any], left_s: float, *, limit_s: float, folder: Path, quick: bool
) -> dict[str, Any]:
    """Run one part within its share of the budget; its rows, and why there are not more of them."""
    part_result: dict[str, Any] = {"name": part.name, "shows": part.shows, "rows": [], "why": "", "took_s": 0.0}
    part_result |= {"is_whole": False, "torch": machine["torch"], "commit": machine["commit"]}
    if machine["num_devices"] < part.least_devices:
        return part_result | {"why": f"needs {part.least_devices} devices, here is {machine['num_devices']}"}
    if left_s < part.least_s:
        return part_result | {
            "why": f"left out: {max(0.0, left_s):.0f} s of the budget were left, it wants {part.least_s:.0f}"
        }
    limit_s = min(max(limit_s, part.least_s), left_s)
    rows_path(folder, part.name).unlink(missing_ok=True)
    setting = Setting(
        device=machine["kind"],
        num_devices=machine["num_devices"],
        quick=quick,
        folder=str(folder),
        part=part.name,
        until_s=time.time() + limit_s,
    )
    command = [sys.executable, "-m", "benchmarks.gpu.child", part.function, setting.to_json()]
    shown = Shown(part, rows_path(folder, part.name))
    ended = run_process(command, folder / f"{part.name}.log", timeout_s=limit_s, while_waiting=shown)
    shown()
    rows = read_rows(rows_path(folder, part.name))
    part_result |= {"rows": rows, "took_s": round(ended.seconds, 1)}
    if ended.code is None:
        part_result["why"] = f"ended after {limit_s:.0f} s, its time limit"
    elif ended.code == NOT_HERE:
        part_result["why"] = ended.last_line
    elif ended.code:
        part_result["why"] = f"failed with exit status {ended.code}: {ended.last_line}"
        part_result["log"] = ended.text.splitlines()[-30:]
    elif num_left := len(rows) - num_measured(part_result):
        part_result["why"] = f"{num_left} of {len(rows)} rows were left out for lack of time, which --continue brings"
    part_result["is_whole"] = not part_result["why"]
    if part_result["why"]:
        print(f"{part.name}: {part_result['why']}", file=sys.stderr, flush=True)
    return part_result


class Shown:
    """Shows on the terminal the rows that a part has reported by now."""

    def __init__(self, part: Part, path: Path) -> None:
        self._part, self._path, self._shown = part, path, 0

    def __call__(self) -> None:
        rows = read_rows(self._path)
        for row in rows[self._shown :]:
            print(f"{self._part.name}: {row_text(row)}", file=sys.stderr, flush=True)
        self._shown = len(rows)


if __name__ == "__main__":
    main()
