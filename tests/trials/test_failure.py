from __future__ import annotations

import datetime
import errno
import socket

import pytest
import torch
import torch.distributed as dist

from tests.trials.failure_texts import RAISED
from trials.failure import DataError, InfeasibleSpec, NonFiniteLoss, cause_in_log, classify


def raised(outer: BaseException, inner: BaseException, *, explicit: bool) -> BaseException:
    """``outer`` as it looks when raised while handling ``inner``."""
    try:
        try:
            raise inner
        except BaseException as error:
            if explicit:
                raise outer from error
            raise outer  # noqa: B904
    except BaseException as error:
        return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you"), "oom"),
        (MemoryError(), "oom"),
        (RuntimeError("std::bad_alloc"), "oom"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom"),
        (dist.DistBackendError("NCCL error: Cuda failure 2 'out of memory'"), "oom"),
        (InfeasibleSpec("num_heads 6 is not divisible by tp 4"), "infeasible"),
        (NonFiniteLoss("step 3: loss is nan"), "diverged"),
        (DataError("no text"), "data"),
        (dist.DistNetworkError("The server socket has failed to listen: port: 29500, name: EADDRINUSE"), "port"),
        (OSError(errno.ENOSPC, "No space left on device"), "disk"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"), "connection"),
        (RuntimeError("[pair.cc:534] Read error [127.0.0.1]:4242: Connection reset by peer"), "connection"),
        (RuntimeError("[pair.cc] writev [127.0.0.1]:1: Broken pipe"), "connection"),
        (RuntimeError("[unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to complete"), "connection"),
        (dist.DistStoreError("wait timeout after 1000ms, keys: /default_pg/0"), "connection"),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), "connection"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "connection"),
        (ValueError("WORLD_SIZE is 1"), "error"),
        (OSError(errno.EACCES, "Permission denied"), "error"),
        (KeyboardInterrupt(), "error"),
    ],
)
def test_kind_by_type_or_message(error: BaseException, kind: str) -> None:
    assert classify(error) == kind


@pytest.mark.parametrize("text", RAISED, ids=lambda text: text.words[:40])
def test_the_words_of_libraries_on_devices(text) -> None:
    """Whichever exception carries them; what cuBLAS and cuDNN say is about memory only where there is none left."""
    assert classify(RuntimeError(text.words), text.device) == text.kind
    assert classify(RuntimeError(text.words), text.device, is_memory_full=True) == text.kind_if_full


@pytest.mark.parametrize("explicit", [True, False])
def test_the_innermost_kind_wins(explicit: bool) -> None:
    memory, peer, plain = MemoryError, ConnectionResetError, RuntimeError
    assert classify(raised(plain(), memory(), explicit=explicit)) == "oom"
    assert classify(raised(peer(), memory(), explicit=explicit)) == "oom"
    assert classify(raised(memory(), peer(), explicit=explicit)) == "oom"
    assert classify(raised(plain(), peer(), explicit=explicit)) == "connection"


def test_suppressed_context_does_not_count() -> None:
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise RuntimeError("unrelated") from None
    except RuntimeError as error:
        assert classify(error) == "error"


def test_a_log_tells_the_device_that_broke_before_the_watchdog_that_saw_it() -> None:
    watchdog = "[rank1]:[E] [PG ID 0 Rank 1] Process group watchdog thread terminated with exception: CUDA error:"
    found = cause_in_log(f"step 3\n{watchdog} uncorrectable ECC error encountered\nframe #0: c10::Error::Error\n")
    assert found == ("device_lost", f"{watchdog} uncorrectable ECC error encountered")
    late = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=880) ran for 600 ms"
    assert cause_in_log(f"read error of a file, tried again\n{late}\n") == ("connection", late)
    assert cause_in_log("read error of a file, tried again\nconnection reset, tried again\n") is None


def test_gloo_reports_a_peer_that_never_comes_as_connection() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(dist.DistError) as caught:
            dist.TCPStore("127.0.0.1", port, 2, False, timeout=datetime.timedelta(seconds=0.5))
    assert classify(caught.value) == "connection"
