"""Live bytes by category, floating-point operations and collective traffic, seen operator by operator."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from trials.dryrun.records import CATEGORIES, Category, Peak, Traffic
from trials.operators import in_backward
from trials.parallel.shards import stored_part

_DEVICE = torch.ops.prim.device.default
_COLLECTIVE_NAMESPACES = ("c10d", "_c10d_functional")
_COLLECTIVES = (
    ("reduce_scatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("send", "send"),
    ("recv", "recv"),
)
"""Part of an operator's name, and the collective that it stands for; the first match wins."""

TrafficCounter = Counter[tuple[str, str]]
"""Number of calls and of bytes of collectives so far, by name and ``calls`` or ``bytes``."""


@dataclass(slots=True)
class _Block:
    category: Category
    num_bytes: int
    is_on_host: bool = False


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows every storage from the operator that makes it to its end.

    ``granule_bytes`` is what the allocator rounds sizes up to: 512 for CUDA's caching allocator, 1 for none.
    """

    def __init__(self, granule_bytes: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.granule_bytes = granule_bytes
        self.live_bytes: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        self.total_bytes = 0
        self.phase: Literal["build", "forward", "other", "optimizer"] = "forward"
        """What the rank is at outside of backward passes, which are known by themselves: building, or a step."""
        self.place = ""
        self.num_passes = 0
        """Passes of the step that have begun."""
        self.flops: Counter[str] = Counter()
        self._peaks: dict[str, tuple[int, dict[Category, int]]] = {}
        self._calls: Counter[str] = Counter()
        self._sent: Counter[str] = Counter()
        self._blocks: Any = WeakIdKeyDictionary()
        self._paused = 0
        self._on_host = 0
        self.host_bytes = 0
        """Live bytes in the host's memory, which count for nothing else."""
        self.peak_host_bytes = 0
        """Largest since the last pass began."""

    def peaks(self) -> dict[str, Peak]:
        """Peaks by ``phase/pass/place``, since the last :meth:`restart`."""
        return {
            key: Peak(total_bytes=total, by_category={name: size for name, size in sizes.items() if size})
            for key, (total, sizes) in self._peaks.items()
        }

    def collectives(self) -> dict[str, Traffic]:
        """Collectives by type, since the last :meth:`restart`."""
        return {
            name: Traffic(num_calls=calls, num_bytes=self._sent[name]) for name, calls in sorted(self._calls.items())
        }

    def tally(self) -> TrafficCounter:
        """The collectives as counters, for taking differences."""
        calls = {(name, "calls"): number for name, number in self._calls.items()}
        return Counter({**calls, **{(name, "bytes"): number for name, number in self._sent.items()}})

    def restart(self) -> None:
        """Forget peaks and counts; what is live stays known."""
        self.num_passes = 0
        self._peaks.clear()
        self.flops.clear()
        self._calls.clear()
        self._sent.clear()
        self.peak_host_bytes = self.host_bytes
        self._note_peak()

    def begin_pass(self) -> None:
        """Another pass begins: peaks are its own from now on."""
        self.num_passes += 1
        self.place = ""
        self.peak_host_bytes = self.host_bytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out of the account what is made in the body."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count what is made in the body as the host's."""
        self._on_host += 1
        try:
            yield
        finally:
            self._on_host -= 1

    def assign(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        """Move what the tensors occupy on this rank to ``category``, counting it if it was unknown."""
        for tensor in tensors:
            if tensor is not None:
                storage = stored_part(tensor).untyped_storage()
                block = self._blocks.get(storage)
                if block is None:
                    self._add(storage, category)
                elif block.category != category:
                    self._move(block, category)

    def settle(self, old: Iterable[Category], new: Category) -> None:
        """Move everything of the ``old`` categories that is live now to ``new``."""
        for block in list(self._blocks.values()):
            if block.category in old:
                self._move(block, new)

    def count_call(self, collective: str, num_bytes: int) -> None:
        """Count a collective that is emulated, not run."""
        self._calls[collective] += 1
        self._sent[collective] += num_bytes

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Take note that a storage changed its size in place, as FSDP has those of gathered parameters do."""
        block = self._blocks.get(storage)
        if block is not None and not self._paused:
            if block.num_bytes == 0:
                block.category = "communication"
            self._change(block, self._size(storage))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for more often than all else together
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # they call again with what they wrap
        kwargs = kwargs or {}
        if func is torch.ops._c10d_functional.wait_tensor.default:
            return args[0]  # as eager; the fake kernel makes a new tensor
        result = func(*args, **kwargs)
        if self._paused:
            return result
        is_collective = func.namespace in _COLLECTIVE_NAMESPACES
        category = "communication" if is_collective else self._default_category()
        for leaf in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._see(leaf, category)
        if is_collective:
            self._see_collective(func.__name__, args)
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops[self._work()] += count(*args, **kwargs, out_val=result)
        return result

    def _see(self, tensor: Tensor, category: Category) -> None:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage)
        if block is None:
            self._add(storage, category)
            return
        size = self._size(storage)
        if size != block.num_bytes:
            self._change(block, size)

    def _see_collective(self, name: str, args: Any) -> None:
        word = next((word for part, word in _COLLECTIVES if part in name), None)
        if word is None:
            return
        sides = [[leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args]
        self.count_call(word, max((sum(leaf.nbytes for leaf in side) for side in sides), default=0))
        if word in ("all_gather", "reduce_scatter", "all_to_all", "recv"):
            self._claim(leaf for side in sides for leaf in side)

    def _claim(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors as buffers of a collective; parameters and gradients that it works on stay what they are."""
        for tensor in tensors:
            block = self._blocks.get(tensor.untyped_storage())
            if block is not None and block.category in ("activation", "temporary"):
                self._move(block, "communication")

    def _default_category(self) -> Category:
        if self.phase == "build":
            return "param"
        if self.phase == "optimizer" or in_backward():
            return "temporary"
        return "activation"

    def _work(self) -> str:
        if not in_backward():
            return "forward"
        # Formulas of the backward pass run without recording a graph; what is computed again records one.
        return "recompute" if torch.is_grad_enabled() else "backward"

    def _size(self, storage: torch.UntypedStorage) -> int:
        granule = self.granule_bytes
        return -(-storage.nbytes() // granule) * granule

    def _add(self, storage: torch.UntypedStorage, category: Category) -> None:
        block = _Block(category, 0, self._on_host > 0)
        self._blocks[storage] = block
        weakref.finalize(storage, self._change, block, 0).atexit = False
        self._change(block, self._size(storage))

    def _move(self, block: _Block, category: Category) -> None:
        if not block.is_on_host:
            self.live_bytes[block.category] -= block.num_bytes
            self.live_bytes[category] += block.num_bytes
        block.category = category

    def _change(self, block: _Block, num_bytes: int) -> None:
        growth = num_bytes - block.num_bytes
        block.num_bytes = num_bytes
        if block.is_on_host:
            self.host_bytes += growth
            self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)
            return
        self.live_bytes[block.category] += growth
        self.total_bytes += growth
        if growth > 0:
            self._note_peak()

    def _note_peak(self) -> None:
        phase = "backward" if in_backward() else self.phase
        key = f"{phase}/{self.num_passes}/{self.place}"
        known = self._peaks.get(key)
        if known is None or self.total_bytes > known[0]:
            self._peaks[key] = (self.total_bytes, dict(self.live_bytes))
