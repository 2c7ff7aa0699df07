"""The figures as Markdown: what was measured, on how many devices, with which versions; a table for each part."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any


def file_name(machine: Mapping[str, Any], *, quick: bool) -> str:
    """``gpu-nvidia-h200``; with a count where there are several; quick runs have files of their own."""
    slug = re.sub(r"[^a-z0-9]+", "-", machine["name"].lower()).strip("-")
    count = f"-x{machine['num_devices']}" if machine["num_devices"] > 1 and machine["kind"] != "cpu" else ""
    return f"gpu-{slug}{count}{'-quick' if quick else ''}"


def markdown(result: Mapping[str, Any]) -> str:
    machine = result["machine"]
    command = "python -m benchmarks.gpu --quick" if result["quick"] else "python -m benchmarks.gpu"
    lines = [f"# Measured on {_count(machine)}", "", "```", command, "```", "", _versions(machine)]
    if result["quick"]:
        lines += ["", "A quick run with tiny models: it shows what works; its times, and memory on CPUs, mean nothing."]
    if machine["kind"] != "cpu" and not machine["packages"].get("PyYAML"):
        lines += ["", "No MFU: the catalogue of peaks is read by PyYAML, which is not installed."]
    for part in result["parts"]:
        lines += ["", f"## {part['name'].capitalize()}", "", part["shows"]]
        if part["rows"]:
            lines += ["", *_table(part["rows"])]
        if (part["torch"], part["commit"]) != (machine["torch"], machine["commit"]):
            lines += ["", f"Measured by an earlier call: torch {part['torch']}, commit {part['commit'] or 'unknown'}."]
        if part["why"]:
            lines += ["", f"{'Then: ' if part['rows'] else 'No figures: '}{part['why']}."]
    return "\n".join(lines)


def row_text(row: Mapping[str, Any]) -> str:
    """A row on one line."""
    return ", ".join(f"{key} {_cell(value)}" for key, value in row.items() if value not in (None, ""))


def _count(machine: Mapping[str, Any]) -> str:
    if machine["kind"] == "cpu":
        return f"CPUs alone: {machine['cores']} cores, {machine['name']}"
    return f"{machine['num_devices']} x {machine['name']}"


def _versions(machine: Mapping[str, Any]) -> str:
    memory = machine["device_memory_bytes"]
    facts = [
        f"torch {machine['torch']}",
        machine["cuda"] and f"CUDA {machine['cuda']}",
        machine["nccl"] and f"NCCL {machine['nccl']}",
        machine["cudnn"] and f"cuDNN {machine['cudnn']}",
        machine["driver"] and f"driver {machine['driver']}",
        memory and f"{memory / 2**30:.0f} GiB per device",
        f"Python {machine['python']}",
        f"{machine['cores']} cores, {machine['host_memory_bytes'] / 2**30:.0f} GiB host memory",
        *(f"{name} {version}" for name, version in machine["packages"].items() if version),
        machine["commit"] and f"commit {machine['commit']}",
    ]
    return ", ".join(fact for fact in facts if fact) + "."


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if value not in (None, "")))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        lines.append("| " + " | ".join(_cell(row.get(column)).replace("|", "\\|") for column in columns) + " |")
    return lines


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return " ".join(str(value).split())
