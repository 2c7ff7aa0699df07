"""The file of knobs without a flag: values to set, the outcome of each, and the fingerprint of the program.

``TUNE_CLUSTER_KNOBS`` is the path of a JSON file: ``{"version": 1, "knobs": {...}, "fingerprint": {...} or null,
"expect": {...} or null, "on_mismatch": "train_unchanged"}``. Values are spelled as in a sweep file:

==========================  =========================================  =================================================
name                        value                                      verified by
==========================  =========================================  =================================================
num_workers                 number, or "auto": hill climb in place     worker processes alive
prefetch_factor             number                                     the iterator's setting
pin_memory                  true, false                                page-locked tensors in a batch
persistent_workers          true, false                                the iterator's setting
precision                   "O0", "O1-bf16" ("O1-fp16" is refused)     number format of the first linear outputs
memory_format               "nhwc", "nchw"                             layout of the convolutions' weights and outputs
recompute                   "none", "full" (the repeated block)        blocks that run again in the backward pass
compile                     "off", "block", "model"                    graphs compiled
attention                   "auto", "math", "flash", "efficient",      operators of the first forward pass
                            "cudnn"
ddp_bucket_mb               number                                     the reducer's buckets
ddp_gradient_as_bucket_view true, false                                the reducer's setting
ddp_static_graph            true, false                                the reducer's setting
cudnn_benchmark             true, false                                read back
matmul_precision            "highest", "high", "medium"                another result of a product, read back
allocator                   text for PYTORCH_CUDA_ALLOC_CONF           read back
training_arguments          {name: value}                              read back
==========================  =========================================  =================================================

Each knob ends as ``applied``, ``refused`` or ``no_effect``, with evidence or a reason: a report line (``event: knob``)
in a trial, a line on stderr elsewhere. The program always continues to train.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, Callable

from .facts import world_size
from .roots import ROOTS, Root, repeated_block
from .steps import FOLDER_VARIABLE, emit, guarded

KNOBS_VARIABLE = "TUNE_CLUSTER_KNOBS"
VERSION = 1
SOURCE = "hook:torch"
APPLIED, REFUSED, NO_EFFECT = "applied", "refused", "no_effect"

NAMES = (
    *("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "precision", "memory_format", "recompute"),
    *("compile", "attention", "ddp_bucket_mb", "ddp_gradient_as_bucket_view", "ddp_static_graph", "cudnn_benchmark"),
    *("matmul_precision", "allocator", "training_arguments"),
)
Seen = Callable[[], "tuple[str, str]"]
"""Returns a knob's state and its evidence, after the first steps."""


class ProgramTraits:
    """Settings made by the program itself, and its fingerprint."""

    def __init__(self) -> None:
        self.has_autocast = False
        self.has_scaler = False
        self.has_no_sync = False
        self.has_checkpoint = False
        self.loader: str | None = None
        """Place at which the training loader is created: file, line, and index if the line creates several."""
        self.roots: list[str] = []

    def met(self, root: Root) -> str:
        """Record a root. Return its description."""
        model = root.model
        block = repeated_block(model)
        description = f"{type(model).__name__}, {sum(parameter.numel() for parameter in model.parameters())} parameters"
        description += f", {len(block.members)} x {block.name}" if block else ""
        self.roots.append(description)
        return description

    def fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint, after the first steps."""
        return {
            "torch": torch_version(),
            "roots": self.roots,
            "loader": self.loader,
            "world_size": world_size(),
            "autocast": self.has_autocast,
            "scaler": self.has_scaler,
            "no_sync": self.has_no_sync,
        }


def torch_version() -> str:
    """Return major and minor version of PyTorch."""
    return ".".join(str(sys.modules["torch"].__version__).split(".")[:2])


class Knobs:
    """The knobs of this process."""

    def __init__(self) -> None:
        self.wanted: dict[str, Any] = {}
        self.traits = ProgramTraits()
        self.mismatch: str | None = None
        """Difference between the program and the one that the file was written for."""
        self._fingerprint: dict[str, Any] | None = None
        self._expect: dict[str, Any] = {}
        self._refused: dict[str, str] = {}
        self._undo: dict[str, list[Callable[[], None]]] = {}
        self._seen: dict[str, list[Seen]] = {}
        self._is_reported = False

    def read(self, path: str) -> None:
        """Read the file.

        Raises:
            OSError: It cannot be read.
            ValueError: It is not a file of knobs.
        """
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if not isinstance(found, dict) or found.get("version") != VERSION or not isinstance(found.get("knobs"), dict):
            raise ValueError(f"{path} is not a knob file of version {VERSION}")
        self._fingerprint, self._expect = found.get("fingerprint"), found.get("expect") or {}
        self.wanted = found["knobs"]
        for name in self.wanted:
            if name not in NAMES:
                self.refuse(name, "unknown knob")

    def value(self, name: str) -> Any:
        """Return the value for a knob that was not refused; None if there is none."""
        return None if name in self._refused or self.mismatch is not None else self.wanted.get(name)

    def refuse(self, name: str, reason: str) -> None:
        """Refuse a knob that the program cannot take. What was done is undone after the first steps, when no backward
        pass depends on it."""
        if name not in self.wanted or name in self._refused:
            return
        self._refused[name] = reason
        if self._is_reported:
            self._report_refusal(name, reason)

    @guarded("refusals")
    def _report_refusal(self, name: str, reason: str) -> None:
        emit(SOURCE, event="knob", name=name, state=REFUSED, detail=reason)
        self._notice({name: (REFUSED, reason)})

    def attempt(self, name: str, apply: Callable[..., str | None], *args: Any) -> None:
        """Apply a knob; refuse it for the reason that ``apply`` returns or the error that it raises."""
        try:
            reason = apply(*args)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error)[:200]}"
        if reason:
            self.refuse(name, reason)

    def applied(self, name: str, seen: Seen, undo: Callable[[], None] | None = None) -> None:
        """Record that a knob is set, once for each root that it is set for.

        Args:
            seen: Check of its effect, called after the first steps.
            undo: Function that reverts it if necessary.
        """
        self._seen.setdefault(name, []).append(seen)
        if undo is not None:
            self._undo.setdefault(name, []).append(undo)

    def is_set(self, name: str) -> bool:
        """Whether a knob was set, perhaps for an earlier root."""
        return name in self._seen

    def is_expected(self, **found: Any) -> bool:
        """Compare the facts so far with the file's fingerprint; after the first difference nothing more is applied.

        Values of lists are looked up in the fingerprint's list.
        """
        for name, value in found.items() if self._fingerprint else ():
            wanted = (self._fingerprint or {}).get(name)
            same = value in wanted if isinstance(wanted, list) else value == wanted
            if not same and wanted is not None and self.mismatch is None:
                self.mismatch = f"{name} is {value!r}, but was {wanted!r} when these knobs were measured"
        return self.mismatch is None

    def is_loader_expected(self, site: str) -> bool:
        """Whether a loader created there is the one that the file is for; True if it names none."""
        wanted = (self._fingerprint or {}).get("loader")
        return wanted is None or site == wanted

    def meet(self, root: Root, args: Any, kwargs: Any) -> None:
        """Check before a root's first call whether it is the program's model."""
        torch = sys.modules["torch"]
        self.traits.has_autocast = self.traits.has_autocast or is_autocast_on(torch)
        self.is_expected(
            torch=torch_version(),
            world_size=world_size(),
            roots=self.traits.met(root),
            autocast=self.traits.has_autocast,
            scaler=self.traits.has_scaler,
        )

    @guarded("knobs reported")
    def report(self) -> None:
        """Report the outcome of each knob, once; nothing in a process without training."""
        if self._is_reported or not ROOTS.found:
            return
        self._is_reported = True
        try:
            self._report()
        finally:  # both keep modules alive
            self._seen.clear()
            self._undo.clear()

    def _report(self) -> None:
        for undo in (undo for name in self._refused for undo in self._undo.get(name, [])):
            undo()
        outcomes = {name: self._outcome(name) for name in self.wanted}
        for name, (state, detail) in outcomes.items():
            emit(SOURCE, event="knob", name=name, state=state, detail=detail)
        emit(SOURCE, event="fingerprint", fingerprint=self.traits.fingerprint())
        self._notice(outcomes)

    def _outcome(self, name: str) -> tuple[str, str]:
        if self.mismatch is not None and name not in self._seen:
            return REFUSED, f"the program differs from the measured one: {self.mismatch}"
        if name in self._refused:
            return REFUSED, self._refused[name]
        if name not in self._seen:
            return REFUSED, MISSING.get(name, "the program has nothing to apply it to")
        try:
            seen = [one() for one in self._seen[name]]
        except Exception as error:
            return NO_EFFECT, f"cannot be verified: {type(error).__name__}: {str(error)[:200]}"
        state = APPLIED if all(state == APPLIED for state, _ in seen) else NO_EFFECT
        return state, "; ".join(dict.fromkeys(detail for _, detail in seen))

    def _notice(self, outcomes: dict[str, tuple[str, str]]) -> None:
        """Print to stderr, outside of trials: one line for all applied knobs, and one for each other knob."""
        if os.environ.get(FOLDER_VARIABLE) or os.environ.get("RANK", "0") != "0":
            return
        done = [f"{name} ({detail})" for name, (state, detail) in outcomes.items() if state == APPLIED]
        if done:
            _print_error("applied " + "; ".join(done))
        for name, (state, detail) in outcomes.items():
            if state != APPLIED:
                measured = self._expect.get(name)
                _print_error(
                    f"WARNING: {name} is not applied: {detail}. Training continues without it"
                    + (f"; measured with: {measured}" if measured else "")
                )
        now = self.traits.fingerprint()
        before = {key: value for key, value in (self._fingerprint or {}).items() if value is not None}
        changed = [key for key, value in before.items() if now.get(key) != value]
        if changed and self.mismatch is None:
            _print_error(f"WARNING: the program differs from the measured one: {', '.join(changed)} changed")


MISSING = dict.fromkeys(
    ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers"), "no DataLoader feeds the training"
)
MISSING.update(
    dict.fromkeys(
        ("ddp_bucket_mb", "ddp_gradient_as_bucket_view", "ddp_static_graph"),
        "the program does not use DistributedDataParallel",
    ),
    training_arguments="the program does not use TrainingArguments",
)


def is_autocast_on(torch: Any) -> bool:
    """Whether autocast is on for any device."""
    if torch.is_autocast_enabled():
        return True
    return hasattr(torch, "is_autocast_cpu_enabled") and _cpu_autocast(torch)


def _cpu_autocast(torch: Any) -> bool:
    try:
        return bool(torch.is_autocast_enabled("cpu"))
    except TypeError:  # before PyTorch 2.4
        return bool(torch.is_autocast_cpu_enabled())


def _print_error(text: str) -> None:
    print(f"tune-cluster: {text}", file=sys.stderr, flush=True)  # noqa: T201


KNOBS = Knobs()


def accelerator_missing(torch: Any) -> str | None:
    """Return why a GPU knob cannot take effect; None if there is a GPU."""
    return None if torch.cuda.is_available() else "no accelerator"


def sharded(model: Any) -> str | None:
    """Return why knobs of the model are refused for it; None if it is whole on this rank."""
    for module in model.modules():
        name = type(module).__name__
        if name in ("FullyShardedDataParallel", "DeepSpeedEngine", "PipelineModule"):
            return f"the model is wrapped in {name}"
    for parameter in model.parameters():
        if hasattr(parameter, "_local_tensor") or hasattr(parameter, "ds_numel"):
            return "the model's parameters are sharded"
    return None
