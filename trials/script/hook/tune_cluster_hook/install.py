"""Installs the hooks before the program runs; frameworks get theirs directly after their import."""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import threading
from typing import Any, Callable, Sequence

from . import (
    collective_calls,
    compiler,
    framework_hooks,
    loader_knobs,
    model_knobs,
    process_knobs,
    step_parts,
    steps,
    watched_options,
    window,
)
from .knob_file import KNOBS, KNOBS_VARIABLE
from .roots import ROOTS
from .steps import STEPS
from .watched_options import OPTIONS

Hook = Callable[[Any], None]
HOOKS: dict[str, tuple[Hook, ...]] = {
    "argparse": (watched_options.argparse,),
    "omegaconf.dictconfig": (watched_options.omegaconf,),
    "torch": (steps.limit_memory, steps.limit_host_memory),
    "torch.nn.modules.module": (ROOTS.arm,),
    "torch.optim.optimizer": (ROOTS.count_steps, framework_hooks.optimizers),
    "torch.autograd": (framework_hooks.backward,),
    "torch.amp.grad_scaler": (framework_hooks.grad_scaler,),
    "torch.cuda.amp.grad_scaler": (framework_hooks.grad_scaler,),
    "torch.utils.data.dataloader": (framework_hooks.data_loader,),
    "torch.utils.checkpoint": (step_parts.checkpoints,),
    "torch.distributed.distributed_c10d": (collective_calls.functions,),
    "torch._dynamo.utils": (compiler.keep_log,),
    "transformers.trainer": (framework_hooks.trainer,),
    "deepspeed.runtime.engine": (framework_hooks.engine,),
}
"""Hooks to run after the program has imported a module. Lightning needs none, see :mod:`.framework_hooks`."""

KNOB_HOOKS: dict[str, Hook] = {
    "torch.amp.autocast_mode": model_knobs.autocast,
    "torch.amp.grad_scaler": model_knobs.grad_scaler,
    "torch.cuda.amp.grad_scaler": model_knobs.grad_scaler,
    "torch.nn.modules.module": ROOTS.arm,
    "torch.nn.parallel.distributed": process_knobs.data_parallel,
    "torch.optim.optimizer": ROOTS.count_steps,
    "torch.utils.checkpoint": model_knobs.checkpointing,
    "torch.utils.data.dataloader": loader_knobs.data_loader,
    "transformers.training_args": process_knobs.training_arguments,
}
"""The same for knobs, if a file of them is set."""

LAUNCHERS_ERRORS = ("ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException")
"""Errors that launchers raise when a child process has failed, which reports its own error."""


class AfterImport:
    """Finder of modules with hooks; runs the hooks after their import."""

    def __init__(self, hooks: dict[str, tuple[Hook, ...]]) -> None:
        self._hooks = hooks

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """Return the usual spec, with a loader that also runs the hook; None for all other modules."""
        hooks = self._hooks.get(name)
        if hooks is None:
            return None
        spec = self._usual(name, path, target)
        loader = getattr(spec, "loader", None)
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            for hook in hooks:
                steps.guarded(name)(hook)(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            steps.note(f"hook {name}: its loader is sealed")
        return spec

    def _usual(self, name: str, path: Sequence[str] | None, target: Any) -> Any:
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            if finder is not self and find_spec is not None:
                spec = find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


def install() -> None:
    """Install the hooks; ``sitecustomize`` calls it in every Python of the trial, including launchers and helpers."""
    hooks = dict(HOOKS) if os.environ.get(steps.FOLDER_VARIABLE) else {}
    if os.environ.get(KNOBS_VARIABLE):
        for name, hook in _knob_hooks().items():
            hooks[name] = tuple(dict.fromkeys((hook, *hooks.get(name, ()))))
    if os.environ.get(window.VARIABLE):
        hooks.update(window.HOOKS)
        steps.guarded("profile")(window.install)()
    sys.meta_path.insert(0, AfterImport(hooks))
    if not os.environ.get(steps.FOLDER_VARIABLE):
        return
    if "argparse" in sys.modules:  # other start-up files of Python may already have imported it
        steps.guarded("argparse")(watched_options.argparse)(sys.modules["argparse"])
    steps.guarded("environment")(watched_options.environment)()
    STEPS.stack_signal = _register_stacks()
    _watch_errors()
    atexit.register(_at_exit)
    if os.environ.get("RANK"):
        STEPS.loaded("hook:torch")


def _knob_hooks() -> dict[str, Hook]:
    """Read the file of knobs; if that fails, the program trains unchanged, with a warning."""
    try:
        KNOBS.read(os.environ[KNOBS_VARIABLE])
    except (OSError, ValueError) as error:
        steps.note(f"no knobs are applied: {error}")
        print(f"tune-cluster: WARNING: no knobs are applied: {error}", file=sys.stderr)  # noqa: T201
        return {}
    process_knobs.allocator()
    ROOTS.before_first_call(KNOBS.meet)
    for module in (loader_knobs.LOADERS.feeds, model_knobs.before_first_call, process_knobs.before_first_call):
        ROOTS.before_first_call(module)
    ROOTS.after_first_steps(KNOBS.report)
    ROOTS.after_first_steps(model_knobs.LEAVES.remove)
    atexit.register(KNOBS.report)
    return KNOB_HOOKS


def _register_stacks() -> bool:
    """Whether SIGUSR1 now makes this process write the stacks of its threads instead of ending it."""
    try:
        if signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
            return False
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)
    except (AttributeError, OSError, RuntimeError, ValueError):
        return False
    return True


_reported: set[int] = set()
"""Identities of errors already reported."""


def _report(error: Any, **values: Any) -> None:
    if error is None or isinstance(error, (SystemExit, KeyboardInterrupt)) or id(error) in _reported:
        return
    _reported.add(id(error))
    steps.guarded("unfinished line")(STEPS.flush)()
    kind = type(error)
    if kind.__name__ in LAUNCHERS_ERRORS:
        return
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    steps.error(module + kind.__qualname__, str(error), **values)


def _watch_errors() -> None:
    """Report the error that ends the program or one of its threads; Python then proceeds as usual."""
    shown, thread_shown = sys.excepthook, threading.excepthook

    def excepthook(kind: Any, error: Any, traceback: Any) -> None:
        steps.guarded("errors")(_report)(error)
        shown(kind, error, traceback)

    def thread_excepthook(args: Any) -> None:
        steps.guarded("errors")(_report)(args.exc_value, thread=getattr(args.thread, "name", None))
        thread_shown(args)

    sys.excepthook, threading.excepthook = excepthook, thread_excepthook


@steps.guarded("exit")
def _at_exit() -> None:
    """Report an error that another excepthook has handled, and write the last line."""
    _report(getattr(sys, "last_value", None))
    OPTIONS.report("hook:torch")
    if not _reported:
        STEPS.end("hook:torch")
