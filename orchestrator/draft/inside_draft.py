"""Drafts ``space.inside``: knobs for which the program has no option.

A knob is omitted if the source does the same in code. Knobs that do not change the training are proposed; the others
are written as comments, for the user to decide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.draft.observed import Detected
from orchestrator.draft.program_reading import ReadProgram, worker_counts
from orchestrator.draft.static_reading import SourceFile
from orchestrator.space.inside import ARGUMENTS, MICRO_BATCH
from orchestrator.space.knobs import AS_IS

TORCH_MODULES = frozenset(
    ("torch", "torchvision", "timm", "lightning", "pytorch_lightning", "accelerate", "transformers")
)
"""A program that imports one of these trains with PyTorch."""
_ITERABLE = frozenset(("IterableDataset", "IterableWrapper"))
_AUTOCAST = frozenset(("autocast", "GradScaler", "bfloat16", "half", "Accelerator", "Fabric", "Trainer", "deepspeed"))
_CHECKPOINT = frozenset(("checkpoint", "checkpoint_sequential", "checkpoint_wrapper", "gradient_checkpointing_enable"))
_REPEATED = frozenset(("ModuleList", "TransformerEncoderLayer", "TransformerEncoder", "from_pretrained", "from_config"))
_CONVOLUTIONS = frozenset(("Conv2d", "resnet18", "resnet34", "resnet50", "resnet101", "create_model"))


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideDraft:
    """Section ``space.inside`` of a draft."""

    proposed: dict[str, Any] = field(default_factory=dict)
    present: dict[str, Any] = field(default_factory=dict)
    """Current values in the program's code, for ``baseline``."""
    offered: dict[str, Any] = field(default_factory=dict)
    """Knobs that are written as comments."""


def draft_inside(
    source: SourceFile | None,
    program: ReadProgram,
    detected: Detected,
    sizes: Sequence[int],
    *,
    is_gpu: bool,
    devices: int,
    cores: int,
) -> InsideDraft:
    """Proposals for a program whose settings no framework recipe can read.

    Args:
        sizes: micro-batch sizes to propose.
        cores: of a device's share.
        looked: observations of the program, which take precedence over its source.
    """
    if source is None or source.problem or not source.modules & TORCH_MODULES:
        return InsideDraft()
    if source.fixed:
        batch = {MICRO_BATCH: list(sizes)} if program.has_batch_in_code and len(sizes) > 1 else {}
        return InsideDraft(proposed=batch | {ARGUMENTS: dict(_training_arguments(source, is_gpu=is_gpu, cores=cores))})
    loader = source.loader_arguments or {}
    workers = detected.facts.num_workers if detected.is_seen else loader.get("num_workers", 0)
    has_loader = source.loader_arguments is not None and not source.names & _ITERABLE and "**" not in loader
    proposed: dict[str, Any] = {}
    present: dict[str, Any] = {}
    if has_loader and "workers" not in program.roles and isinstance(workers, int):
        proposed["num_workers"] = worker_counts(workers, cores)
        present = {"num_workers": workers} if workers else {}
    if has_loader and is_gpu and loader.get("pin_memory", False) is False:
        proposed["pin_memory"] = [False, True]
    more = dict(_of_computation(source, program, devices))
    fit = ("precision", "recompute", "ddp_bucket_mb") if is_gpu else ()
    return InsideDraft(
        proposed=proposed | {name: values for name, values in more.items() if name in fit},
        present=present,
        offered={name: values for name, values in more.items() if name not in fit},
    )


def _of_computation(source: SourceFile, program: ReadProgram, devices: int) -> Iterator[tuple[str, Any]]:
    names, roles = source.names, program.roles
    if not names & _AUTOCAST and not roles & {"dtype", "amp"}:
        yield "precision", ["O0", "O1"]
    if names & _REPEATED and not names & _CHECKPOINT and "checkpointing" not in roles:
        yield "recompute", ["none", "full"]
    if "DistributedDataParallel" in names and devices > 1:
        yield "ddp_bucket_mb", [AS_IS, 100]
    if names & _CONVOLUTIONS and "channels_last" not in names:
        yield "memory_format", ["nchw", "nhwc"]
    if names & _REPEATED and "compile" not in names | roles:
        yield "compile", ["off", "block"]


def _training_arguments(source: SourceFile, *, is_gpu: bool, cores: int) -> Iterator[tuple[str, Any]]:
    """Arguments of transformers' Trainer that change speed or memory and not the training."""
    present = source.fixed.get("dataloader_num_workers")
    counts = [count for count in worker_counts(0, cores) if count not in (0, present)]
    if counts:
        yield "dataloader_num_workers", [AS_IS, *counts]
    for name, value in {"gradient_checkpointing": True, "bf16": True}.items() if is_gpu else ():
        if source.fixed.get(name) != value and not (name == "bf16" and source.fixed.get("fp16")):
            yield name, [AS_IS, value]
