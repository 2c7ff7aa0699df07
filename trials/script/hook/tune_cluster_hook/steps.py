"""Counts and times this process's optimiser steps, writes a line for each, and guards hooks against errors."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import platform
import random
import sys
import time
import weakref
from typing import Any, Callable

# ---- Output of hooks, and the guard around each of them

FOLDER_VARIABLE = "TUNE_CLUSTER_REPORT"
MAX_MESSAGE = 1500


def _load_api() -> Any:
    """Load this package's copy of the report API, regardless of the program's."""
    scripts = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.path.join(scripts, "api", "tune_cluster_report.py")
    spec = importlib.util.spec_from_file_location("tune_cluster_hook.report_api", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no report API at {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_api = _load_api()
_channel = _api.Channel()
rank: Callable[[], str] = _api.rank
"""Returns this process's rank in the whole training, as text."""
_noted: set[str] = set()


def emit(source: str, **values: Any) -> None:
    """Append one line to this rank's file.

    Raises:
        OSError: The folder is missing, or the disk is full.
    """
    _channel.write(source, **values)


def note(text: str, source: str = "hook:torch") -> None:
    """Report a note to the tuner, once."""
    if text in _noted:
        return
    _noted.add(text)
    try:
        emit(source, event="note", text=text)
    except Exception:
        _noted.add("silent")


def error(kind: str, message: str, **values: Any) -> None:
    """Report the error that ends this process."""
    try:
        emit("hook:torch", event="error", type=kind, message=message[:MAX_MESSAGE], pid=os.getpid(), **values)
    except Exception:
        _noted.add("silent")


def stop_at() -> int | None:
    """Return the last step to train; None if it is not yet decided."""
    try:
        with open(
            os.path.join(os.environ[FOLDER_VARIABLE], "stop_late" if STEPS.has_workers else "stop"), encoding="ascii"
        ) as file:
            return int(file.read(32))
    except (OSError, ValueError, KeyError):
        return None


_disabled: dict[str, bool] = {}


def guarded(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a hook: if it fails, this is reported, its result is None, and it is not called again.

    Args:
        what: Its name; hooks of the same name are disabled together.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if what in _disabled:
                return None
            try:
                return function(*args, **kwargs)
            except Exception as failure:
                _disabled[what] = True
                note(f"hook {what}: {type(failure).__name__}: {str(failure)[:300]}")
                return None

        return call

    return decorate


def generator_states() -> list[Any]:
    """Return states of the random generators that a program uses by default, for comparison."""
    found = [sys.modules["torch"].get_rng_state().tolist(), repr(random.getstate())]
    if "numpy" in sys.modules:
        found.append(repr(sys.modules["numpy"].random.get_state()))
    return found


def is_compiling() -> bool:
    """Whether torch.compile is tracing this code: hooks must then leave no trace in the graph."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    if hasattr(torch.compiler, "is_compiling"):
        return bool(torch.compiler.is_compiling())
    return bool(torch._utils.is_compiling())  # before PyTorch 2.2


# ---- This process's accelerator: waiting for it, its allocator's peaks; memory of the process itself

_BACKENDS = ("cuda", "npu", "xpu", "musa", "mlu")
"""Modules of torch with ``synchronize`` and ``max_memory_allocated``; not all of them exist."""
MEMORY_LIMIT_VARIABLE = "TUNE_CLUSTER_MEMORY_LIMIT_BYTES"
HOST_MEMORY_LIMIT_VARIABLE = "TUNE_CLUSTER_HOST_MEMORY_LIMIT_BYTES"


def accelerator() -> Any | None:
    """Return torch's module for the device of this process; None on CPU, or before anything has run on the device."""
    torch = sys.modules.get("torch")
    known = {} if torch is None else vars(torch)  # missing names cost microseconds in torch's __getattr__
    for name in _BACKENDS:
        backend = known.get(name)
        is_initialized = getattr(backend, "is_initialized", None)
        if is_initialized is not None and is_initialized():
            return backend
    return None


def synchronize(backend: Any | None) -> None:
    """Wait until the device has finished all its work."""
    if backend is not None:
        backend.synchronize()


def memory(backend: Any | None) -> dict[str, int]:
    """Return peaks since the process began: of the device's allocator or, on CPU, of the resident set."""
    if backend is None:
        return _resident()
    return {
        "allocated_bytes": int(backend.max_memory_allocated()),
        "reserved_bytes": int(backend.max_memory_reserved()),
    }


_status: dict[int, int] = {}
"""The open ``/proc/self/status`` by process."""
RESIDENT_S = 0.05
"""Minimum interval between reads of the peak resident set, in seconds: a read takes the kernel tens of microseconds."""
_resident_read: tuple[float, int, dict[str, int]] = (0.0, 0, {})
"""Time of the last read, its process, and its result."""


def _resident() -> dict[str, int]:
    global _resident_read
    now, pid = time.perf_counter(), os.getpid()
    if pid != _resident_read[1] or now - _resident_read[0] >= RESIDENT_S:
        _resident_read = now, pid, _read_resident(pid)
    return _resident_read[2]


def _read_resident(pid: int) -> dict[str, int]:
    """Read ``VmHWM``, because ``getrusage`` includes the parent program."""
    try:
        return {"rss_bytes": _of_process(pid, b"VmHWM")}
    except (OSError, IndexError, ValueError):
        return {}


def _of_process(pid: int, name: bytes) -> int:
    """Return the bytes in a line of this process's status."""
    if pid not in _status:
        _status[pid] = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    return int(os.pread(_status[pid], 4096, 0).split(name + b":", 1)[1].split(None, 1)[0]) << 10


def is_capturing(backend: Any | None) -> bool:
    """Whether work is being captured in a device graph, which waiting for the device would break."""
    capturing = getattr(backend, "is_current_stream_capturing", None)
    return capturing is not None and bool(capturing())


def limit_memory(torch: Any) -> None:
    """Limit this process to the trial's share of device memory, when it starts using the device."""
    limit = os.environ.get(MEMORY_LIMIT_VARIABLE)
    for name in _BACKENDS if limit else ():
        backend = getattr(torch, name, None)
        lazy_call = getattr(backend, "_lazy_call", None)
        if lazy_call is not None:
            lazy_call(functools.partial(_limit, backend, int(limit or 0)))


def limit_host_memory(_: Any) -> None:
    """Make allocations fail that would exceed the trial's host memory limit.

    The system limits private writable mappings (RLIMIT_DATA), but not mapped code and files.
    """
    limit = os.environ.get(HOST_MEMORY_LIMIT_VARIABLE)
    if not limit:
        return
    import resource

    pid = os.getpid()
    left = max(0, int(limit) - _of_process(pid, b"VmRSS"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = _of_process(pid, b"VmData") + left
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _limit(backend: Any, limit: int) -> None:
    try:
        local = int(os.environ.get("LOCAL_RANK", "0"))
        device = local if local < backend.device_count() else 0
        total = backend.get_device_properties(device).total_memory
        backend.set_per_process_memory_fraction(min(1.0, limit / total), device)
    except Exception as failure:
        note(f"memory is not limited: {type(failure).__name__}: {failure}")


# ---- Counting and timing of this process's optimiser steps

GENERIC, ENGINE, TRAINER = 0, 1, 2
"""Detail that a source knows; sources with more detail override the others."""

MAX_LOSSES = 4096
MAX_OPTIMIZERS = 64


class Steps:
    """Events since the last step, from all sources; the highest source that reported determines where a step ends."""

    def __init__(self) -> None:
        self.level = GENERIC
        self.count = 0
        self.stack_signal = False
        """Whether SIGUSR1 makes this process write its stacks."""
        self.parts: Any = None
        """Clock of a step's parts, see :mod:`.step_parts`."""
        self.collectives: Any = None
        """Counter of collectives, see :mod:`.collective_calls`."""
        self.compiler: Any = None
        """Timer of compilation, see :mod:`.compiler`."""
        self._last: float | None = None
        self._last_cpu = 0.0
        self._losses: list[Any] = []
        self._divided: list[float | None] = []
        self._pending: dict[str, Any] | None = None
        self._reported_by = 0
        self._is_watched = False
        self.after_step: Callable[[int], None] | None = None
        """Called with the number of finished steps, before the line of the last one is written."""
        self._backwards = 0
        self._optimizers: set[int] = set()
        self._loader: dict[str, int] = {}
        self._batches: Callable[[], Any] = lambda: None
        """Returns the iterator of the last training batch; None after the program has dropped it."""
        self.has_workers = False
        """Whether worker processes load the training data."""
        self.items_draw: bool | None = None
        """Whether samples loaded by this process itself draw random numbers; None: not observed."""
        self._length = 0
        """Tokens of the longest samples since the last step."""

    def claim(self, level: int) -> bool:
        """Disable sources with less detail. Return whether this one is enabled."""
        self.level = max(self.level, level)
        return level == self.level

    def begin(self, source: str, **values: Any) -> None:
        """Begin the first step of a training loop."""
        self.flush()
        synchronize(accelerator())
        self.loaded(source)
        emit(source, event="begin", pid=os.getpid(), stack_signal=self.stack_signal, **values)
        self.forget_losses()
        self.restart_clock()

    def loaded(self, source: str) -> None:
        """Report once who this process is: at its start if it is known to be a rank, else at its first step."""
        if self._reported_by == os.getpid():
            return
        self._reported_by = os.getpid()
        python = platform.python_version()
        emit(source, event="loaded", pid=self._reported_by, stack_signal=self.stack_signal, python=python)

    def end(self, source: str) -> None:
        """End the training loop; sources with less detail are enabled again."""
        self.flush()
        if self._last is not None:
            emit(source, event="end", pid=os.getpid())
        self.level = GENERIC
        self._last = None

    def boundary(self, source: str, *, hold: bool = False, **values: Any) -> None:
        """End an optimiser step.

        Args:
            source: The reporting source.
            hold: Whether its line waits for :meth:`amend` and :meth:`flush`.
            **values: Further values of it; collected losses are added if there is none among them.
        """
        self.flush()
        self.parts.close()
        host_ended, backend = time.perf_counter(), accelerator()
        synchronize(backend)
        now, now_cpu = time.perf_counter(), time.thread_time()
        self.loaded(source)
        self.count += 1
        line: dict[str, Any] = {"source": source, "step": self.count}
        if self._last is not None:
            step_time_s = now - self._last
            line["step_time_s"] = step_time_s
            line["cpu_s"] = round(max(0.0, now_cpu - self._last_cpu), 7)
            for name, seconds in self.parts.take().items():
                line[name] = min(seconds, step_time_s)
            line.update(self.collectives.take())
            line.update(self.compiler.take() or {})
            if backend is not None:
                line["ahead_s"] = round(now - host_ended, 7)
        self._backwards = len(self._losses)
        if "loss" not in values:
            line.update(self.backward_losses())
        if self._length:
            line["sample_length"], self._length = self._length, 0
        line.update(memory(backend))
        line.update(self._ahead() or {})
        line.update(values)
        self.forget_losses()
        if self._is_watched:
            line["watched"] = True
        self._pending = line
        if self.after_step is not None:
            self.after_step(self.count)
        if not hold:
            self.flush()
        self.restart_clock()

    def restart_clock(self, *, is_watched: bool = False) -> None:
        """Begin the next step now: work of hooks between two steps is not charged to the program.

        Args:
            is_watched: Whether hooks on the model will make that step longer; its line is marked.
        """
        self._is_watched = is_watched
        self.parts.restart(accelerator())
        self._last, self._last_cpu = time.perf_counter(), time.thread_time()

    def amend(self, **values: Any) -> None:
        """Add to the line of the last step, if it is not yet written."""
        if self._pending is not None:
            self._pending.update(values)

    def pending(self, name: str) -> Any:
        """Return a value of the pending line."""
        return None if self._pending is None else self._pending.get(name)

    def flush(self) -> None:
        """Write the pending line."""
        line, self._pending = self._pending, None
        if line is not None:
            emit(**line)

    def loads(self, num_workers: int, batch_size: Any) -> None:
        """Record that a loader gives a batch."""
        self._loader = {"num_workers": num_workers}
        if isinstance(batch_size, int):
            self._loader["loader_batch_size"] = batch_size

    def reads(self, iterator: Any) -> None:
        """Record the loader iterator of a training batch."""
        if self._batches() is not iterator:
            self._batches = weakref.ref(iterator)

    @guarded("batches ahead")
    def _ahead(self) -> dict[str, int] | None:
        """Return the number of batches that worker processes have loaded and the program has not yet read.

        None without workers, and after they have got the last batches of an epoch, when the number falls to zero.
        """
        iterator = self._batches()
        loaded = getattr(iterator, "_worker_result_queue", None)
        if loaded is None or len(iterator._task_info) < iterator._prefetch_factor * iterator._num_workers:
            return None
        self.has_workers = True
        early = sum(len(task) > 1 for task in iterator._task_info.values())  # they wait for an earlier one
        pinned = iterator._data_queue.qsize() if iterator._data_queue is not loaded else 0
        return {"batches_ahead": loaded.qsize() + early + pinned}

    def saw_length(self, length: int) -> None:
        """Record the tokens per sample of a batch; 0 if it has no sequences."""
        self._length = max(self._length, length)

    def saw(self, optimizer: Any) -> None:
        """Record a step of an optimiser; wrappers of one share its parameters."""
        group = optimizer.param_groups[0]["params"]
        if group and len(self._optimizers) < MAX_OPTIMIZERS:
            self._optimizers.add(id(group[0]))

    def surroundings(self) -> dict[str, int]:
        """Return facts of the last step apart from the model: backward passes, loader, optimisers so far."""
        draws = {} if self.items_draw is None else {"items_draw": int(self.items_draw)}
        return {**self._loader, **draws, "backwards_per_step": self._backwards, "num_optimizers": len(self._optimizers)}

    def add_loss(self, loss: Any, divided_by: float | None = None) -> None:
        """Add the loss of a backward pass, still on its device.

        Args:
            loss: A tensor with one element.
            divided_by: The program's divisor just before, if visible.
        """
        if len(self._losses) < MAX_LOSSES:
            self._losses.append(loss)
            self._divided.append(divided_by)

    def forget_losses(self) -> None:
        """Assign later backward passes to the next step."""
        self._losses.clear()
        self._divided.clear()

    def backward_losses(self) -> dict[str, Any]:
        """Return the mean loss of this rank's backward passes.

        A program that accumulates over n micro-batches divides each loss by n, so the sum of its losses is the mean. If
        the division is not visible, return the mean, with the program's scaling.
        """
        if not self._losses:
            return {}
        values = [float(loss) for loss in self._losses]
        passes = len(values)
        divided = passes > 1 and all(by is not None and math.isclose(by, passes, rel_tol=1e-6) for by in self._divided)
        found: dict[str, Any] = {
            "loss": sum(values) if divided else sum(values) / passes,
            "loss_source": "hook:backward",
            "loss_scope": "rank",
            "backward_passes": passes,
        }
        if divided:
            found["loss_divided"] = True
        return found


STEPS = Steps()
