"""Compiled layers in a dry run: graphs partitioned as for inductor, executed with the memory of fused kernels."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch._dynamo
from torch import fx
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import get_default_op_list, min_cut_rematerialization_partition
from torch._prims import rng_prims

from trials.dryrun.tracker import MemoryTracker
from trials.spec import TrialSpec

BACKEND = "dryrun"
"""Name of the backend of torch.compile."""
SIMULATED = ("inductor",)
"""Backends whose graphs are simulated; programs of others are simulated as eager code."""
ALSO_FUSED = (torch.ops.aten.cat, torch.ops.aten.scatter)
"""Operators that inductor fuses, although its partitioner does not count on it: those of rotary positions and of the
loss, whose scattering into a constant becomes a choice by element."""


def is_simulated(spec: TrialSpec) -> bool:
    """Whether the trial compiles graphs that can be simulated."""
    kernels = spec.candidate.kernels
    return kernels.compile != "off" and kernels.backend in SIMULATED


def with_graphs(spec: TrialSpec) -> TrialSpec:
    """Return the trial with simulated graphs. Those of a whole model end at its layers, where memory is recorded."""
    return _with_kernels(spec, compile="block", backend=BACKEND, compile_mode="default", dynamic=False)


def without_graphs(spec: TrialSpec) -> TrialSpec:
    """Return the trial without torch.compile."""
    return _with_kernels(spec, compile="off")


def _with_kernels(spec: TrialSpec, **changes: Any) -> TrialSpec:
    """Liger's norms, which run only on CUDA, keep what torch's keep."""
    kernels = dataclasses.replace(spec.candidate.kernels, memory_format="nchw", **changes)
    if kernels.fused == "liger":
        kernels = dataclasses.replace(kernels, fused="torch")
    return dataclasses.replace(spec, candidate=dataclasses.replace(spec.candidate, kernels=kernels))


def prepare() -> None:
    """Load the compiler's decompositions, which takes a second, for all processes forked later."""
    _decompositions()


def _decompositions() -> Any:
    return import_module("torch._inductor.compile_fx").select_decomp_table()


@dataclass(slots=True)
class _Simulation:
    tracker: MemoryTracker
    num_graphs: int = 0


_simulation: ContextVar[_Simulation] = ContextVar("simulation")


@contextlib.contextmanager
def simulated_graphs(tracker: MemoryTracker) -> Iterator[None]:
    """Let the backend :data:`BACKEND` report to the tracker in the body.

    Raises:
        RuntimeError: the body compiled nothing, as if torch does not compile in the presence of a tracker.
    """
    simulation = _Simulation(tracker)
    token = _simulation.set(simulation)
    try:
        with torch._dynamo.config.patch(optimize_ddp=False):  # it makes fake tensors of its own
            yield
        if simulation.num_graphs == 0:
            raise RuntimeError("no graph was compiled")
    finally:
        _simulation.reset(token)
        torch._dynamo.reset()


@register_backend(name=BACKEND)
def _partitioned(graph: fx.GraphModule, inputs: list[Any], **_: Any) -> Any:
    """Decompose and partition a graph as inductor does, and interpret both parts."""
    simulation = _simulation.get()
    simulation.num_graphs += 1
    compiler = partial(_interpreted, simulation.tracker)
    compile_graph = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        decompositions=_decompositions,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    return compile_graph(graph, inputs)


def _interpreted(tracker: MemoryTracker, graph: fx.GraphModule, _inputs: Any) -> Callable[[list[Any]], Any]:
    stored = stored_nodes(graph.graph)

    def run(args: list[Any]) -> Any:
        return _FusedRun(graph, tracker, stored).boxed_run(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


class _FusedRun(fx.Interpreter):
    """One run of a graph, in which values inside fused kernels take no memory."""

    def __init__(self, graph: fx.GraphModule, tracker: MemoryTracker, stored: frozenset[fx.Node]) -> None:
        super().__init__(graph)
        self._tracker = tracker
        self._stored = stored

    def run_node(self, n: fx.Node) -> Any:
        if n in self._stored:
            return super().run_node(n)
        with self._tracker.paused():
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run operators that draw random numbers and are recomputed, without their generator's state."""
        if target is rng_prims.run_and_save_rng_state:
            function, *inputs = args
            return torch.empty(0, dtype=torch.uint8), function(*inputs, **kwargs)
        if target is rng_prims.run_with_rng_state:
            _, function, *inputs = args
            return function(*inputs, **kwargs)
        return super().call_function(target, args, kwargs)


def stored_nodes(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes whose results are in memory: all but the elementwise operators, reductions and views that only
    others of these read, because one kernel computes them together."""
    operators = get_default_op_list()
    stored: set[fx.Node] = set()

    def needs(user: fx.Node) -> bool:
        is_view = operators.is_view(user) or user.target is operator.getitem
        return user in stored if is_view else not is_fused(user)

    def is_fused(node: fx.Node) -> bool:
        return operators.is_fusible(node) or getattr(node.target, "overloadpacket", None) in ALSO_FUSED

    for node in reversed(graph.nodes):
        if not is_fused(node) or any(needs(user) for user in node.users):
            stored.add(node)
    return frozenset(stored)
