"""Sets knobs of the process: data parallelism, TrainingArguments, PyTorch's global settings, the allocator."""

from __future__ import annotations

import functools
import inspect
import os
import sys
import weakref
from typing import Any, Callable

from .facts import world_size
from .knob_file import APPLIED, KNOBS, NO_EFFECT, accelerator_missing, torch_version
from .model_knobs import before_data_parallel
from .roots import Root
from .steps import guarded

ALLOCATOR_VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"


def _torch() -> Any:
    return sys.modules["torch"]


# ---- DistributedDataParallel


def data_parallel(module: Any) -> None:
    """Hook for ``torch.nn.parallel.distributed``."""
    kind = module.DistributedDataParallel
    made, no_sync = kind.__init__, kind.no_sync

    @functools.wraps(made)
    def initialise(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        settings = guarded("data parallelism")(_settings)(module) or {}
        given = guarded("data parallelism")(inspect.signature(made).bind_partial)(self, module, *args)
        for name in [name for name in settings if given is None or name in given.arguments]:
            KNOBS.refuse(SETTINGS[name], "the program sets it as a positional argument")
            del settings[name]
        kwargs.update(settings)
        made(self, module, *args, **kwargs)
        for setting in settings:
            name = SETTINGS[setting]
            KNOBS.applied(name, functools.partial(_reducer_seen, weakref.ref(self), name))

    @functools.wraps(no_sync)
    def watched(self: Any) -> Any:
        KNOBS.traits.has_no_sync = True
        return no_sync(self)

    kind.__init__, kind.no_sync = initialise, watched


VIEW = "ddp_gradient_as_bucket_view"
SETTINGS = {"bucket_cap_mb": "ddp_bucket_mb", "gradient_as_bucket_view": VIEW}
"""Arguments of ``DistributedDataParallel``, and the knob that sets each."""


def _settings(module: Any) -> dict[str, Any]:
    KNOBS.is_expected(torch=torch_version(), world_size=world_size())
    before_data_parallel(module)
    settings: dict[str, Any] = {}
    if KNOBS.value("ddp_bucket_mb") is not None:
        settings["bucket_cap_mb"] = KNOBS.value("ddp_bucket_mb")
    if KNOBS.value(VIEW) is not None:
        settings["gradient_as_bucket_view"] = bool(KNOBS.value(VIEW))
    return settings


def _reducer_seen(wrapped: Any, name: str) -> tuple[str, str]:
    data = wrapped()._get_ddp_logging_data()
    if name == VIEW:
        seen = bool(data.get("gradient_as_bucket_view"))
        return (APPLIED if seen == KNOBS.value(VIEW) else NO_EFFECT), f"the reducer has {str(seen).lower()}"
    sizes = str(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or "").split(",")
    limit = int(data.get("bucket_cap_bytes") or 0)
    detail = f"{len(sizes)} buckets of at most {limit / 2**20:.4g} MiB"
    return (APPLIED if limit == int(KNOBS.value("ddp_bucket_mb") * 2**20) else NO_EFFECT), detail


def _static_graph(root: Root) -> str | None:
    wrapper, wanted = root.module, KNOBS.value("ddp_static_graph")
    if type(wrapper).__name__ != "DistributedDataParallel":
        return "the program's model is not wrapped in DistributedDataParallel"
    if wanted and not wrapper.require_backward_grad_sync:
        return "the program accumulates under no_sync"
    if wanted and wrapper.find_unused_parameters:
        return "the program sets find_unused_parameters: its graph may change"
    if not wanted and wrapper.static_graph:
        return "the program already sets static_graph"
    if wanted:
        wrapper._set_static_graph()

    def seen() -> tuple[str, str]:
        found = bool(wrapper._get_ddp_logging_data().get("static_graph"))
        return (APPLIED if found == bool(wanted) else NO_EFFECT), f"the reducer has {str(found).lower()}"

    KNOBS.applied("ddp_static_graph", seen)
    return None


# ---- TrainingArguments of transformers


def training_arguments(module: Any) -> None:
    """Hook for ``transformers.training_args``: sets fields before those of subclasses and derived ones."""
    kind = module.TrainingArguments
    made = kind.__post_init__

    @functools.wraps(made)
    def after_init(self: Any) -> None:
        guarded("TrainingArguments")(_override)(self)
        made(self)

    kind.__post_init__ = after_init


def _override(arguments: Any) -> None:
    KNOBS.is_expected(torch=torch_version())
    wanted = KNOBS.value("training_arguments") or {}
    unknown = [name for name in wanted if name not in getattr(type(arguments), "__dataclass_fields__", {})]
    if unknown:
        KNOBS.refuse("training_arguments", f"{type(arguments).__name__} has no {', '.join(unknown)}")
        return
    for name, value in wanted.items():
        setattr(arguments, name, value)
    if wanted:
        KNOBS.applied("training_arguments", functools.partial(_arguments_seen, arguments, wanted))


def _arguments_seen(arguments: Any, wanted: dict[str, Any]) -> tuple[str, str]:
    now = {name: getattr(arguments, name) for name in wanted}
    changed = [name for name, value in wanted.items() if str(now[name]) != str(value)]
    description = ", ".join(f"{name}={value}" for name, value in now.items())
    return (NO_EFFECT if changed else APPLIED), description


# ---- Global settings


def before_first_call(root: Root, args: Any, kwargs: Any) -> None:
    """Apply settings of PyTorch that take effect at any time, after the program's own."""
    for name, apply in APPLIERS.items():
        if KNOBS.value(name) is not None:
            KNOBS.attempt(name, apply, root)


def _cudnn_benchmark(root: Root) -> str | None:
    torch, wanted = _torch(), bool(KNOBS.value("cudnn_benchmark"))
    if reason := accelerator_missing(torch):
        return reason
    torch.backends.cudnn.benchmark = wanted

    def seen() -> tuple[str, str]:
        now = bool(torch.backends.cudnn.benchmark)
        return (APPLIED if now == wanted else NO_EFFECT), f"cudnn.benchmark is {str(now).lower()}"

    KNOBS.applied("cudnn_benchmark", seen)
    return None


def _matmul_precision(root: Root) -> None:
    torch, wanted = _torch(), KNOBS.value("matmul_precision")
    device = next(root.module.parameters()).device
    before, first = torch.get_float32_matmul_precision(), _product(torch, device)
    torch.set_float32_matmul_precision(wanted)
    is_other = not torch.equal(first, _product(torch, device))

    def seen() -> tuple[str, str]:
        now = torch.get_float32_matmul_precision()
        if now != wanted:
            return NO_EFFECT, f"the program has set it to {now}"
        if is_other or before == wanted:
            return APPLIED, f"{now}, {'a different product' if is_other else 'unchanged'}"
        return NO_EFFECT, f"products on this {device.type} device are bitwise identical"

    KNOBS.applied("matmul_precision", seen)


def _product(torch: Any, device: Any) -> Any:
    """Multiply fp32 matrices with elements that 16 bits cannot represent."""
    with torch.no_grad():
        matrix = torch.linspace(0.1, 1.1, 256 * 256, device=device).reshape(256, 256)
        return matrix @ matrix


def allocator() -> None:
    """Set the variable before PyTorch is imported: its allocator reads it only once."""
    wanted = KNOBS.value("allocator")
    if wanted is None:
        return
    if "torch" in sys.modules:
        KNOBS.refuse("allocator", "PyTorch was imported before the hook")
        return
    os.environ[ALLOCATOR_VARIABLE] = str(wanted)


def _allocator(root: Root) -> str | None:
    torch, wanted = _torch(), str(KNOBS.value("allocator"))
    if reason := accelerator_missing(torch):
        return reason

    def seen() -> tuple[str, str]:
        now = os.environ.get(ALLOCATOR_VARIABLE)
        settings = torch.cuda.memory._snapshot().get("allocator_settings", {})
        return (APPLIED if now == wanted else NO_EFFECT), f"{now}: {settings}"

    KNOBS.applied("allocator", seen)
    return None


APPLIERS: dict[str, Callable[[Root], Any]] = {
    "ddp_static_graph": _static_graph,
    "cudnn_benchmark": _cudnn_benchmark,
    "matmul_precision": _matmul_precision,
    "allocator": _allocator,
}
