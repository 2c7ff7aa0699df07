"""Finds a program's root modules at their first call, before it runs, and intercepts all their calls.

A root is the outermost module of a training call: in training mode, with parameters that require gradients, with
gradients enabled, and outside of backward passes. A model wrapped for data parallelism is one root; a GAN has two.
Calls of outermost modules with only frozen parameters, such as a teacher, are also observed, but they are not roots.

``Module.__call__`` is replaced until :data:`FIRST_STEPS` optimiser steps are over, and restored during each root's
call, so submodules and compilers never see the replacement. A forward pre-hook would be too late: ``_call_impl`` has
already read ``self.forward``. After that, only :class:`Interceptor` stays, in roots that are wrapped or observed.
"""

from __future__ import annotations

import collections
import functools
import sys
import threading
import weakref
from typing import Any, Callable

from .steps import guarded, is_compiling

FIRST_STEPS = 2
"""Optimiser steps after which the search for roots ends."""
PATIENCE = 10
"""Optimiser steps after which it ends even if none was found."""
MAX_CALLS = 400
"""Calls of roots after which it ends in any case. Each replaces ``Module.__call__`` twice, and Python 3.13 stops
caching attributes of a class after a thousand changes."""
LEAST_SHARE = 0.3
"""Smallest fraction of a model's parameters in its repeated block."""
WRAPPERS = ("DistributedDataParallel", "OptimizedModule", "FullyShardedDataParallel", "DataParallel")
SLOT = "_compiled_call_impl"
"""Module attribute that PyTorch (2.1 or later) calls instead of ``_call_impl``, and leaves out of copies."""

Call = Callable[..., Any]


class Interceptor:
    """Value of :data:`SLOT` in a root. Copies and pickles of the module get None instead."""

    __slots__ = ("call", "compiled")

    def __init__(self, compiled: Call | None) -> None:
        self.compiled = compiled
        """Previous value of the slot: the compiled call; None if the module is not compiled."""
        self.call: Call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def compiled_call(module: Any) -> Call | None:
    """Return the call set by ``module.compile()``, below an interceptor or not; None if there is none."""
    found: Any = getattr(module, SLOT, None)
    return found.compiled if isinstance(found, Interceptor) else found


def unwrap(module: Any) -> Any:
    """Return the model inside wrappers for data parallelism and compilation."""
    while type(module).__name__ in WRAPPERS:
        inner = getattr(module, "_orig_mod", None)
        inner = getattr(module, "module", None) if inner is None else inner
        if inner is None:
            break
        module = inner
    return module


def in_backward() -> bool:
    """Whether a backward pass is running: a module called then is being recomputed."""
    task = getattr(sys.modules["torch"]._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


class Root:
    """One root module, and the functions around its calls."""

    def __init__(self, module: Any, observers: list[CallObserver], *, is_frozen: bool = False) -> None:
        self.is_frozen = is_frozen
        self._module = weakref.ref(module)
        self._wraps: list[Callable[[Call], Call]] = []
        self._observers = observers
        self._interceptor = Interceptor(module.__dict__.get(SLOT))
        self.rebuild()
        module.__dict__[SLOT] = self._interceptor

    @property
    def module(self) -> Any:
        """The module that the program calls; None after the program has dropped it."""
        return self._module()

    @property
    def model(self) -> Any:
        """The module without its wrappers."""
        return unwrap(self.module)

    def wrap(self, around: Callable[[Call], Call]) -> Callable[[], None]:
        """Wrap all later calls in ``around(call)``. Return a function that undoes this."""

        def undo() -> None:
            if around in self._wraps:
                self._wraps.remove(around)
                self.rebuild()

        self._wraps.append(around)
        self.rebuild()
        return undo

    def compile(self) -> None:
        """Let PyTorch compile the module's call, below the functions around it."""
        self._interceptor.compiled = sys.modules["torch"].compile(self.module._call_impl)
        self.rebuild()

    def rebuild(self) -> None:
        """Compose the call from what is currently registered."""
        call = self._interceptor.compiled or functools.partial(_call_impl, self._module)
        for around in self._wraps:
            call = around(call)
        self._interceptor.call = _observed(self, call, self._observers) if self._observers else call

    def release(self) -> None:
        """Restore the module, unless something is around its calls."""
        module = self.module
        if module is None or self._wraps or self._observers or module.__dict__.get(SLOT) is not self._interceptor:
            return
        if self._interceptor.compiled is None:
            del module.__dict__[SLOT]
        else:
            module.__dict__[SLOT] = self._interceptor.compiled


def _call_impl(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call through a weak reference, so that a model dropped by the program is freed at once."""
    return module()._call_impl(*args, **kwargs)


class CallObserver:
    """Functions that run before and after every outermost call of a root outside of backward passes."""

    def __init__(self, before: Callable[..., None], after: Callable[..., None]) -> None:
        self.before = before
        self.after = after


_inside = threading.local()


def _observed(root: Root, call: Call, observers: list[CallObserver]) -> Call:
    def observed(*args: Any, **kwargs: Any) -> Any:
        if is_compiling() or getattr(_inside, "is_root", False) or in_backward():
            return call(*args, **kwargs)
        _inside.is_root = True
        try:
            for observer in tuple(observers):
                observer.before(root, args, kwargs)
            output = call(*args, **kwargs)
            for observer in tuple(observers):
                observer.after(root, output)
        finally:
            _inside.is_root = False
        return output

    return observed


class Roots:
    """Finds roots and notifies callbacks; does nothing if none is registered."""

    def __init__(self) -> None:
        self.found: list[Root] = []
        self.frozen: list[Root] = []
        self.is_armed = False
        self._depth = 0
        """Open calls of modules that are neither roots nor frozen."""
        self._first: list[Callable[[Root, Any, Any], None]] = []
        self._over: list[Callable[[], None]] = []
        self._observers: list[CallObserver] = []
        self._steps: collections.Counter[int] = collections.Counter()
        self._calls = 0
        self._put_back: Callable[[], None] | None = None
        self._is_counting = False

    def before_first_call(self, callback: Callable[[Root, Any, Any], None]) -> None:
        """Call ``callback(root, args, kwargs)`` before the first call of each root, in the thread of that call."""
        self._first.append(guarded(f"root {callback.__module__}")(callback))

    def after_first_steps(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` once, at the end of optimiser step :data:`FIRST_STEPS`."""
        self._over.append(callback)

    def observe(self, before: Callable[..., None], after: Callable[..., None]) -> Callable[[], None]:
        """Call ``before(root, args, kwargs)`` and ``after(root, output)`` around every outermost call of a root.

        Calls in backward passes (recomputation) and of roots inside roots are left out. Calls in evaluation are
        included; see ``root.module.training``. So are frozen models (``root.is_frozen``). Return a function that ends
        this.
        """
        observer = CallObserver(before, after)

        def end() -> None:
            if observer in self._observers:
                self._observers.remove(observer)
                self._rebuild()

        self._observers.append(observer)
        self._rebuild()
        return end

    def _rebuild(self) -> None:
        for root in (*self.found, *self.frozen):
            root.rebuild()
            if not self.is_armed:
                root.release()

    def arm(self, module: Any) -> None:
        """Hook for ``torch.nn.modules.module``: watch calls of modules from here on."""
        kind = module.Module
        if not (self._first or self._observers) or not hasattr(kind, SLOT):
            return
        original = kind.__call__

        def watching(self_: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(self_, *args, **kwargs)
            # Not armed: code that stored this function in the meantime still calls it.
            if not self.is_armed:
                return original(self_, *args, **kwargs)
            if not (self_.training and self._is_root(self_)) and not self._is_frozen(self_):
                self._depth += 1
                try:
                    return original(self_, *args, **kwargs)
                finally:
                    self._depth -= 1
            kind.__call__ = original
            try:
                self._meet(self_, args, kwargs)
                return original(self_, *args, **kwargs)
            finally:
                if self.is_armed:
                    kind.__call__ = watching

        def put_back() -> None:
            kind.__call__ = original

        self._keep_replicas_apart(kind)
        kind.__call__ = watching
        self._put_back, self.is_armed = put_back, True

    @guarded("replicas")
    def _keep_replicas_apart(self, kind: Any) -> None:
        """Remove interceptors from ``DataParallel``'s replicas, which would call the root."""
        replicate = kind._replicate_for_data_parallel

        @functools.wraps(replicate)
        def replicated(self_: Any) -> Any:
            replica = replicate(self_)
            if isinstance(replica.__dict__.get(SLOT), Interceptor):
                replica.__dict__[SLOT] = replica.__dict__[SLOT].compiled
            return replica

        kind._replicate_for_data_parallel = replicated

    @guarded("roots")
    def _is_root(self, module: Any) -> bool:
        if isinstance(module.__dict__.get(SLOT), Interceptor):
            return True
        torch = sys.modules["torch"]
        if not torch.is_grad_enabled() or in_backward():
            return False
        return any(parameter.requires_grad for parameter in module.parameters())

    @guarded("frozen models")
    def _is_frozen(self, module: Any) -> bool:
        """Whether an outermost module has parameters, all of them frozen."""
        if self._depth or not self._observers or in_backward():
            return False
        parameters = list(module.parameters())
        return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)

    def _meet(self, module: Any, args: Any, kwargs: Any) -> None:
        self._calls += 1
        if self._calls > MAX_CALLS:
            self.disarm()
        elif not isinstance(module.__dict__.get(SLOT), Interceptor):
            self._add(module, args, kwargs)

    @guarded("new root")
    def _add(self, module: Any, args: Any, kwargs: Any) -> None:
        if self._is_frozen(module):
            self.frozen.append(Root(module, self._observers, is_frozen=True))
            return
        root = Root(module, self._observers)
        self.found.append(root)
        for callback in self._first:
            callback(root, args, kwargs)

    def count_steps(self, module: Any) -> None:
        """Hook for ``torch.optim.optimizer``: the first steps are over when one optimiser has made them."""
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if register is not None and (self._first or self._observers):
            self._is_counting = True
            register(self._stepped)  # permanently: hooks cannot be removed while they run

    def _stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_counting or is_compiling():
            return
        self._steps[id(optimizer)] += 1
        # Restoring PyTorch's call makes functions compiled with this one recompile, so do it at once.
        is_enough = self.found or "torch._dynamo" in sys.modules
        if self._steps[id(optimizer)] >= (FIRST_STEPS if is_enough else PATIENCE):
            self._end_first_steps()

    @guarded("first steps")
    def _end_first_steps(self) -> None:
        self._is_counting = False
        self.disarm()
        for callback in self._over:
            callback()
        for root in (*self.found, *self.frozen):
            root.release()

    def disarm(self) -> None:
        """Restore PyTorch's ``Module.__call__`` permanently."""
        self.is_armed = False
        if self._put_back is not None:
            self._put_back()
            self._put_back = None


ROOTS = Roots()


# ---- The repeated block of a model


class RepeatedBlock:
    """Modules of one class that hold most of a model's parameters and are not nested in each other."""

    def __init__(self, members: list[Any], share: float) -> None:
        self.members = members
        self.share = share

    @property
    def name(self) -> str:
        """Name of the class."""
        return type(self.members[0]).__name__


def repeated_block(model: Any) -> RepeatedBlock | None:
    """Return the composite class with the largest share of the parameters in at least two instances; None if that is
    below :data:`LEAST_SHARE`."""
    groups: dict[Any, list[Any]] = {}
    for module in model.modules():
        if module is not model and next(module.children(), None) is not None and not _is_container(module):
            groups.setdefault(_kind(module), []).append(module)
    total = _elements([model])
    best: RepeatedBlock | None = None
    for members in groups.values():
        inner = {id(part) for member in members for part in member.modules() if part is not member}
        members = [member for member in members if id(member) not in inner]
        share = _elements(members) / total if total else 0.0
        if len(members) > 1 and share > (best.share * 1.001 if best else LEAST_SHARE):
            best = RepeatedBlock(members, share)
    return best


def _is_container(module: Any) -> bool:
    return type(module).__name__ in ("ModuleList", "ModuleDict", "ParameterList", "ParameterDict")


def _kind(module: Any) -> Any:
    """Return the class; for a Sequential, also those of its elements."""
    if type(module).__name__ != "Sequential":
        return type(module)
    return tuple((type(part), tuple(tuple(p.shape) for p in part.parameters())) for part in module.children())


def _elements(modules: list[Any]) -> int:
    """Count the elements of the parameters of all modules, each once."""
    parameters = {id(parameter): parameter for module in modules for parameter in module.parameters()}
    return sum(_whole(parameter) for parameter in parameters.values())


def _whole(parameter: Any) -> int:
    whole = getattr(parameter, "ds_numel", None)  # under DeepSpeed's ZeRO-3 the parameter itself is empty
    return int(whole if whole is not None else parameter.numel())
