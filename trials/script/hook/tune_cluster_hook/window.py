"""Records steps with torch's profiler, then one more with module names and allocations; writes raw files only.

Recordings are analysed outside of the program, because even ending one takes seconds. Hooks run inside ranges opened by
torch, such as ``Optimizer.step``. A range that is opened in one recording and closed in another writes to freed memory,
so one step between the two is not recorded.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import re
import sys
from typing import Any, Callable

from .facts import FACTS, any_compiled, local_numel, spine, world_size
from .steps import FOLDER_VARIABLE, STEPS, accelerator, guarded, note, rank

VARIABLE = "TUNE_CLUSTER_PROFILE"
"""Variable with the settings of the recording as JSON, with the keys that :class:`Window` reads."""
MAX_MODULES = 5000
MAX_TENSORS = 2000
MAX_EVENTS = 50
MAX_REASON = 300
_BREAK = re.compile(r"Graph break.* in user code at (.+:\d+)")
_AGAIN = re.compile(r"Recompiling function .* in (.+:\d+)")


class Compilations(logging.Handler):
    """Handler of torch's log of graph breaks and recompilations, which is otherwise off."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: dict[tuple[str, str, str], int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._take(record.getMessage())
        except Exception:  # training continues without it
            note("a line of the compiler's log was not recognized")

    def _take(self, text: str) -> None:
        for kind, pattern in (("graph break", _BREAK), ("recompilation", _AGAIN)):
            match = pattern.search(text)
            if match is None:
                continue
            lines = [line.strip() for line in text[match.end() :].splitlines() if line.strip()]
            if kind == "recompilation" and len(lines) > 1:
                lines = lines[1:]  # the first only reports a failed guard
            reason = re.sub(r"^(Graph Break Reason|Reason): ", "", lines[0]) if lines else ""
            key = kind, match.group(1), reason.lstrip("- ")[:MAX_REASON]
            if key in self.found or len(self.found) < MAX_EVENTS:
                self.found[key] = self.found.get(key, 0) + 1

    def records(self) -> list[dict[str, Any]]:
        return [
            {"kind": kind, "place": place, "reason": reason, "times": times}
            for (kind, place, reason), times in self.found.items()
        ]


COMPILATIONS = Compilations()


_enabled: set[str] = set()
"""Logs enabled only for this recording."""


def listen(module: Any) -> None:
    """Hook for modules of torch's compiler that log graph breaks or recompilations."""
    state: Any = getattr(sys.modules.get("torch._logging._internal"), "log_state", None)
    for name in ("graph_breaks", "recompiles"):
        is_shown = name not in _enabled and hasattr(state, "artifact_names") and name in state.artifact_names
        log = logging.getLogger(f"{module.__name__}.__{name}")
        log.setLevel(logging.DEBUG)
        log.addHandler(COMPILATIONS)
        log.propagate = log.propagate and is_shown
        if not is_shown:
            _enabled.add(name)
            if name == "recompiles" and hasattr(state, "enable_artifact"):
                state.enable_artifact(name)  # otherwise the message is not even formatted


class Window:
    """The recorded steps of this rank, by the number of finished steps."""

    def __init__(self, wanted: dict[str, Any]) -> None:
        self._first = max(2, int(wanted["first"]))  # a step is bounded by ends, and the first has none before it
        self._last = max(self._first, int(wanted["last"]))
        self._is_named = bool(wanted.get("modules"))
        self._has_memory = bool(wanted.get("memory"))
        self._has_stack = bool(wanted.get("stack"))
        self._ranks = wanted.get("ranks")
        self._profiler: Any = None
        self._step: Any = None
        self._handles: list[Any] = []
        self._meta: dict[str, Any] = {}
        self._notes: list[str] = []
        if self._first != int(wanted["first"]):
            self._notes.append("the first step cannot be recorded: recording started with the second")

    @guarded("profile")
    def step_ended(self, count: int) -> None:
        """Update after ``count`` steps are over."""
        named = self._last + 2
        if not self._is_wanted() or count > named:
            return
        self._leave_step()
        if count == max(1, self._first - 2):
            self._profiler = _profiler(stack=self._has_stack)
            self._profiler.prepare_trace()
        if count == self._first - 1:
            self._begin()
        if count == self._last:
            self._end("steps.json")
            if not self._is_named:
                self._write()
        if count == named - 1 and self._is_named:
            self._begin_named()
        if count == named and self._is_named:
            self._end("modules.json")
            self._write_snapshot()
            self._write()
        if self._profiler is not None and count >= self._first - 1:
            self._enter_step(count + 1)

    def _is_wanted(self) -> bool:
        return self._ranks is None or int(rank()) in self._ranks

    def _begin(self) -> None:
        self._mark_passes()
        self._profiler.start_trace()

    def _mark_passes(self) -> None:
        """Put a range around the whole model's forward pass; hooks inside compiled parts would be traced."""
        for module in spine(FACTS.root)[:1] if FACTS.root is not None else ():
            self._mark(module, "tc.forward")

    def _begin_named(self) -> None:
        """Record one more step with a range per module, and allocations."""
        root = FACTS.root
        if root is None:
            self._notes.append("the model is unknown: no figures by module")
        elif any_compiled(root):
            self._notes.append("the model is compiled: no figures by module")
            self._mark_passes()
        else:
            for name, module in list(root.named_modules())[:MAX_MODULES]:
                self._mark(module, f"tc.module:{name}")
        self._meta["tensors"], self._meta["start_bytes"] = _held(root)
        backend = accelerator()
        if backend is not None:
            self._meta["start_bytes"] = int(backend.memory_allocated())
            memory: Any = getattr(backend, "memory", None)
            if self._has_memory and hasattr(memory, "_record_memory_history"):
                memory._record_memory_history()
        self._profiler = _profiler(memory=True)
        self._profiler.prepare_trace()
        self._profiler.start_trace()

    def _mark(self, module: Any, name: str) -> None:
        record = sys.modules["torch"].profiler.record_function
        running: list[Any] = []

        def before(*_: Any) -> None:
            entered = record(name)
            entered.__enter__()
            running.append(entered)

        def after(*_: Any) -> None:
            if running:
                running.pop().__exit__(None, None, None)

        self._handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    def _enter_step(self, number: int) -> None:
        self._step = sys.modules["torch"].profiler.record_function(f"ProfilerStep#{number}")
        self._step.__enter__()

    def _leave_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

    def _end(self, kind: str) -> None:
        profiler, self._profiler = self._profiler, None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        profiler.stop_trace()
        profiler.export_chrome_trace(_path(kind))

    def _write_snapshot(self) -> None:
        memory: Any = getattr(accelerator(), "memory", None)
        if self._has_memory and hasattr(memory, "_dump_snapshot"):
            memory._dump_snapshot(_path("memory.pickle"))
            memory._record_memory_history(enabled=None)

    def _write(self) -> None:
        """Write the last file: if it exists, so do the others."""
        backend = accelerator()
        description = {
            **self._meta,
            "rank": int(rank()),
            "world_size": world_size(),
            "first": self._first,
            "last": self._last,
            "device": "cpu" if backend is None else backend.__name__.rpartition(".")[2],
            "modules": self._is_named,
            "compilations": COMPILATIONS.records(),
            "notes": self._notes,
        }
        path = _path("window.json")
        with open(f"{path}.part", "w", encoding="ascii") as file:
            json.dump(description, file)
        os.replace(f"{path}.part", path)


def _path(kind: str) -> str:
    return os.path.join(os.environ[FOLDER_VARIABLE], f"rank{rank()}.{kind}")


def _profiler(*, memory: bool = False, stack: bool = False) -> Any:
    torch = sys.modules["torch"]
    torch.profiler  # noqa: B018  # some releases import it at first use
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU]
    backend = accelerator()
    own = None if backend is None else getattr(kinds, backend.__name__.rpartition(".")[2].upper(), None)
    if own is not None:
        activities.append(own)
    return torch.profiler.profile(activities=activities, record_shapes=True, profile_memory=memory, with_stack=stack)


def _held(root: Any) -> tuple[list[dict[str, Any]], int]:
    """Return weights, gradients and optimiser states with their modules, the largest first, and their total bytes."""
    found: list[dict[str, Any]] = []
    names: dict[int, str] = {}

    def add(tensor: Any, module: str, what: str) -> None:
        local = getattr(tensor, "_local_tensor", tensor)
        if hasattr(local, "data_ptr") and local.numel():
            size = local_numel(tensor) * tensor.element_size()
            found.append({"module": module, "what": what, "bytes": size, "address": int(local.data_ptr())})

    if root is not None:
        for name, parameter in root.named_parameters():
            names[id(parameter)] = owner = name.rpartition(".")[0]
            add(parameter, owner, "weights")
            if parameter.grad is not None:
                add(parameter.grad, owner, "gradients")
    kind = sys.modules["torch"].optim.Optimizer
    for optimizer in [one for one in gc.get_objects() if issubclass(type(one), kind)]:
        for parameter, state in optimizer.state.items():
            for tensor in (state or {}).values():
                if hasattr(tensor, "data_ptr"):
                    add(tensor, names.get(id(parameter), ""), "optimiser state")
    found.sort(key=lambda one: -one["bytes"])
    return found[:MAX_TENSORS], sum(one["bytes"] for one in found)


HOOKS: dict[str, tuple[Callable[[Any], None], ...]] = {
    "torch._dynamo.symbolic_convert": (listen,),
    "torch._dynamo.convert_frame": (listen,),
    "torch._dynamo.guards": (listen,),
    "torch._dynamo.exc": (listen,),
}
"""Hooks to run after the program has imported a module, in a recorded run."""


def install() -> None:
    """Record the steps that the tuner requests, if any."""
    STEPS.after_step = Window(json.loads(os.environ[VARIABLE])).step_ended
