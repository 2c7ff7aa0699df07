"""Source lines equivalent to the knobs that our hook sets inside a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LOADER = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
_BUCKETS = {
    "ddp_bucket_mb": "bucket_cap_mb",
    "ddp_gradient_as_bucket_view": "gradient_as_bucket_view",
    "ddp_static_graph": "static_graph",
}
_SDPA = {"math": "MATH", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
_BLOCK = (
    "from torch.utils.checkpoint import checkpoint",
    "x = checkpoint(block, x, use_reentrant=False)  # instead of x = block(x), for every repeated block",
)


def source_lines(knobs: Mapping[str, Any]) -> str:
    """A text to read: the place of each knob, and its lines, marked with ``+``."""
    parts = []
    for place, lines in _parts(knobs):
        parts.append("\n".join([f"# {place}", *(f"+ {line}" for line in lines)]))
    return "\n\n".join(parts) + "\n" if parts else ""


def _parts(knobs: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    if "allocator" in knobs:
        setting = f'os.environ["PYTORCH_CUDA_ALLOC_CONF"] = {knobs["allocator"]!r}'
        yield "before torch is imported", ["import os", setting]
    if start := list(_at_start(knobs)):
        yield "once, after torch is imported", start
    if loader := [f"{name}={knobs[name]!r}," for name in _LOADER if knobs.get(name, "auto") != "auto"]:
        yield "arguments of the DataLoader that feeds training", loader
    if knobs.get("num_workers") == "auto":
        yield (
            "arguments of the DataLoader that feeds training",
            ["num_workers=N,  # see the evidence of this version"],
        )
    if "training_arguments" in knobs:
        yield "arguments of TrainingArguments", [f"{k}={v!r}," for k, v in knobs["training_arguments"].items()]
    if knobs.get("memory_format") == "nhwc":
        module = "model = model.to(memory_format=torch.channels_last)  # before optimiser and DistributedDataParallel"
        yield "model and inputs", [module, "images = images.to(memory_format=torch.channels_last)  # in every step"]
    if knobs.get("recompute") == "full":
        yield "the forward pass of the model", list(_BLOCK)
    if (compiled := knobs.get("compile", "off")) != "off":
        line = "block.compile()  # for every repeated block" if compiled == "block" else "model.compile()"
        yield "after the model is created", [line]
    if buckets := [f"{_BUCKETS[name]}={knobs[name]!r}," for name in _BUCKETS if name in knobs]:
        yield "arguments of DistributedDataParallel", buckets
    yield from _around_forward(knobs)


def _at_start(knobs: Mapping[str, Any]) -> Iterator[str]:
    if "matmul_precision" in knobs:
        yield f"torch.set_float32_matmul_precision({knobs['matmul_precision']!r})"
    if "cudnn_benchmark" in knobs:
        yield f"torch.backends.cudnn.benchmark = {knobs['cudnn_benchmark']!r}"


def _around_forward(knobs: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    if knobs.get("precision", "O0") != "O0":
        with_line = "with torch.autocast(device.type, dtype=torch.bfloat16):"
        yield "around the forward pass, not the backward pass", [with_line, "    output = model(inputs)"]
    if (kernel := knobs.get("attention", "auto")) != "auto":
        imported = "from torch.nn.attention import SDPBackend, sdpa_kernel"
        yield "around the forward pass", [imported, f"with sdpa_kernel(SDPBackend.{_SDPA[kernel]}):", "    ..."]
