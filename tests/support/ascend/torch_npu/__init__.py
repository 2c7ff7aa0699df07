"""A stand-in for Huawei's torch_npu: torch's device ``npu`` whose memory is the host's and whose work the CPU does.

It provides what the package provides, and no more of it than trials use: the device, the module ``torch.npu`` with its
memory, streams and events, and the backend ``hccl`` of process groups. It has no 64-bit floats, which HCCL does not
send. Every call of the module is kept in ``CALLS``.
"""

import contextlib
import ctypes
import functools
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

CALLS = []
TOTAL_BYTES = 64 << 30
NUM_DEVICES = 2
HOST, EXTENSION = 1, 12
"""Types of device in DLPack, by which tensors of two devices share memory."""


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_FREE = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _FREE))
_CODES = {
    torch.float32: (2, 32),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.int64: (0, 64),
    torch.int32: (0, 32),
    torch.int8: (0, 8),
    torch.uint8: (1, 8),
    torch.bool: (6, 8),
}
_alive = {}
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@_FREE
def _release(managed):
    _alive.pop(ctypes.addressof(managed.contents), None)


def _alias(tensor, kind):
    """A tensor of the other device over the same memory, which it keeps alive."""
    shape = (ctypes.c_int64 * max(1, tensor.dim()))(*tensor.shape)
    strides = (ctypes.c_int64 * max(1, tensor.dim()))(*tensor.stride())
    managed = _Managed()
    dtype = _Type(*_CODES[tensor.dtype], 1)
    managed.tensor = _Tensor(tensor.data_ptr() or None, _Device(kind, 0), tensor.dim(), dtype, shape, strides, 0)
    managed.deleter = _release
    address = ctypes.addressof(managed)
    _alive[address] = (managed, shape, strides, tensor)
    return torch._C._from_dlpack(_capsule(address, b"dltensor", None))


def _here(value):
    if isinstance(value, torch.Tensor) and value.device.type == "npu":
        return _alias(value.detach(), HOST)
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "npu" else value


def _compute(operator, *args, **kwargs):
    """Any operator on tensors of the device: computed by the CPU on the same memory."""
    with torch.no_grad():
        if operator is torch.ops.aten._copy_from.default:
            _here(args[1]).copy_(_here(args[0]))
            return args[1]
        if operator is torch.ops.aten.record_stream.default:
            return CALLS.append(("record_stream",))
        given = {}

        def down(value):
            found = _here(value)
            if found is not value and isinstance(value, torch.Tensor):
                given[id(found)] = value
            return found

        args = _with_tensors(operator, args)
        leaves = kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "npu"
        found = operator(*tree_map(down, args), **tree_map(down, kwargs))

    def up(value):
        if not isinstance(value, torch.Tensor) or (leaves and id(value) not in given):
            return value
        return given[id(value)] if id(value) in given else _alias(value, EXTENSION)

    return tree_map(up, found)


def _with_tensors(operator, args):
    """Numbers that stand where the operator takes a tensor come here as they are."""
    wanted = operator._schema.arguments
    return tuple(
        torch.tensor(value) if isinstance(value, bool | int | float) and str(one.type) == "Tensor" else value
        for value, one in zip(args, wanted, strict=False)
    )


class Event:
    def __init__(self, enable_timing=False):
        CALLS.append(("Event", enable_timing))

    def record(self, stream=None):
        self.stream, self.at_s = stream, time.perf_counter()

    def elapsed_time(self, end):
        return (end.at_s - self.at_s) * 1e3

    def synchronize(self):
        CALLS.append(("Event.synchronize",))

    def query(self):
        return True


class Stream(torch.Stream):
    def __new__(cls, device=None):
        return super().__new__(cls, device="npu:0" if device is None else str(device))

    def wait_stream(self, other):
        CALLS.append(("wait_stream", other is not self))


class _Module:
    """``torch.npu``; what is not named here is not there."""

    Event, Stream = Event, Stream
    _default = None
    _current = 0

    def is_available(self):
        return True

    def is_initialized(self):
        return any(name == "set_device" for name, *_ in CALLS)

    def device_count(self):
        return NUM_DEVICES

    def current_device(self):
        return self._current

    def set_device(self, device):
        CALLS.append(("set_device", str(device)))
        self._current = torch.device(device).index

    def synchronize(self, device=None):
        CALLS.append(("synchronize", str(device)))

    def current_stream(self, device=None):
        self._default = self._default or Stream()
        return self._default

    def stream(self, stream):
        CALLS.append(("stream",))
        return contextlib.nullcontext()

    def get_device_name(self, device=None):
        return "Ascend910B2"

    def get_device_properties(self, device=None):
        return SimpleNamespace(name="Ascend910B2", total_memory=TOTAL_BYTES)

    def set_per_process_memory_fraction(self, fraction, device=None):
        CALLS.append(("set_per_process_memory_fraction", fraction, str(device)))

    def mem_get_info(self, device=None):
        return TOTAL_BYTES - (4 << 30), TOTAL_BYTES

    def _held(self):
        """Bytes of all tensors that share memory with the device's now."""
        owners = {
            entry[3].untyped_storage().data_ptr(): entry[3].untyped_storage().nbytes() for entry in _alive.values()
        }
        return sum(owners.values())

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = lambda self, _=None: self._held()

    def memory_stats(self, device=None):
        return {"num_alloc_retries": 0, "num_ooms": 0}

    def reset_peak_memory_stats(self, device=None):
        CALLS.append(("reset_peak_memory_stats", str(device)))

    def empty_cache(self):
        CALLS.append(("empty_cache",))

    def manual_seed_all(self, seed):
        pass

    def _is_in_bad_fork(self):
        return False

    def get_amp_supported_dtype(self):
        return [torch.float16, torch.bfloat16]


class _Hccl(dist.ProcessGroup):
    """The collectives that trials of data parallelism use, done by gloo on the same memory."""

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    pg_name = group_name

    def getBackendName(self):  # noqa: N802 - as torch calls it
        return "hccl"

    def _do(self, name, *args):
        CALLS.append((name,))
        return getattr(self._gloo, name)(*tree_map(_here, args))


for _name in ("allreduce", "broadcast", "allgather", "barrier", "_allgather_base", "_reduce_scatter_base"):
    setattr(_Hccl, _name, functools.partialmethod(_Hccl._do, _name))


_setup_privateuseone_for_python_backend("npu", _Module())
_library = torch.library.Library("_", "IMPL")
_library.fallback(_compute, "PrivateUse1")
_factories = torch.library.Library("aten", "IMPL")
for _overload in (
    *(getattr(torch.ops.aten.arange, name) for name in ("default", "start", "start_step")),  # would resize it
    torch.ops.aten._to_copy.default,  # would request pinned memory
):
    _factories.impl(_overload.name().removeprefix("aten::"), functools.partial(_compute, _overload), "PrivateUse1")
dist.Backend.register_backend("hccl", _Hccl, devices=["npu"])
