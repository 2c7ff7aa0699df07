from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trials.gang import START
from trials import data
from trials.data import StepBatches, build_loader, load_tokens
from trials.failure import DataError
from trials.spec import Loader, TextData

TOKENS = torch.arange(5000).remainder(256).to(torch.uint8)


def batches(*, dp_rank: int = 0, dp: int = 1, seed: int = 0, num_steps: int = 4) -> StepBatches:
    return StepBatches(
        TOKENS, seq_length=16, global_batch_size=12, dp_rank=dp_rank, dp=dp, seed=seed, num_steps=num_steps
    )


@given(dp=st.sampled_from([1, 2, 3, 4, 6, 12]), seed=st.integers(0, 2**31), step=st.integers(0, 10_000))
def test_ranks_partition_the_global_batch(dp: int, seed: int, step: int) -> None:
    whole = batches(seed=seed)[step]
    parts = [batches(dp_rank=rank, dp=dp, seed=seed)[step] for rank in range(dp)]
    assert {len(part) for part in parts} == {12 // dp}
    assert torch.equal(torch.cat(parts), whole)


@given(st.integers(0, 2**31), st.integers(0, 10_000))
def test_rows_are_runs_of_the_text(seed: int, step: int) -> None:
    rows = batches(seed=seed)[step]
    assert rows.shape == (12, 17) and rows.dtype == torch.long
    assert bool(((rows[:, 1:] - rows[:, :-1]) % 256 == 1).all())


def test_steps_and_seeds_differ() -> None:
    assert not torch.equal(batches()[0], batches()[1])
    assert not torch.equal(batches()[0], batches(seed=1)[0])


def test_workers_deliver_the_same_batches_in_order() -> None:
    dataset = batches(num_steps=6)
    loader = build_loader(dataset, Loader(num_workers=2, prefetch_factor=2), pin_memory=False)
    delivered = list(loader)
    assert len(delivered) == 6
    assert all(torch.equal(got, dataset[step]) for step, got in enumerate(delivered))


def test_the_default_text_is_the_standard_library() -> None:
    tokens = load_tokens(TextData())
    assert len(tokens) == data.MAX_TEXT_BYTES
    assert torch.equal(tokens, load_tokens(TextData()))
    assert b"import" in bytes(tokens[:100_000].tolist())


def test_files_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, text in {"b/x.txt": "3", "a.txt": "1", "c.txt": "2", "c.md": "no"}.items():
        (tmp_path / name).write_text(text)
    assert bytes(load_tokens(TextData(path=str(tmp_path), pattern="*.txt")).tolist()) == b"123"
    assert bytes(load_tokens(TextData(path=str(tmp_path / "c.md"))).tolist()) == b"no"


def test_user_errors_are_clear(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load_tokens(TextData(path=str(tmp_path / "missing")))
    with pytest.raises(DataError, match="no file matching"):
        load_tokens(TextData(path=str(tmp_path)))
    (tmp_path / "short.py").write_text("short")
    tokens = load_tokens(TextData(path=str(tmp_path)))
    with pytest.raises(DataError, match=r"5 bytes, fewer than seq_length \+ 1 = 17"):
        StepBatches(tokens, seq_length=16, global_batch_size=1, dp_rank=0, dp=1, seed=0, num_steps=1)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "loop.py").symlink_to("loop.py")
    with pytest.raises(DataError, match=r"cannot read .*loop\.py"):
        load_tokens(TextData(path=str(tmp_path)))


def _hold_a_loader(pipe: Connection) -> None:
    iterator = iter(build_loader(batches(), Loader(num_workers=1, prefetch_factor=1), pin_memory=False))
    next(iterator)
    pipe.send([worker.pid for worker in iterator._workers])  # type: ignore[attr-defined]
    time.sleep(60)


@pytest.mark.fault
def test_loader_workers_die_with_their_rank() -> None:
    ours, theirs = START.Pipe(duplex=False)
    rank = START.Process(target=_hold_a_loader, args=(theirs,))
    rank.start()
    assert ours.poll(60)
    (worker_pid,) = ours.recv()
    assert rank.pid is not None
    os.kill(worker_pid, 0)
    os.kill(rank.pid, signal.SIGKILL)
    rank.join()
    deadline = time.monotonic() + 4.0  # torch's own check for a lost parent takes 5 s
    while _is_running(worker_pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_running(worker_pid)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
