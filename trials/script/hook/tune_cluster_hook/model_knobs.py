"""Sets knobs of the model before its first forward pass: precision, memory format, recompute, compile, attention.

Each is a function of a root that refuses with a reason, or applies the knob and registers a check of its effect. A knob
is undone if the first forward pass shows a conflict (inner autocast, a block that changes buffers).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from typing import Any, Callable

from .facts import any_compiled, is_compiled, was_compiled
from .knob_file import APPLIED, KNOBS, NO_EFFECT, is_autocast_on, sharded
from .roots import ROOTS, RepeatedBlock, Root, in_backward, repeated_block
from .steps import guarded

MAX_LEAVES = 8
# Limit on recorded outputs, in a program whose first steps never end.
MAX_NOTED = 10_000
SIXTEEN = "O1-bf16"
MARK = "_tune_cluster_recompute"
"""Attribute of modules that are recomputed; copies of the model keep it."""


def _torch() -> Any:
    return sys.modules["torch"]


def before_first_call(root: Root, args: Any, kwargs: Any) -> None:
    """Apply the knobs of a model, in the order in which they build on each other."""
    if not any(KNOBS.value(name) is not None for name in APPLIERS):
        return
    block, problem = repeated_block(root.model), sharded(root.module)
    for name, apply in APPLIERS.items():
        value = KNOBS.value(name)
        if value is not None and problem:
            KNOBS.refuse(name, problem)
        elif value is not None:
            KNOBS.attempt(name, apply, root, block, value)


def _map_tensors(value: Any, change: Callable[[Any], Any], depth: int = 3) -> Any:
    """Change the tensors in ``value``: in lists, tuples, mappings (in place, so that outputs of transformers keep their
    type) and dataclasses."""
    if _torch().is_tensor(value):
        return change(value)
    if not depth:
        return value
    if isinstance(value, dict):
        for key in list(value):
            changed = _map_tensors(value[key], change, depth - 1)
            if changed is not value[key]:
                value[key] = changed
        return value
    if isinstance(value, (list, tuple)):
        items = [_map_tensors(item, change, depth - 1) for item in value]
        if all(item is before for item, before in zip(items, value)):
            return value
        if type(value) not in (list, tuple) and not hasattr(value, "_fields"):
            return value  # a class of the program, whose construction is unknown
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            before = getattr(value, field.name)
            changed = _map_tensors(before, change, depth - 1)
            if changed is not before:
                object.__setattr__(value, field.name, changed)
    return value


class Leaves:
    """Hooks on leaves of the model during the first steps; none in compiled parts, which would trace them."""

    def __init__(self) -> None:
        self._handles: list[Any] = []

    def watch(self, module: Any, after: Callable[..., None]) -> None:
        """Call ``after(module, args, output)`` after ``module`` has run in training."""

        @guarded("leaves")
        def hook(module: Any, args: Any, output: Any) -> None:
            if module.training:
                after(module, args, output)

        self._handles.append(module.register_forward_hook(hook))

    def remove(self) -> None:
        """Remove the hooks after the first steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


LEAVES = Leaves()


# ---- precision: autocast around the root's forward pass, outputs back in fp32


_formats: list[str] = []
"""Number formats of the outputs of linear and convolution layers in the first steps."""


def precision(root: Root, block: RepeatedBlock | None, value: str) -> str | None:
    """Autocast calls in training to bf16; losses outside of it still get fp32."""
    if value == "O1-fp16":
        return "float16 needs a gradient scaler, and the program's checkpoints would not save its state"
    if value not in ("O0", SIXTEEN):
        return f"{value} is not one of O0, {SIXTEEN}"
    torch, model = _torch(), root.model
    first = next(model.parameters())
    if KNOBS.traits.has_autocast or is_autocast_on(torch):
        return "the program already uses autocast"
    if KNOBS.traits.has_scaler:
        return "the program already uses a gradient scaler"
    if first.dtype != torch.float32:
        return f"the model's parameters are {str(first.dtype).rpartition('.')[2]}, not float32"
    _watch_formats(model)
    wanted = torch.bfloat16 if value == SIXTEEN else torch.float32

    def seen() -> tuple[str, str]:
        name = str(wanted).rpartition(".")[2]
        found = _formats.count(name)
        if not _formats:
            return APPLIED, "compiled: number formats cannot be checked"
        return (APPLIED if found else NO_EFFECT), f"{found} of {len(_formats)} first linear outputs in {name}"

    undo = root.wrap(functools.partial(_autocast, root, first.device.type)) if value == SIXTEEN else None
    KNOBS.applied("precision", seen, undo)
    return None


def _autocast(root: Root, device: str, call: Callable[..., Any]) -> Callable[..., Any]:
    low = _torch().bfloat16

    def back(tensor: Any) -> Any:
        return tensor.float() if tensor.dtype == low else tensor

    def around(*args: Any, **kwargs: Any) -> Any:
        if not root.module.training:
            return call(*args, **kwargs)
        with Ours(device_type=device, dtype=low):
            output = call(*args, **kwargs)
        return _map_tensors(output, back)

    return around


class Ours:
    """The autocast set by this knob, distinguishable from the program's."""

    is_entering = False

    def __init__(self, **settings: Any) -> None:
        self._context = _torch().autocast(**settings)

    def __enter__(self) -> None:
        Ours.is_entering = True
        try:
            self._context.__enter__()
        finally:
            Ours.is_entering = False

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)


def _watch_formats(model: Any) -> None:
    if any_compiled(model) or KNOBS.value("compile") in ("block", "model"):
        return
    linears = [module for module in model.modules() if type(module).__name__ in ("Linear", "Conv2d", "Conv1d")]
    for linear in linears[:MAX_LEAVES]:
        LEAVES.watch(linear, lambda module, args, output: _note_format(output))


def _note_format(output: Any) -> None:
    if len(_formats) < MAX_NOTED:
        _formats.append(str(output.dtype).rpartition(".")[2])


# ---- memory_format: weights and inputs with channels last


_layouts: list[bool] = []
"""Whether channels were last, for outputs of convolutions with an unambiguous layout."""


def memory_format(root: Root, block: RepeatedBlock | None, value: str) -> str | None:
    """Convert weights, which stay the same objects; optimiser states would keep the old layout."""
    torch, model = _torch(), root.model
    convolutions = [module for module in model.modules() if type(module).__name__ in ("Conv2d", "ConvTranspose2d")]
    if value not in ("nhwc", "nchw"):
        return f"{value} is not one of nhwc, nchw"
    if not convolutions:
        return f"{type(model).__name__} has no Conv2d"
    is_last = any(_is_channels_last(module.weight) for module in convolutions)
    if value == "nchw":
        KNOBS.applied("memory_format", lambda: (APPLIED, "weights are contiguous"))
        return "the program already uses channels last" if is_last else None
    if _has_state(torch, model):
        return "the optimiser already has states, which would keep their layout"
    if any(tensor.dim() == 5 for tensor in (*model.parameters(), *model.buffers())):
        return f"{type(model).__name__} has five-dimensional weights, which do not support this layout"
    model.to(memory_format=torch.channels_last)
    if not any_compiled(model):
        for module in convolutions[:MAX_LEAVES]:
            LEAVES.watch(module, lambda module, args, output: _note_layout(output))

    def seen() -> tuple[str, str]:
        weights = sum(module.weight.is_contiguous(memory_format=torch.channels_last) for module in convolutions)
        detail = (
            f"{weights} of {len(convolutions)} weights and {sum(_layouts)} of {len(_layouts)} outputs channels last"
        )
        return (APPLIED if weights and sum(_layouts) * 2 >= len(_layouts) else NO_EFFECT), detail

    KNOBS.applied("memory_format", seen, root.wrap(_channels_last_inputs))
    return None


def before_data_parallel(module: Any) -> None:
    """Convert before ``DistributedDataParallel`` creates its buckets for the parameters' current layout."""
    torch = _torch()
    if KNOBS.value("memory_format") != "nhwc" or sharded(module) or _has_state(torch, module):
        return
    if any(tensor.dim() == 5 for tensor in (*module.parameters(), *module.buffers())):
        return
    if any(type(part).__name__ in ("Conv2d", "ConvTranspose2d") for part in module.modules()):
        module.to(memory_format=torch.channels_last)


def _is_channels_last(tensor: Any) -> bool:
    torch = _torch()
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


def _note_layout(output: Any) -> None:
    torch = _torch()
    if not torch.is_tensor(output) or output.dim() != 4 or len(_layouts) >= MAX_NOTED:
        return
    last = output.is_contiguous(memory_format=torch.channels_last)
    if last != output.is_contiguous():  # with one channel, or one pixel, it is both
        _layouts.append(last)


def _channels_last_inputs(call: Callable[..., Any]) -> Callable[..., Any]:
    torch = _torch()

    def change(tensor: Any) -> Any:
        if tensor.dim() != 4 or not tensor.is_floating_point():
            return tensor
        return tensor.contiguous(memory_format=torch.channels_last)

    def around(*args: Any, **kwargs: Any) -> Any:
        return call(*_map_tensors(args, change, 1), **_map_tensors(kwargs, change, 1))

    return around


def _has_state(torch: Any, model: Any) -> bool:
    """Whether an optimiser has states of the model's parameters; Python's garbage collector lists all optimisers."""
    parameters = {id(parameter) for parameter in model.parameters()}
    optimizers = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    return any(id(key) in parameters and state for one in optimizers for key, state in one.state.items())


# ---- recompute: activation checkpointing of the repeated block


class BlockCalls:
    """Forward calls of a block's leaves in the first steps, and those within backward passes."""

    def __init__(self, member: Any) -> None:
        leaves = [part for part in member.modules() if part._parameters and next(part.children(), None) is None]
        self.forward, self.backward = [0] * len(leaves[:MAX_LEAVES]), [0] * len(leaves[:MAX_LEAVES])
        for number, leaf in enumerate(leaves[:MAX_LEAVES]):
            handle = leaf.register_forward_pre_hook(functools.partial(self._count, number))
            LEAVES._handles.append(handle)

    def _count(self, number: int, module: Any, args: Any) -> None:
        if module.training:
            (self.backward if in_backward() else self.forward)[number] += 1

    @property
    def is_recomputed(self) -> bool:
        """Whether any leaf ran again: some are never called, and the last ones may not be recomputed."""
        return any(self.backward)


def recompute(root: Root, block: RepeatedBlock | None, value: str) -> str | None:
    """Use the model's own switch if it has one, else the forward of the block's class, which keeps names, copies and
    pickles unchanged."""
    model = root.model
    if value not in ("none", "full"):
        return f"{value} is not one of none, full"
    if any_compiled(model) or (value == "full" and KNOBS.value("compile") in ("block", "model")):
        return "in a compiled model the compiler decides what is recomputed"
    official = next((one for one in model.modules() if _has_switch(one)), None)
    if value == "none":
        return _keep(block, official)
    if block is None:
        return f"{type(model).__name__} has no repeated block"
    if getattr(official, "is_gradient_checkpointing", False) or KNOBS.traits.has_checkpoint:
        return "the program already recomputes"
    if reason := _side_effects(block):
        return reason
    if official is not None:
        _switched.append(True)
        official.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        undo, how = official.gradient_checkpointing_disable, "with the model's own switch"
    else:
        undo, how = _mark(block), f"{block.name}.forward"
    _count_calls(block, wants_again=True, how=how, undo=undo)
    _check_buffers(root, block)
    return None


_switched: list[bool] = []
"""Whether the model itself recomputes because its switch is on."""


def _has_switch(module: Any) -> bool:
    return bool(getattr(module, "supports_gradient_checkpointing", False)) and hasattr(
        module, "gradient_checkpointing_enable"
    )


def _keep(block: RepeatedBlock | None, official: Any) -> str | None:
    if getattr(official, "is_gradient_checkpointing", False):
        official.gradient_checkpointing_disable()
    if block is None:
        KNOBS.applied("recompute", lambda: (APPLIED, "no repeated block, nothing to recompute"))
    else:
        _count_calls(block, wants_again=False, how="not recomputed", undo=None)
    return None


def _count_calls(block: RepeatedBlock, *, wants_again: bool, how: str, undo: Callable[[], None] | None) -> None:
    calls = [BlockCalls(member) for member in block.members]

    def seen() -> tuple[str, str]:
        again = sum(one.is_recomputed for one in calls)
        ran = sum(any(one.forward) for one in calls)
        detail = f"{again} of {ran} x {block.name} run again in the backward pass, {how}"
        acts = 0 < ran == again if wants_again else not again
        return (APPLIED if acts else NO_EFFECT), detail

    KNOBS.applied("recompute", seen, undo)


def _side_effects(block: RepeatedBlock) -> str | None:
    for part in (part for member in block.members for part in member.modules()):
        if getattr(part, "track_running_stats", False):
            return f"{block.name} contains {type(part).__name__}, whose running statistics would be updated twice"
    if any("forward" in member.__dict__ for member in block.members):
        return f"instances of {block.name} override forward"
    return None


def _mark(block: RepeatedBlock) -> Callable[[], None]:
    kind = type(block.members[0])
    forward = kind.forward
    if not getattr(forward, MARK, False):
        kind.forward = _recomputing(forward)
    for member in block.members:
        member.__dict__[MARK] = True

    def undo() -> None:
        for member in block.members:
            member.__dict__.pop(MARK, None)

    return undo


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    import torch.utils.checkpoint

    torch = _torch()
    checkpoint = getattr(torch.utils.checkpoint.checkpoint, "__wrapped__", torch.utils.checkpoint.checkpoint)

    @functools.wraps(forward)
    def recomputed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if MARK in self.__dict__ and self.training and torch.is_grad_enabled():
            return checkpoint(functools.partial(forward, self), *args, use_reentrant=False, **kwargs)
        return forward(self, *args, **kwargs)

    setattr(recomputed, MARK, True)
    return recomputed


def _check_buffers(root: Root, block: RepeatedBlock) -> None:
    """Refuse a block that changes its buffers in the first forward pass: recomputation would change them again."""
    named = [(name, buffer) for member in block.members for name, buffer in member.named_buffers()]
    before = [buffer._version for _, buffer in named]

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            undo()
            changed = [name for (name, buffer), version in zip(named, before) if buffer._version != version]
            if changed:
                KNOBS.refuse("recompute", f"{block.name} changes its buffer {changed[0]} in the forward pass")
            elif KNOBS.traits.has_checkpoint:
                KNOBS.refuse("recompute", "the program already recomputes")
            return output

        return checked

    undo = root.wrap(around)


# ---- compile: of every repeated block, or of the model


def compile_(root: Root, block: RepeatedBlock | None, value: str) -> str | None:
    """Compile in place, so that names stay; what cannot be compiled runs as before."""
    model = root.model
    if value not in ("off", "block", "model"):
        return f"{value} is not one of off, block, model"
    if any(map(is_compiled, root.module.modules())) or (was_compiled() and not KNOBS.is_set("compile")):
        return "the program already compiles"
    if value == "off":
        KNOBS.applied("compile", lambda: (APPLIED, "nothing is compiled"))
        return None
    if value == "block" and block is None:
        return f"{type(model).__name__} has no repeated block"
    torch = _torch()
    if not hasattr(torch.compiler, "is_compiling"):
        return "compiling inside a program requires PyTorch 2.2 or later"
    import torch._dynamo

    torch._dynamo.config.suppress_errors = True
    before = _graphs(torch)
    if value == "block" and block is not None:
        for member in block.members:
            member.compile()
    elif model is root.module:
        root.compile()
    else:
        model.compile()

    def seen() -> tuple[str, str]:
        graphs, breaks = (now - then for now, then in zip(_graphs(torch), before))
        what = f"{len(block.members)} x {block.name}" if value == "block" and block else type(model).__name__
        return (APPLIED if graphs else NO_EFFECT), f"{what}: {graphs} graphs compiled, {breaks} graph breaks"

    KNOBS.applied("compile", seen)
    return None


def _graphs(torch: Any) -> tuple[int, int]:
    counters = torch._dynamo.utils.counters
    return int(counters["frames"]["ok"]), int(sum(counters["graph_break"].values()))


# ---- attention: which kernels of scaled dot-product attention may run


FUSED = {
    "flash": ("_scaled_dot_product_flash_attention",),
    "efficient": ("_scaled_dot_product_efficient_attention",),
    "cudnn": ("_scaled_dot_product_cudnn_attention",),
}


def attention(root: Root, block: RepeatedBlock | None, value: str) -> str | None:
    """Restrict the kernels, but allow the math kernel too, for shapes that the requested one does not support."""
    torch = _torch()
    if value not in ("auto", "math", *FUSED):
        return f"{value} is not one of auto, math, {', '.join(FUSED)}"
    if value in ("efficient", "cudnn") and not torch.cuda.is_available():
        return "no accelerator"
    backends = torch.backends.cuda
    for name, switch in (
        ("flash", backends.enable_flash_sdp),
        ("efficient", backends.enable_mem_efficient_sdp),
        ("cudnn", getattr(backends, "enable_cudnn_sdp", None)),
    ):
        if switch is not None:
            switch(value in ("auto", name))
    backends.enable_math_sdp(True)
    if value == "auto":
        KNOBS.applied("attention", lambda: (APPLIED, "all kernels are allowed"))
        return None
    names: dict[str, int] = {}
    KNOBS.applied("attention", functools.partial(_attention_seen, value, names))
    if not any_compiled(root.module) and KNOBS.value("compile") in (None, "off"):
        _record_operators(root, names)
    return None


def _attention_seen(value: str, names: dict[str, int]) -> tuple[str, str]:
    if not names:
        return NO_EFFECT, "operators cannot be checked in a compiled model"
    calls = names.get(CALLS, 0)
    fused = {name: count for name, count in names.items() if "scaled_dot_product" in name and name != CALLS}
    if not calls and not fused:
        return NO_EFFECT, "the model does not call scaled_dot_product_attention"
    if value == "math":
        return (NO_EFFECT if fused else APPLIED), f"{calls} calls, fused operators: {', '.join(fused) or 'none'}"
    acts = any(name.startswith(FUSED[value][0]) for name in fused)
    return (APPLIED if acts else NO_EFFECT), f"{calls} calls, operators: {', '.join(fused) or 'math only'}"


CALLS = "scaled_dot_product_attention"


def _record_operators(root: Root, names: dict[str, int]) -> None:
    """Record the operators of the root's next call."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        """Observes calls of the attention function."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") == CALLS:
                names[CALLS] = names.get(CALLS, 0) + 1
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Observes running operators."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(getattr(func, "_overloadpacket", None), "__name__", str(func))
            names[name] = names.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            undo()
            with Functions(), Operators():  # type: ignore[no-untyped-call]
                return call(*args, **kwargs)

        return recorded

    undo = root.wrap(around)


APPLIERS: dict[str, Callable[[Root, Any, Any], Any]] = {
    "memory_format": memory_format,
    "recompute": recompute,
    "compile": compile_,
    "attention": attention,
    "precision": precision,
}


# ---- Settings by the program itself


def autocast(module: Any) -> None:
    """Hook for ``torch.amp.autocast_mode``: detects the program's own autocast inside a root, in the first steps."""
    kind = module.autocast
    entered = kind.__enter__

    @functools.wraps(entered)
    def enter(self: Any) -> Any:
        if not Ours.is_entering and self._enabled and not in_backward():
            KNOBS.traits.has_autocast = True
            KNOBS.refuse("precision", "the program already uses autocast")
        return entered(self)

    def put_back() -> None:
        kind.__enter__ = entered

    kind.__enter__ = enter
    ROOTS.after_first_steps(put_back)


def grad_scaler(module: Any) -> None:
    """Hook for ``torch.amp.grad_scaler``."""
    made = module.GradScaler.__init__

    @functools.wraps(made)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        KNOBS.traits.has_scaler = KNOBS.traits.has_scaler or bool(getattr(self, "_enabled", False))

    module.GradScaler.__init__ = initialise


def checkpointing(module: Any) -> None:
    """Hook for ``torch.utils.checkpoint``."""
    original = module.checkpoint

    @functools.wraps(original)
    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        KNOBS.traits.has_checkpoint = KNOBS.traits.has_checkpoint or not _switched
        return original(*args, **kwargs)

    module.checkpoint = checkpoint
