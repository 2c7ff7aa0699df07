"""The process of a rank, from the fork to its exit: sets up its environment, calls the runner, reports."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cluster.gang.defaults import NUMA_VARIABLE
from cluster.gang.environment import rank_env, told_env
from cluster.gang.messages import (
    NodeLaunch,
    RankFailure,
    RankPlace,
    RankProgress,
    RankResult,
    RankSlot,
    RankSuccess,
    line,
)
from cluster.hardware.numa import cores_near
from cluster.node.device_memory import device_names, slot_handles
from cluster.node.hang.flight import answer_requests
from cluster.node.hang.recorder import RecordedRank, recorder_env
from cluster.processes import close_inherited, die_with_parent, make_preferred_oom_victim
from trials.accelerator.kinds import DeviceKind, family_of
from trials.codec import from_json, to_json
from trials.failure import classify
from trials.files import write_atomically
from trials.outcome import Phase, ProgressSink, RankReport
from trials.reports.profile import FOLDER as PROFILE
from trials.reports.profile import FOLDER_VARIABLE as PROFILE_VARIABLE
from trials.script.failures import is_of_program
from trials.secrets import redact

FULL_FRACTION = 0.02
"""A device with less of its memory left is full: handles and workspaces of cuBLAS and cuDNN take some hundred MiB."""

Runner = Callable[[Mapping[str, Any], ProgressSink], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPipes:
    """Descriptors of a rank's pipes from and to its warden."""

    told: int
    """Takes progress and the result."""
    asked: int
    """Gives a byte whenever the warden wants the Flight Recorder's record."""


def rank_main(launch: NodeLaunch, slot: RankSlot, pipes: RankPipes, warden_pid: int) -> NoReturn:
    """Run one rank in this freshly forked process; never returns, so that nothing of the parent runs again."""
    code = 1
    try:
        try:
            _set_up(launch, slot, pipes, warden_pid)
        except OSError as error:
            _write(pipes.told, line(_failure(error, launch, slot, "starting")))
            raise
        code = _run(launch, slot, pipes.told)
    except BaseException:  # nothing above could hear of it but the log
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _set_up(launch: NodeLaunch, slot: RankSlot, pipes: RankPipes, warden_pid: int) -> None:
    """Turn this copy of the warden into a process of its own: signals, descriptors, log, environment."""
    os.setpgid(0, 0)
    die_with_parent(warden_pid)
    signal.set_wakeup_fd(-1)  # the warden's
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    make_preferred_oom_victim()
    close_inherited(keep=(pipes.told, pipes.asked))
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    log = os.open(Path(launch.directory) / f"rank{slot.rank}.log", flags, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.update(
        {
            PROFILE_VARIABLE: str(Path(launch.directory) / PROFILE),
            **_visible_devices(launch),
            **rank_env(launch, slot),
        }
    )
    folder = Path(launch.directory)
    os.environ.update(recorder_env(folder, told_env(launch)))
    if not launch.is_script:
        recorded = RecordedRank(rank=slot.rank, folder=folder, asking=-1)
        answer_requests(pipes.asked, recorded.answer)
    _keep_near(launch, slot)
    threads = os.environ["OMP_NUM_THREADS"]
    if (torch := sys.modules.get("torch")) is not None and threads.isdigit():  # torch read it before the fork
        torch.set_num_threads(int(threads))


def _visible_devices(launch: NodeLaunch) -> dict[str, str]:
    """As with torchrun, each rank sees the gang's devices on its node, at index ``LOCAL_RANK`` its own."""
    family = family_of(launch.device_kind)
    if not family.visible_variable:
        return {}
    return {family.visible_variable: ",".join(device_names(launch)), **family.order_variables}


def _keep_near(launch: NodeLaunch, slot: RankSlot) -> None:
    """Stay on the cores near the slot's devices, before any thread of torch's starts; memory that a core touches first
    is its own socket's."""
    if os.environ.get(NUMA_VARIABLE, "off").lower() in ("off", "0", "false"):
        return
    if near := cores_near(handle.bus_id for handle in slot_handles(launch, slot)):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, near)


def _run(launch: NodeLaunch, slot: RankSlot, pipe: int) -> int:
    reached: Phase = "starting"

    def progress(phase: Phase, *, step: int = 0, step_time_s: float | None = None, is_compiling: bool = False) -> None:
        nonlocal reached
        reached = phase
        _write(pipe, line(RankProgress(phase=phase, step=step, step_time_s=step_time_s, is_compiling=is_compiling)))

    try:
        report = resolve(launch.runner)(launch.spec, progress)
        place = RankPlace(node=launch.node, host=socket.gethostname(), device=_device(slot))
        result: RankResult = RankSuccess(rank=slot.rank, report=from_json(RankReport, report), place=place)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the log is on a full disk
            if is_of_program(error):  # its own words stand above, and are what people look for
                sys.stderr.write(f"tune-cluster: {error}\n")
            else:
                traceback.print_exc()
        result = _failure(error, launch, slot, reached)
    with contextlib.suppress(OSError):  # what is told counts; it is kept for controllers that die before they hear it
        _store(launch, slot, result)
    _write(pipe, line(result))
    _leave(result)
    return 0 if isinstance(result, RankSuccess) else 1


def _leave(result: RankResult) -> None:
    """Leave the gang, now that the result is told; whatever happens here changes nothing about it."""
    mesh: Any = sys.modules.get("trials.parallel.mesh")
    if mesh is not None and isinstance(result, RankSuccess):
        with contextlib.suppress(Exception):
            mesh.leave_gang(ends_process=True)


def resolve(runner: str) -> Runner:
    """The function that ``module:function`` names. One of the user's may lie in the folder where the sweep was
    submitted, which only ranks look into, and after all other places."""
    module, _, function = runner.partition(":")
    if module.partition(".")[0] != "trials":
        sys.path.append(str(Path.cwd()))
    found: Runner = getattr(importlib.import_module(module), function)
    return found


def _device(slot: RankSlot) -> str:
    """The UUID of the device that the rank used; elsewhere the positions of its slot's devices."""
    positions = ",".join(map(str, slot.devices))
    if "torch" not in sys.modules:
        return positions
    from trials.accelerator.device import current_device, device_uuid  # imports torch

    device = current_device()
    return positions if device is None else device_uuid(device) or positions


def _failure(error: BaseException, launch: NodeLaunch, slot: RankSlot, phase: Phase) -> RankFailure:
    cls = type(error)
    return RankFailure(
        rank=slot.rank,
        node=launch.node,
        category=_category(error, launch.device_kind),
        message=redact(str(error)) or cls.__name__,
        at_s=time.time(),
        error_type=cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}",
        phase=phase,
    )


def _category(error: BaseException, device: DeviceKind) -> str:
    if not isinstance(error, Exception):
        return "exception"
    found = classify(error, device)
    if found in ("error", "connection", "device_suspect") and is_memory_full(
        device
    ):  # asked of the device only where it matters
        found = classify(error, device, is_memory_full=True)
    return str(found)


def is_memory_full(device: DeviceKind) -> bool:
    """Whether the rank's device has less than :data:`FULL_FRACTION` of its memory left; False where it cannot tell."""
    kind = family_of(device).torch_device
    interface: Any = getattr(sys.modules.get("torch"), kind, None)
    if kind == "cpu" or interface is None:
        return False
    try:
        free, total = interface.mem_get_info() if interface.is_initialized() else (1, 1)
    except Exception:  # a device that failed may answer nothing any more
        return False
    return bool(free < FULL_FRACTION * total)


def result_file(slot: RankSlot) -> str:
    """Name of the file in the attempt's folder that keeps the rank's result."""
    return f"rank{slot.rank}.json"


def _store(launch: NodeLaunch, slot: RankSlot, result: RankResult) -> None:
    """Keep the result on disk before telling, so that it outlives the controller."""
    path = Path(launch.directory) / result_file(slot)
    write_atomically(path, [line({"token": launch.token, "result": to_json(result)})])


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]
