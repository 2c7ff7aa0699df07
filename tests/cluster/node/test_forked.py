"""What a warden makes of how a rank ended: its log, its devices, the memory that it shares."""

import signal
import time
from dataclasses import replace

import pytest

from cluster.gang.messages import RankFailure
from cluster.node import load_watch, ranks
from cluster.node.load_watch import OomKills
from cluster.node.ranks import ABORT_TAIL_BYTES, how_it_ended, with_devices, with_host_cause, with_logged_cause
from trials.script import judge

WATCHDOG = (
    "[rank1]:[E1103 ProcessGroupNCCL.cpp:2068] [PG 0 Rank 1] Process group watchdog thread terminated with exception"
)
ECC = f"{WATCHDOG}: CUDA error: uncorrectable ECC error encountered"
SUSPECT = f"{WATCHDOG}: CUDA error: unspecified launch failure"
ASSERT = f"{WATCHDOG}: CUDA error: device-side assert triggered"
LATE = (
    "[rank0]:[E1103 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"
)
NO_MEMORY = "terminate called after throwing an instance of 'c10::OutOfMemoryError'\n  what():  CUDA out of memory."
TORCHRUN = "  traceback : Signal 6 (SIGABRT) received by PID 214033"
SHARED = "Last error:\nError while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216)"
KILLED = "rank 1 was killed by signal 6 (SIGABRT)"
ENDED = "the command exited with code 1 after 3 of 10 steps"
NCCL = "NCCL error in: NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details)"


def failure(category, message, **changes):
    return RankFailure(rank=1, node="n", category=category, message=message, at_s=0.0, **changes)


@pytest.mark.parametrize(
    ("category", "message", "log", "found"),
    [
        ("exit", KILLED, ECC, "device_lost"),
        ("exit", KILLED, f"{LATE}\n{ECC}", "device_lost"),
        ("exit", KILLED, LATE, "connection"),
        ("exit", KILLED, ASSERT, "error"),
        ("exit", KILLED, "free(): invalid pointer", "exit"),
        ("exit", "rank 1 was killed by signal 11 (SIGSEGV)", ECC, "exit"),
        ("exit", "exited with code 1 without a report", f"{ECC}\n{TORCHRUN}", "exit"),
        ("error", ENDED.replace("exited with code 1", "was killed by signal 6"), ECC, "device_lost"),
        ("error", ENDED.replace("code 1", "code 134"), ECC, "device_lost"),
        ("error", ENDED.replace("code 1", "code 250"), LATE, "connection"),
        ("error", ENDED, f"{ECC}\n{TORCHRUN}", "device_lost"),
        ("error", ENDED, f"{SUSPECT}\n{TORCHRUN}", "device_suspect"),
        ("error", ENDED, f"{NO_MEMORY}\n{TORCHRUN}", "oom"),
        ("error", ENDED, f"{LATE}\n{TORCHRUN}", "connection"),
        ("error", ENDED, f"{ASSERT}\n{LATE}\n{TORCHRUN}", "error"),
        ("error", ENDED, ECC, "error"),
        ("error", f"a bad batch ({ENDED})", f"{LATE}\n{TORCHRUN}", "error"),
        ("error", f"a bad batch ({ENDED})", f"{SUSPECT}\n{TORCHRUN}", "error"),
        ("error", f"a bad batch ({ENDED})", f"{ECC}\n{TORCHRUN}", "device_lost"),
        ("oom", f"CUDA out of memory. ({ENDED})", f"{ECC}\n{TORCHRUN}", "device_lost"),
        ("oom", f"CUDA out of memory. ({ENDED})", f"{ASSERT}\n{TORCHRUN}", "error"),
        ("oom", f"CUDA out of memory. ({ENDED})", f"{LATE}\n{TORCHRUN}", "oom"),
        ("connection", f"Connection closed by peer ({ENDED})", f"{ECC}\n{TORCHRUN}", "device_lost"),
        ("connection", f"Connection closed by peer ({ENDED})", f"{LATE}\n{TORCHRUN}", "connection"),
        ("device_lost", f"CUDA error: uncorrectable ECC error ({ENDED})", f"{SUSPECT}\n{TORCHRUN}", "device_lost"),
        ("connection", f"{NCCL} ({ENDED})", f"DistBackendError: {NCCL}\n{SHARED}\nframe #0: x", "node_setup"),
        ("error", "a bad batch", f"DistBackendError: {NCCL}\n{SHARED}", "error"),
        ("deadline", "no progress for 120 s", f"{ECC}\n{TORCHRUN}", "deadline"),
    ],
)
def test_an_abort_is_classified_by_its_log(tmp_path, category, message, log, found):
    path = tmp_path / "rank1.log"
    path.write_text(f"step 1 loss 9.8\n{log}\n")
    before = failure(category, message)
    after = with_logged_cause(before, path, "cuda")
    assert after.category == found
    assert after.message.startswith(message)
    if found in (category, "error"):
        assert after.message.splitlines()[0] == message


def test_what_ranks_wrote_after_the_first_abort_does_not_hide_it(tmp_path):
    """Eight ranks with a stack of C++ and one of Python's threads each are some hundred kilobytes."""
    stack = "".join(
        f"frame #{number}: <unknown function> + 0xdc253 (0x7fe76a6b0253 in lib.so)\n" for number in range(60)
    )
    path = tmp_path / "rank0.log"
    path.write_text(f"{ECC}\n{stack}" + f"{LATE}\n{stack * 10}" * 15)
    assert 1 << 19 < path.stat().st_size < ABORT_TAIL_BYTES
    assert with_logged_cause(failure("exit", KILLED), path, "cuda").category == "device_lost"
    assert with_logged_cause(failure("exit", KILLED), tmp_path / "none", "cuda").category == "exit"


def test_a_log_without_lines_is_searched_in_no_time(tmp_path):
    """Progress bars end none; each of these words could begin a sentence of a launcher's."""
    path = tmp_path / "rank0.log"
    words = "srun: error: Aborted exited on code -6 killed by Signal 6 exits with return code "
    path.write_text(words * (ABORT_TAIL_BYTES // len(words)))
    began_s = time.process_time()
    assert with_logged_cause(failure("error", ENDED), path, "cuda").category == "error"
    assert time.process_time() - began_s < 10


def test_ambiguous_errors_mean_out_of_memory_only_if_the_device_is_full(monkeypatch):
    """The device is checked where an error has no better reason; a device that SYCL calls lost may be a full one."""
    monkeypatch.setattr(ranks, "is_memory_full", lambda device: device == "xpu")
    lost = RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)")
    handle = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    assert [ranks._category(error, "xpu") for error in (lost, handle)] == ["oom", "oom"]
    assert [ranks._category(error, "cuda") for error in (lost, handle)] == ["device_suspect", "error"]


def test_host_memory_is_device_memory_on_a_cpu(tmp_path):
    path = tmp_path / "rank1.log"
    path.write_text("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n")
    assert with_logged_cause(failure("exit", KILLED), path, "cuda").category == "host_oom"
    assert with_logged_cause(failure("exit", KILLED), path, "cpu").category == "oom"


def test_the_failure_line_names_devices():
    lost = failure("device_lost", "CUDA error: uncorrectable ECC error\nCUDA kernel errors might be")
    one, two = with_devices(lost, ("GPU-1",)), with_devices(lost, ("GPU-1", "GPU-2"))
    assert one.message == "CUDA error: uncorrectable ECC error (device GPU-1)\nCUDA kernel errors might be"
    assert two.message.splitlines()[0] == "CUDA error: uncorrectable ECC error (devices GPU-1, GPU-2)"
    assert with_devices(lost, ()) is lost
    other = replace(lost, category="error")
    assert with_devices(other, ("GPU-1",)) is other


@pytest.mark.parametrize(
    ("category", "message"),
    [how_it_ended(-signal.SIGBUS, OomKills()), ("error", "the command was killed by signal 7 after 3 of 10 steps")],
)
def test_a_bus_error_means_too_little_shared_memory_where_it_is_small(tmp_path, monkeypatch, category, message):
    monkeypatch.setattr(load_watch, "SHARED_MEMORY", tmp_path / "none")
    found = with_host_cause(failure(category, message), OomKills(), tmp_path)
    assert found.category == "host_oom"
    assert message in found.message and "--shm-size=8g" in found.message
    monkeypatch.setattr("cluster.node.ranks.MIN_SHARED_BYTES", 0)
    monkeypatch.setattr(load_watch, "SHARED_MEMORY", tmp_path)
    assert with_host_cause(failure(category, message), OomKills(), tmp_path).category == category


@pytest.mark.parametrize(
    ("exit_code", "category"),
    [
        (-signal.SIGKILL, "killed"),
        (-signal.SIGTERM, "killed"),
        (-signal.SIGSEGV, "exit"),
        (-signal.SIGABRT, "exit"),
        (137, "exit"),
    ],
)
def test_only_signals_not_caused_by_program_errors_come_from_outside(tmp_path, exit_code, category):
    assert how_it_ended(exit_code, OomKills())[0] == category
    program = failure("error", f"the command {judge.how_it_ended(exit_code)} after 3 of 10 steps")
    assert with_host_cause(program, OomKills(), tmp_path).category == ("killed" if category == "killed" else "error")


def test_failures_on_a_full_disk_are_the_fault_of_the_host(tmp_path, monkeypatch):
    broken = failure("error", "the command exited with code 0 but reported no step")
    assert with_host_cause(broken, OomKills(), tmp_path) is broken
    monkeypatch.setattr("trials.files.FULL_BYTES", 1 << 80)
    found = with_host_cause(broken, OomKills(), tmp_path)
    assert found.category == "disk" and str(tmp_path) in found.message
    assert with_host_cause(failure("oom", "CUDA out of memory"), OomKills(), tmp_path).category == "oom"
