"""What the free texts of a published row say: bandwidth of the network, number format."""

from __future__ import annotations

import re
from collections.abc import Mapping

FORMATS = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "tf32": "tf32",
    "fp8": "float8",
    "mxfp8": "float8",
    "nvfp4": "float4",
}

_INSIDE = re.compile(r"\bin(?:side)? (?:the )?node|\bintra\b|\bone node\b", re.IGNORECASE)
_PER_DEVICE = re.compile(r"(?:\bper |/ ?)(?:GPU|NPU|device|card|accelerator|chip)\b", re.IGNORECASE)
_PORT = re.compile(r"\b(?:[HNX]DR|ConnectX|CX-?\d|Slingshot)", re.IGNORECASE)
_OF_NODE = re.compile(r"\bnode|\binter|\btotal|\baggregate|\bhost\b|\bmachine", re.IGNORECASE)

_WORDS = (
    ("nvfp4", re.compile(r"nv-?fp4|\bfp4\b", re.IGNORECASE)),
    ("fp8", re.compile(r"(?:mx)?fp8|float8", re.IGNORECASE)),
    ("bf16", re.compile(r"\bbf16\b|bfloat16", re.IGNORECASE)),
    ("fp16", re.compile(r"\bfp16\b|(?<!b)float16|half precision", re.IGNORECASE)),
)
_BEFORE_BFLOAT16 = re.compile(r"\b20(?:1\d|2[01])\b")


def network_bytes_per_s(text: str, devices_per_node: float) -> float | None:
    """Bytes per second and device from texts like ``8x200 Gb/s``, ``800 Gb/s between nodes`` or ``400 Gb/s per GPU``.

    Links inside a node do not count. A rate is a node's, unless stated to be a device's; the bare rate of a port
    (``NDR 400 Gb/s``) does not tell how many there are. Devices joined by Ethernet inside a node have ports of their
    own between nodes, whatever adapters the host has. None: not stated.
    """
    if any(_INSIDE.search(clause) and "Ethernet" in clause for clause in text.split(";")):
        return None
    if "OmniPath" in text:
        return 4 * 100e9 / 8 / devices_per_node
    rates = [_clause_rate(clause, devices_per_node) for clause in text.split(";") if not _INSIDE.search(clause)]
    return max((rate for rate in rates if rate), default=None)


def _clause_rate(clause: str, devices_per_node: float) -> float | None:
    text = re.sub(r"Gbit", "Gb", clause.replace("\N{MULTIPLICATION SIGN}", "x"))
    several = re.findall(r"(\d+)x ?(?:[A-Za-z0-9-]+ )*?(\d+) ?Gb", text)
    several += [(count, rate) for rate, count in re.findall(r"(\d+) ?Gb(?:/s|ps)? ?x ?(\d+)", text)]
    single = [("1", rate) for rate in re.findall(r"(\d+) ?Gb(?:/s|ps)", text)]
    rates = [float(count) * float(rate) * 1e9 / 8 for count, rate in several or single]
    if not rates or (not several and _PORT.search(text) and not (_PER_DEVICE.search(text) or _OF_NODE.search(text))):
        return None
    return max(rates) / (1.0 if _PER_DEVICE.search(text) else devices_per_node)


def stated_format(f: Mapping[str, str]) -> str:
    """The word for the number format (a key of ``FORMATS``) that a row's other texts say; empty where none or several
    do."""
    for names in (("precision_detail", "other_flags", "framework", "model"), ("notes",)):
        text = " ".join(f[name] for name in names)
        found = [word for word, pattern in _WORDS if pattern.search(text)]
        # 8-bit formats multiply what is kept in 16 bits; texts tell both.
        narrow = [word for word in found if word in ("nvfp4", "fp8")] or found
        if len(narrow) == 1:
            return narrow[0]
    return ""


def silent_format(f: Mapping[str, str], has_bfloat16: bool) -> str:
    """The format of 16 bits that a row means which says nothing: fp16 before bfloat16 had come into use, be it that the
    device lacks it or that the software is of 2021 or before."""
    return "bf16" if has_bfloat16 and not _BEFORE_BFLOAT16.search(f["framework"]) else "fp16"


_HIDES_COLLECTIVES = re.compile(r"tp[-_ ]comm[-_ ]overlap|async[-_ ]?tp|\bmc2\b", re.IGNORECASE)
_HIDES_REDUCTION = re.compile(r"overlap[-_ ]grad[-_ ]reduce", re.IGNORECASE)
_HIDES_GATHERING = re.compile(r"overlap[-_ ]param[-_ ]gather", re.IGNORECASE)
_NORM_KERNEL = re.compile(
    r"fused[-_ ]?(?:rms|layer|ln)(?:[-_ ]?norm)?|(?:rms|layer)[-_ ]?(?:norm)?[-_ ]?kernel|rms[-_ ]?norm[-_ ]fus",
    re.IGNORECASE,
)
_OFF = re.compile(r"\s*[=:]?\s*(?:false|none|no|off|0|disabled)\b", re.IGNORECASE)

PERFORMANCE_RECIPES = ("nemo", "bridge")
"""Frameworks whose recipes overlap what can be overlapped unless they say otherwise."""
IN_BUCKETS = (*PERFORMANCE_RECIPES, "ddp", "fsdp", "torchtitan", "composer", "oneflow", "libai")
"""Frameworks that reduce gradients in buckets during the backward pass by default."""


def says(text: str, pattern: re.Pattern[str]) -> bool | None:
    """Whether a text switches something on (True) or off (False); None where it does not name it."""
    found = pattern.search(text)
    return None if found is None else not (_OFF.match(text, found.end()) or _NO.search(text[: found.start()]))


_NO = re.compile(r"\b(?:no|without|non)[- ]$", re.IGNORECASE)


_PLAIN_ATTENTION = re.compile(r"(?:no|false|none|eager|math|naive|torch|megatron|unfused)\b", re.IGNORECASE)


def is_fused_attention(text: str) -> bool:
    """Whether a text on attention (``yes``, ``no``, the name of a kernel) means a fused kernel."""
    return _PLAIN_ATTENTION.match(text) is None


def overlaps(f: Mapping[str, str]) -> dict[str, float]:
    """What hides behind computation, by a row's flags and its framework's habit."""
    flags = f["other_flags"]
    by_habit = any(word in f["framework"].lower() for word in PERFORMANCE_RECIPES)
    collectives, gathering, reduction = (
        says(flags, pattern) for pattern in (_HIDES_COLLECTIVES, _HIDES_GATHERING, _HIDES_REDUCTION)
    )
    in_buckets = any(word in f["framework"].lower() for word in IN_BUCKETS)
    return {
        "hides_collectives": float(by_habit if collectives is None else collectives),
        "hides_gathering": float(by_habit if gathering is None else gathering),
        "hides_reduction": float(in_buckets if reduction is None else reduction),
        # Megatron's interleaved schedule overlaps them unless --no-overlap-p2p-communication is given.
        "hides_transfers": 1.0,
    }


def norms(f: Mapping[str, str]) -> str:
    """``fused`` or ``loose`` where a row's texts tell how norms are made, else empty."""
    stated = says("; ".join((f["flash_attn"], f["other_flags"], f["precision_detail"])), _NORM_KERNEL)
    return "" if stated is None else "fused" if stated else "loose"
