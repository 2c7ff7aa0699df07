"""Does the suite notice faults? Plants one fault at a time in a copy of the tree and runs the tests of its room.

    python -m benchmarks.mutants choose faults.json --seed 1 --count 40
    python -m benchmarks.mutants run faults.json results.json

Kinds of faults, in equal numbers: ``bound`` (``<`` for ``<=``), ``sign`` (``+`` for ``-``, ``*`` for ``/``),
``condition`` (a conditional expression turned around), ``lost`` (a call for its effect left out), ``swapped`` (the
values of two keyword arguments exchanged). Places are drawn uniformly from all functions of the product. A fault is
stored with its function and the text that it replaces, so that it can be planted again after modules have moved; one
whose place is gone is reported as such. A fault counts as found when a test fails or errs within ``--limit-s``.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("orchestrator", "cluster", "trials")
KINDS = ("bound", "sign", "condition", "lost", "swapped")
_COMPARISONS = {"Lt": "<=", "LtE": "<", "Gt": ">=", "GtE": ">"}
_ARITHMETIC = {"Add": "-", "Sub": "+", "Mult": "/", "Div": "*"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One change of a source text, inside one function."""

    kind: str
    path: str
    function: str
    """Qualified name of the function."""
    line: int
    column: int
    old: str
    new: str


def places(path: Path, relative: str) -> Iterator[Fault]:
    """All faults that could be planted in a file."""
    text = path.read_text()
    lines = text.splitlines()

    def visit(node: ast.AST, names: tuple[str, ...], is_function: bool) -> Iterator[Fault]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inside = is_function or not isinstance(child, ast.ClassDef)
                yield from visit(child, (*names, child.name), inside)
                continue
            if is_function and _is_plain(child, lines) and (change := _change(child)) is not None:
                kind, new = change
                old = lines[child.lineno - 1][child.col_offset : child.end_col_offset]
                yield Fault(
                    kind=kind,
                    path=relative,
                    function=".".join(names),
                    line=child.lineno,
                    column=child.col_offset,
                    old=old,
                    new=new,
                )
            yield from visit(child, names, is_function)

    yield from visit(ast.parse(text), (), False)


def _is_plain(node: ast.AST, lines: list[str]) -> bool:
    """Whether a node stands on one line of ASCII, where columns are the same in bytes and characters."""
    line = getattr(node, "lineno", None)
    return line is not None and line == getattr(node, "end_lineno", None) and lines[line - 1].isascii()


def _change(node: ast.AST) -> tuple[str, str] | None:
    """Kind and changed text of a node that can be wrong in one of the ways of :data:`KINDS`."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op).__name__ in _COMPARISONS:
            return "bound", f"{ast.unparse(left)} {_COMPARISONS[type(op).__name__]} {ast.unparse(right)}"
        case ast.BinOp(left=left, op=op, right=right) if type(op).__name__ in _ARITHMETIC and not _is_text(left, right):
            return "sign", f"(({ast.unparse(left)}) {_ARITHMETIC[type(op).__name__]} ({ast.unparse(right)}))"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return "condition", f"{ast.unparse(orelse)} if {ast.unparse(test)} else {ast.unparse(body)}"
        case ast.Expr(value=ast.Call()):
            return "lost", "None"
        case ast.Call(func=func, args=args, keywords=[first, second, *rest]) if first.arg and second.arg:
            if ast.unparse(first.value) == ast.unparse(second.value):
                return None
            swapped = [ast.keyword(first.arg, second.value), ast.keyword(second.arg, first.value), *rest]
            return "swapped", ast.unparse(ast.Call(func=func, args=args, keywords=swapped))
    return None


def _is_text(*nodes: ast.expr) -> bool:
    return any(
        isinstance(node, ast.JoinedStr | ast.List | ast.Tuple | ast.Set)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
        for node in nodes
    )


def choose(seed: int, count: int) -> list[Fault]:
    """``count`` faults, as many of each kind, in as many files."""
    draw = random.Random(seed)
    found: dict[str, list[Fault]] = {kind: [] for kind in KINDS}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for fault in places(path, str(path.relative_to(ROOT))):
                found[fault.kind].append(fault)
    chosen: list[Fault] = []
    while len(chosen) < count:
        fault = draw.choice(found[KINDS[len(chosen) % len(KINDS)]])
        if fault.path not in {other.path for other in chosen}:
            chosen.append(fault)
    return chosen


def locate(fault: Fault, root: Path) -> Fault | None:
    """The fault where its function stands now, None if the function or the text in it is gone."""
    moved = root / fault.path
    files = [moved] if moved.exists() else []
    files += [path for package in PACKAGES for path in sorted((root / package).rglob("*.py")) if path != moved]
    for path in files:
        same = [
            other
            for other in places(path, str(path.relative_to(root)))
            if (other.kind, other.function, other.old) == (fault.kind, fault.function, fault.old)
        ]
        if same:
            return min(same, key=lambda other: abs(other.line - fault.line) if path == moved else other.line)
    return None


def plant(fault: Fault, root: Path) -> None:
    """Changes the text."""
    path = root / fault.path
    lines = path.read_text().splitlines(keepends=True)
    line = lines[fault.line - 1]
    start, end = fault.column, fault.column + len(fault.old)
    assert line[start:end] == fault.old, f"{fault} does not stand there"
    lines[fault.line - 1] = line[:start] + fault.new + line[end:]
    path.write_text("".join(lines))


def tests_of(fault: Fault, root: Path) -> list[str]:
    """Test files that import the fault's module, then the others of its room, and the goldens."""
    module = fault.path.removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    needles = (f"{module} import", f"import {module}", f"from {package} import {name}")
    direct, room = [], []
    folder = "tests/" + "/".join(fault.path.split("/")[:2]).removesuffix(".py")
    for path in sorted((root / "tests").rglob("test_*.py")):
        relative = str(path.relative_to(root))
        if any(needle in path.read_text() for needle in needles):
            direct.append(relative)
        elif relative.startswith((folder, "tests/goldens")):
            room.append(relative)
    return [*direct, *room]


def is_found(fault: Fault, root: Path, python: str, limit_s: float) -> tuple[bool, str]:
    """Runs the tests on a copy of the tree with the fault. Whether one noticed, and what it was."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info"))
        plant(fault, copy)
        command = [
            python,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-m",
            "not exhaustive",
            "-p",
            "no:cacheprovider",
            *tests_of(fault, copy),
        ]
        environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired:
            return False, f"nothing failed within {limit_s:.0f} s"
        if done.returncode == 0:
            return False, done.stdout.strip().splitlines()[-1]
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return True, (failed or done.stdout.strip().splitlines()[-1:] or [done.stderr[-200:]])[0][:200]


def run(faults: list[Fault], *, python: str, limit_s: float, jobs: int) -> list[dict[str, object]]:
    """Every fault in a copy of its own, ``jobs`` at a time."""

    def one(fault: Fault) -> dict[str, object]:
        here = locate(fault, ROOT)
        if here is None:
            found, why = None, "its place is gone"
        else:
            found, why = is_found(here, ROOT, python, limit_s)
        verdict = {None: "gone", True: "found", False: "MISSED"}[found]
        print(
            f"{verdict:7} {fault.kind:9} {fault.path}:{fault.line} {fault.function}: {fault.old[:60]!r} | {why}",
            flush=True,
        )
        return {**asdict(fault), "found": found, "by": why}

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, faults))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    choosing = commands.add_parser("choose")
    choosing.add_argument("file", type=Path)
    choosing.add_argument("--seed", type=int, default=1)
    choosing.add_argument("--count", type=int, default=40)
    running = commands.add_parser("run")
    running.add_argument("file", type=Path)
    running.add_argument("results", type=Path)
    running.add_argument("--limit-s", type=float, default=600)
    running.add_argument("--jobs", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.command == "choose":
        chosen = [asdict(fault) for fault in choose(arguments.seed, arguments.count)]
        arguments.file.write_text(json.dumps(chosen, indent=1) + "\n")
        return
    faults = [Fault(**fault) for fault in json.loads(arguments.file.read_text())]
    results = run(faults, python=sys.executable, limit_s=arguments.limit_s, jobs=arguments.jobs)
    arguments.results.write_text(json.dumps(results, indent=1) + "\n")
    known = [result for result in results if result["found"] is not None]
    num_found = sum(bool(result["found"]) for result in known)
    print(f"{num_found} of {len(known)} faults found, {len(results) - len(known)} places gone")


if __name__ == "__main__":
    main()
