from __future__ import annotations

import datetime
import errno
import socket

import pytest
import torch
import torch.distributed as dist

from tests.trials.failure_texts import LAUNCHERS, LOGS, RAISED, UNLIKE, UNSOURCED
from trials.failure import (
    SIGNS,
    DataError,
    FailureSign,
    InfeasibleSpec,
    NonFiniteLoss,
    cause_in_log,
    classify,
    mentions_abort,
)


def raised(outer, inner, *, explicit):
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
def test_kind_by_type_or_message(error, kind):
    assert classify(error) == kind


@pytest.mark.parametrize("text", RAISED, ids=str)
def test_messages_of_libraries_are_classified(text):
    """Whichever error carries them; errors of cuBLAS and cuDNN mean memory only where none is left."""
    assert classify(text.raised(), text.device) == text.kind
    assert classify(text.raised(), text.device, is_memory_full=True) == text.kind_if_full


@pytest.mark.parametrize("text", UNLIKE, ids=str)
def test_similar_messages_are_not_classified(text):
    assert classify(text.raised(), text.device, is_memory_full=True) == "error"


def is_classified(part, kind, text):
    sign = FailureSign(kind=kind, parts=(part,))
    return kind in (text.kind, text.kind_if_full) and sign.part_in(text.words.lower()) is not None


def test_every_sign_matches_a_recorded_message():
    parts = [(part, sign.kind) for sign in SIGNS for part in sign.parts]
    assert [part for part, kind in parts if not any(is_classified(part, kind, text) for text in RAISED)] == []
    assert UNSOURCED == []


ABORT = """step 1 loss 9.8
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  {words}
Exception raised from ncclCommWatchdog at /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1418
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7fefa74cf897 in libc10.so)
step 2 loss 9.7 read error [3]: Broken pipe
"""


@pytest.mark.parametrize("text", RAISED, ids=str)
def test_messages_of_libraries_as_the_reason_of_an_abort(text):
    """Those that are peculiar enough; words that any program may use are no reason."""
    found = cause_in_log(ABORT.format(words=text.words.strip()))
    if not text.in_logs:
        assert found is None
        return
    assert found is not None
    assert found[0] == text.kind
    assert found[1].removeprefix("what():").strip() in text.words


@pytest.mark.parametrize("log", LOGS, ids=str)
def test_the_end_of_a_log_reveals_why_the_process_ended(log):
    found = cause_in_log(log.words)
    assert ("" if found is None else found[0]) == log.kind
    assert log.says in ("" if found is None else found[1])


def test_memory_counts_only_where_an_abort_gives_it_as_its_reason():
    memory = "CUDA out of memory. Tried to allocate 3.00 GiB."
    abort = "terminate called after throwing an instance of 'c10::Error'"
    assert cause_in_log(f"{abort}\n  what():  {memory}") == ("oom", f"what():  {memory}")
    assert cause_in_log(memory) is None
    assert cause_in_log(f"{memory}\n{abort}") is None
    assert cause_in_log(f"{abort}\nframe #0: x\n{memory}") is None


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=str)
def test_launchers_report_that_a_rank_aborted(launcher):
    assert mentions_abort(launcher.words) is launcher.aborted
    assert mentions_abort(f"step 1 loss 9.8\n{launcher.words}\nbye\n") is launcher.aborted


@pytest.mark.parametrize("explicit", [True, False])
def test_the_innermost_kind_wins(explicit):
    memory, peer, plain = MemoryError, ConnectionResetError, RuntimeError
    assert classify(raised(plain(), memory(), explicit=explicit)) == "oom"
    assert classify(raised(peer(), memory(), explicit=explicit)) == "oom"
    assert classify(raised(memory(), peer(), explicit=explicit)) == "oom"
    assert classify(raised(plain(), peer(), explicit=explicit)) == "connection"


def test_suppressed_context_does_not_count():
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise RuntimeError("unrelated") from None
    except RuntimeError as error:
        assert classify(error) == "error"


def test_gloo_reports_a_missing_peer_as_connection():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(dist.DistError) as caught:
            dist.TCPStore("127.0.0.1", port, 2, False, timeout=datetime.timedelta(seconds=0.5))
    assert classify(caught.value) == "connection"
