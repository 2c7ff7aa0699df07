"""Graph mode (torch.compile) and the choice of kernels. Depends on models, parallelism and precision."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo import utils
from torch._dynamo.callback import callback_handler
from torch.nn.attention import SDPBackend, sdpa_kernel

from trials.accelerator.device import capability, has_cudnn
from trials.accelerator.kinds import FAMILIES
from trials.attention import TAKES_GROUPED, AttentionPlan, Back, Kernel, Parts, causal_attention, plan_attention
from trials.failure import InfeasibleSpec
from trials.models.built_in import Head
from trials.models.experts import mixtures_in
from trials.models.model import TrainModel
from trials.outcome import Phase, ProgressSink
from trials.precision import compute_dtype, matmul_precision
from trials.reports import GraphReport, KernelTuningReport
from trials.spec import Kernels, Layout, LlamaModel, TrialSpec, decoder_of

# Heartbeats of a compiling rank: a cold compilation takes minutes, in which no step ends.
#
# torch has callbacks for the start and end of compiling a graph, forward or backward, and of recording CUDA graphs. It
# has none for Triton kernels, which are tuned when they first run, so their tuning is wrapped here.


BEAT_S = 5.0
"""Seconds between reports of a compiling rank."""
_TRITON = "torch._inductor.runtime.triton_heuristics"
_TUNINGS = ("autotune_to_one_config", "coordinate_descent_tuning")
"""Methods of Triton's ``CachingAutotuner`` that try out configurations of a kernel on the device."""


class CompileBeats:
    """A :class:`ProgressSink` that forwards to another one, and reports every :data:`BEAT_S` during a compilation."""

    def __init__(self, progress: ProgressSink) -> None:
        self._progress = progress
        self._phase: Phase = "starting"
        self._step = 0
        self._step_time_s: float | None = None
        self._lock = threading.RLock()
        self._depth = 0
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._tunings: dict[str, Callable[..., Any]] = {}
        """Triton's own methods by name, while they are wrapped."""

    def __call__(
        self, phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False
    ) -> None:
        with self._lock:
            self._phase, self._step, self._step_time_s = phase, step, step_time_s
            self._report(is_compiling=is_compiling)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Report compilations during the body, in any thread of this process."""
        callback_handler.register_start_callback(self._begin)
        callback_handler.register_end_callback(self._end)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):  # resetting dynamo removes callbacks
                callback_handler.remove_start_callback(self._begin)
                callback_handler.remove_end_callback(self._end)
            self._is_over.set()
            self._leave_triton()

    def _begin(self, *_: object) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._report(is_compiling=True)
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="compile-beats", daemon=True)
            self._thread.start()

    def _end(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                self._report(is_compiling=False)
        self._watch_triton()

    def _beat(self) -> None:
        while not self._is_over.wait(BEAT_S):
            with self._lock:
                if self._depth:
                    self._report(is_compiling=True)

    def _report(self, *, is_compiling: bool) -> None:
        more: dict[str, Any] = {"is_compiling": True} if is_compiling else {}
        self._progress(self._phase, step=self._step, step_time_s=self._step_time_s, **more)

    def _watch_triton(self) -> None:
        """Report the tuning of Triton kernels from their first compilation on; Triton is not imported earlier."""
        tuner: Any = getattr(sys.modules.get(_TRITON), "CachingAutotuner", None)
        for name in () if self._tunings else _TUNINGS:
            if (tune := getattr(tuner, name, None)) is not None:
                self._tunings[name] = tune
                setattr(tuner, name, self._watched(tune))

    def _leave_triton(self) -> None:
        tuner: Any = getattr(sys.modules.get(_TRITON), "CachingAutotuner", None)
        for name, tune in self._tunings.items():
            setattr(tuner, name, tune)

    def _watched(self, tune: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(tune)
        def watched(*args: Any, **options: Any) -> Any:
            self._begin()
            try:
                return tune(*args, **options)
            finally:
                self._end()

        return watched


# Lets cuDNN measure its algorithms in a range of steps and use its cache afterwards, and counts cache hits.


class KernelTuner:
    """Switches cuDNN's benchmark mode by step, and counts forward convolutions.

    A configuration is the key of cuDNN's cache: sizes, number format, memory format and the convolution's arguments. A
    lookup is a call after the range; a hit is a lookup of a measured configuration. cuDNN keeps the first algorithm
    chosen for a configuration, so one that occurs unmeasured before the range is never measured.
    """

    def __init__(self, models: Iterable[nn.Module], kernels: Kernels, device: torch.device) -> None:
        self._range = kernels.cudnn_tuning_range
        self._has_cudnn = has_cudnn(device)
        self._in_graph = kernels.compile != "off"
        self._before = torch.backends.cudnn.benchmark
        self._step = 0
        self._measures = False
        self._tuned: set[Hashable] = set()
        self._met_too_early: set[Hashable] = set()
        self._num_lookups = self._num_hits = 0
        convolutions = [module for model in models for module in model.modules() if isinstance(module, nn.Conv2d)]
        # A hook inside a compiled block would become part of its graph.
        hooked = [] if self._in_graph or not self._range else convolutions
        self._hooks = [module.register_forward_pre_hook(self._count) for module in hooked]

    def __enter__(self) -> KernelTuner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch.backends.cudnn.benchmark = self._before
        for hook in self._hooks:
            hook.remove()

    @property
    def last_step(self) -> int:
        """Last step of the range; 0 without one."""
        return self._range[1] if self._range else 0

    def before_step(self, step: int) -> None:
        """Switch measuring on or off for this step, counted from 1."""
        self._step = step
        if self._range:
            self._measure(self._range[0] <= step <= self._range[1])

    @contextlib.contextmanager
    def before_training(self) -> Iterator[None]:
        """Measure here too: convolutions before the first step would fill cuDNN's cache with unmeasured algorithms."""
        self._measure(bool(self._range))
        yield
        self._measure(False)

    def _measure(self, enabled: bool) -> None:
        self._measures = enabled
        if self._range and self._has_cudnn:
            torch.backends.cudnn.benchmark = enabled

    def report(self) -> KernelTuningReport | None:
        """Return the counts; None if the knob is off."""
        if not self._range:
            return None
        return KernelTuningReport(
            num_configurations=len(self._tuned),
            num_lookups=self._num_lookups,
            num_hits=self._num_hits,
            note=self._note(),
        )

    def _note(self) -> str:
        notes = []
        if not self._has_cudnn:
            notes.append("no cuDNN on this device: nothing was benchmarked, configurations were only counted")
        elif self._in_graph:
            notes.append("convolutions inside compiled graphs are not counted")
        if self._met_too_early:
            notes.append(
                f"{len(self._met_too_early)} configurations occurred before step {self._range[0]} and keep the "
                "unmeasured algorithm chosen then; start the range at step 1"
            )
        return "; ".join(notes)

    def _count(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(module, nn.Conv2d)
        key = _configuration(module, args[0])
        if self._measures:
            self._tuned |= {key} - self._met_too_early
        elif self._step < self._range[0]:
            self._met_too_early |= {key} - self._tuned
        else:
            self._num_lookups += 1
            self._num_hits += key in self._tuned


def _configuration(conv: nn.Conv2d, x: torch.Tensor) -> Hashable:
    """Return the key of cuDNN's cache for this call."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return x.shape, x.stride(), dtype, conv.weight.shape, conv.stride, conv.padding, conv.dilation, conv.groups


# Graph mode: compile the model, and report what torch.compile did in this process and how long it took.


_MAX_REASONS = 8
_MAX_REASON_CHARS = 200
_MAX_COMPILATIONS = 4096
_HITS, _MISSES = "fxgraph_cache_hit", ("fxgraph_cache_miss", "fxgraph_cache_bypass")
"""Names of torch's counters for hits and misses of inductor's cache on disk."""


def apply_compile(model: TrainModel, kernels: Kernels) -> None:
    """Compile in place every layer (equal layers share code) with head and loss, or the whole model.

    A built-in layer must be one graph, and so must head and loss, unless its rows travel to experts on other ranks; the
    whole model may break into several, as it does at FSDP's hooks. Every shape gets its own graph, unless
    :attr:`~trials.spec.Kernels.dynamic` makes one graph for all.

    A chunked loss is not part of a graph: :func:`~trials.parallel.tensor.chunk_loss` compiles its kernels.
    """
    if kernels.compile == "off":
        return
    mode = None if kernels.compile_mode == "default" else kernels.compile_mode
    for target in compiled_units(model, kernels):
        breaks = any(mixture.exchange is not None for mixture in mixtures_in([target]))
        whole = kernels.compile == "block" and (isinstance(target, Head) or not model.is_own) and not breaks
        target.compile(backend=kernels.backend, mode=mode, dynamic=kernels.dynamic, fullgraph=whole)


def compiled_units(model: TrainModel, kernels: Kernels) -> Iterator[nn.Module]:
    """Yield the modules that :func:`apply_compile` compiles."""
    if kernels.compile == "model":
        yield model
    if kernels.compile == "block":
        yield from model.layers.values()
        head = getattr(model, "output", None)
        if isinstance(head, Head) and kernels.loss_chunks == 1:
            yield head


@dataclass(frozen=True, slots=True)
class Compilation:
    """One entry of torch's log: a forward graph, or a backward graph, which is compiled on first use."""

    is_forward: bool
    time_s: float
    reason: str | None
    """Why previously compiled code had to be recompiled."""


def forget_compilations() -> None:
    """Drop everything compiled so far, so that every trial in a process compiles for itself; callbacks stay."""
    begins, ends = list(callback_handler.start_callbacks), list(callback_handler.end_callbacks)
    torch._dynamo.reset()
    callback_handler.start_callbacks[:], callback_handler.end_callbacks[:] = begins, ends
    utils.set_compilation_metrics_limit(_MAX_COMPILATIONS)
    utils.clear_compilation_metrics()
    for name in (_HITS, *_MISSES):
        utils.counters["inductor"].pop(name, None)


def compilations() -> list[Compilation]:
    """Return the log since :func:`forget_compilations`. Only this function reads torch's private metrics."""
    return [
        Compilation(bool(entry.is_forward), (entry.duration_us or 0) / 1e6, entry.recompile_reason or None)
        for entry in utils.get_compilation_metrics()
        if entry.fail_type is None
    ]


def graph_report(log: Iterable[Compilation]) -> GraphReport:
    """Summarise a log of compilations, and inductor's cache hits since :func:`forget_compilations`."""
    entries = list(log)
    forward = [entry for entry in entries if entry.is_forward]
    reasons = [entry.reason for entry in forward if entry.reason]
    shown = dict.fromkeys(_shortened(reason) for reason in reasons)
    return GraphReport(
        num_graphs=len(forward),
        num_recompilations=len(reasons),
        compile_s=sum(entry.time_s for entry in entries),
        reasons=tuple(shown)[:_MAX_REASONS],
        cache_hits=utils.counters["inductor"][_HITS],
        cache_misses=sum(utils.counters["inductor"][name] for name in _MISSES),
    )


def _shortened(reason: str) -> str:
    """Return the first failed guard; further guards of the same recompilation are on the next lines."""
    return reason.strip().splitlines()[0][:_MAX_REASON_CHARS]


# Process-wide kernel settings: attention backend, matmul precision, Dynamo's recompilation limit.


ATTENTION_BACKENDS: dict[Kernel, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}

_FIRST_CUDNN_CAPABILITY = (9, 0)
"""Lowest CUDA compute capability on which cuDNN's attention is faster than FlashAttention-2: Hopper."""
_TRIED_POSITIONS = 128
_MAX_GRAPHS_PER_FUNCTION = 128
"""Dynamo gives up on functions compiled more often; to it, blocks of different shapes are one function."""


@contextlib.contextmanager
def kernel_settings(spec: TrialSpec, device: torch.device) -> Iterator[None]:
    """Apply the candidate's process-wide kernel settings during the body.

    Raises:
        InfeasibleSpec: the device lacks the attention backend; the message lists those it has.
    """
    kernels = spec.candidate.kernels
    with contextlib.ExitStack() as stack:
        decoder = decoder_of(spec.workload.model)
        if kernels.attention != "auto" and decoder is not None:
            _check_attention(spec, decoder, device)
            stack.enter_context(sdpa_kernel(ATTENTION_BACKENDS[kernels.attention]))
        if kernels.compile != "off":
            stack.enter_context(torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS_PER_FUNCTION))
        stack.enter_context(matmul_precision(kernels.matmul_precision))
        yield


def attention_plan(spec: TrialSpec, model: LlamaModel, device: torch.device) -> AttentionPlan:
    """Plan attention for the target device of the trial; a dry run computes on another one, ``device``."""
    candidate = spec.candidate
    is_wide = "scaled_dot_product_attention" in candidate.precision.black
    dtype = torch.float32 if is_wide else compute_dtype(candidate.precision)
    is_target = device.type == FAMILIES[spec.device].torch_device
    known = capability(device) if is_target else None
    wanted = candidate.kernels.attention
    if wanted == "auto" and candidate.loader.batching == "packing" and spec.device in ("cuda", "rocm"):
        wanted = "efficient"  # flash attention has no mask
    plan = plan_attention(model, wanted, dtype, spec.device, known)
    if candidate.kernels.attention == "auto" and known is not None and _prefers_cudnn(plan, spec, model, device, known):
        return dataclasses.replace(plan, kernel="cudnn")
    return plan


def _prefers_cudnn(
    plan: AttentionPlan, spec: TrialSpec, model: LlamaModel, device: torch.device, known: tuple[int, int]
) -> bool:
    """Whether parts of the keys are attended to by cuDNN: on Hopper and later, where torch takes it for whole sequences
    and it runs for parts. Otherwise context parallelism would be compared by kernel, not by method."""
    if not _attends_to_parts(spec.candidate.layout) or known < _FIRST_CUDNN_CAPABILITY or plan.kernel != "flash":
        return False
    q, k, v = _tried(plan, model, device)
    is_grouped = model.num_kv_heads < model.num_heads
    chosen = torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=is_grouped)
    return chosen == SDPBackend.CUDNN_ATTENTION.value and _runs_attention("cudnn", spec, model, device)


def _attends_to_parts(layout: Layout) -> bool:
    return layout.cp > 1 and layout.cp_method != "ulysses"


def _tried(plan: AttentionPlan, model: LlamaModel, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values to try a kernel with; all require gradients, as in training."""
    q, k, v = (
        torch.zeros(1, heads, _TRIED_POSITIONS, model.head_size, dtype=plan.dtype, device=device)
        for heads in (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    )
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def expected_attention(spec: TrialSpec) -> contextlib.AbstractContextManager[None]:
    """Let torch use on fake tensors the kernel that materialises all scores, if the device would use it."""
    model = decoder_of(spec.workload.model)
    if model is None or spec.device not in TAKES_GROUPED:
        return contextlib.nullcontext()
    kernel = attention_plan(spec, model, torch.device("cpu")).kernel
    return sdpa_kernel(SDPBackend.MATH) if kernel == "math" else contextlib.nullcontext()


def _check_attention(spec: TrialSpec, model: LlamaModel, device: torch.device) -> None:
    wanted = spec.candidate.kernels.attention
    available = [name for name in ATTENTION_BACKENDS if _runs_attention(name, spec, model, device)]
    if wanted not in available:
        dtype = attention_plan(spec, model, device).dtype
        raise InfeasibleSpec(
            f"attention {wanted!r} is not available on this {device.type} device for {dtype} with head size "
            f"{model.head_size}; use one of: auto, "
            f"{', '.join(available)}"
        )


def _runs_attention(name: Kernel, spec: TrialSpec, model: LlamaModel, device: torch.device) -> bool:
    """Try a kernel, forward and backward: support depends on device, build, type and shape.

    A rank that holds a part of each sequence uses another call, which is tried instead.
    """
    kernels = dataclasses.replace(spec.candidate.kernels, attention=name)
    candidate = dataclasses.replace(spec.candidate, kernels=kernels)
    plan = attention_plan(dataclasses.replace(spec, candidate=candidate), model, device)
    q, k, v = _tried(plan, model, device)
    with warnings.catch_warnings(action="ignore"), sdpa_kernel(ATTENTION_BACKENDS[name]):
        try:
            if _attends_to_parts(spec.candidate.layout):
                with torch.no_grad():
                    _try_parts(plan, q, k, v)
            else:
                torch.autograd.backward(causal_attention(q, k, v, expands=plan.expands).sum())
        except RuntimeError:
            return False
    return True


def _try_parts(plan: AttentionPlan, q: Tensor, k: Tensor, v: Tensor) -> None:
    parts = Parts.by(plan)
    for causal in (True, False):
        out, lse, seeds = parts.attend(q, k, v, causal=causal)
        parts.backward(Back(out, out, lse, seeds), q, k, v, causal=causal)
