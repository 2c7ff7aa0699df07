"""Data sets, the loader and its tuning."""

from __future__ import annotations

import logging
import multiprocessing
import os
import re
import signal
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from benchmarks.runner.gang import gang, receive
from tests.trials.gang import run_gang
from tests.trials.tiny import WORKLOAD, tiny_spec
from trials.datasets import (
    MAX_SHARE,
    MAX_TEXT_BYTES,
    ImageBatches,
    Share,
    StepBatches,
    TokenBatches,
    VectorBatches,
    build_dataset,
    climb,
    decode,
    grid,
    load_text,
    make_up_images,
    neighbours,
    open_images,
    open_token_file,
    stream_batches,
    tune_loader,
    with_verdict,
)
from trials.failure import DataError, InfeasibleSpec
from trials.outcome import RankReport
from trials.reports import LoaderPoint, LoaderTuningReport
from trials.spec import ImageFolderData, Layout, Loader, LoaderTuning, RandomData, ResNetModel, TextData, TokenFileData

IDS = (np.arange(5000) % 256).astype(np.uint8)
PICTURES = make_up_images(16, 10)[:40]
MAKERS = {
    "tokens": lambda share: TokenBatches(IDS, share, seq_length=16, vocab_size=256),
    "images": lambda share: ImageBatches(PICTURES, share, image_size=16),
    "vectors": lambda share: VectorBatches(share, size=24),
}


def tokens(**share):
    return TokenBatches(IDS, Share(global_batch_size=12, **share), seq_length=16, vocab_size=256)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("full_batch", [False, True])
@pytest.mark.parametrize(("dp", "seed", "step"), [(1, 0, 0), (2, 5, 3), (3, 1, 7), (4, 2**31, 10_000), (12, 9, 2)])
def test_ranks_partition_the_global_batch(kind, full_batch, dp, seed, step):
    make = MAKERS[kind]
    whole = make(Share(global_batch_size=12, seed=seed))[step]
    shares = [Share(global_batch_size=12, dp_rank=rank, dp=dp, seed=seed, full_batch=full_batch) for rank in range(dp)]
    for wanted, *parts in zip(whole, *(make(share)[step] for share in shares), strict=True):
        assert {len(part) for part in parts} == {12 // dp}
        assert torch.equal(torch.cat(parts), wanted)


@pytest.mark.parametrize("kind", MAKERS)
def test_steps_and_seeds_differ(kind):
    first, other = (MAKERS[kind](Share(global_batch_size=4, seed=seed)) for seed in (0, 1))
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], other[0][0])


@pytest.mark.parametrize(("full_batch", "num_decoded"), [(False, 3), (True, 12)])
def test_a_full_batch_reads_every_row(full_batch, num_decoded, monkeypatch):
    calls = []
    monkeypatch.setattr("trials.datasets.decode", lambda *args: calls.append(1) or decode(*args))
    share = Share(global_batch_size=12, dp_rank=1, dp=4, full_batch=full_batch)
    inputs, _ = ImageBatches(PICTURES, share, image_size=16)[0]
    assert len(calls) == num_decoded
    assert inputs.untyped_storage().nbytes() == 3 * 3 * 16 * 16 * 4  # the other rows are not dragged along


@given(st.integers(0, 2**31), st.integers(0, 10_000))
def test_rows_are_runs_of_the_tokens(seed, step):
    rows, following = tokens(seed=seed)[step]
    assert rows.shape == following.shape == (12, 16) and rows.dtype == torch.long
    assert bool(((rows[:, 1:] - rows[:, :-1]) % 256 == 1).all())
    assert torch.equal(rows[:, 1:], following[:, :-1])


def test_an_epoch_shows_each_image_once():
    batches = ImageBatches(PICTURES, Share(global_batch_size=8), image_size=16)
    assert batches.epoch_length == 5
    orders = []
    for epoch in range(2):
        shown = [image.sum().item() for step in range(5) for image in batches[epoch * 5 + step][0]]
        assert len(set(shown)) == 40
        orders.append(shown)
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_a_batch_larger_than_the_data_starts_over():
    batches = ImageBatches(PICTURES[:3], Share(global_batch_size=8), image_size=16)
    assert batches.epoch_length == 1 and batches[4][0].shape == (8, 3, 16, 16)


def test_epochs_of_tokens_go_once_through_the_text():
    assert tokens().epoch_length == 5000 // (16 * 12)


def test_the_default_text_is_the_standard_library():
    ids = load_text(TextData())
    assert len(ids) == MAX_TEXT_BYTES
    assert np.array_equal(ids, load_text(TextData()))
    assert b"import" in ids[:100_000].tobytes()


def test_text_files_are_read_in_a_fixed_order(tmp_path):
    (tmp_path / "b").mkdir()
    for name, content in {"b/x.txt": "3", "a.txt": "1", "c.txt": "2", "c.md": "no"}.items():
        (tmp_path / name).write_text(content)
    assert load_text(TextData(path=str(tmp_path), pattern="*.txt")).tobytes() == b"123"
    assert load_text(TextData(path=str(tmp_path / "c.md"))).tobytes() == b"no"


def test_text_errors_are_clear(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_text(TextData(path=str(tmp_path / "missing")))
    with pytest.raises(DataError, match="no file matching"):
        load_text(TextData(path=str(tmp_path)))
    (tmp_path / "loop.py").symlink_to("loop.py")
    with pytest.raises(DataError, match=r"cannot read .*loop\.py"):
        load_text(TextData(path=str(tmp_path)))
    with pytest.raises(DataError, match=r"5 tokens, fewer than seq_length \+ 1 = 17"):
        TokenBatches(IDS[:5], Share(global_batch_size=1), seq_length=16, vocab_size=256)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "int64"])
def test_token_files_of_every_type(dtype, tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes((np.arange(3000) % 200).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    ids = open_token_file(TokenFileData(path=str(path), dtype=dtype))
    rows, following = TokenBatches(ids, Share(global_batch_size=4), seq_length=8, vocab_size=200)[0]
    assert rows.is_contiguous() and following.is_contiguous() and torch.equal(rows[:, 1:], following[:, :-1])
    assert rows.dtype == torch.long and bool(((rows[:, 1:] - rows[:, :-1]) % 200 == 1).all())


def test_token_file_errors_are_clear(tmp_path):
    path = tmp_path / "tokens.bin"
    with pytest.raises(DataError, match=r"cannot read token file .*tokens\.bin: No such file"):
        open_token_file(TokenFileData(path=str(path)))
    path.write_bytes(b"abc")
    with pytest.raises(DataError, match="3 bytes, not a whole number of uint16 ids"):
        open_token_file(TokenFileData(path=str(path)))
    path.write_bytes(np.full(100, 70_000, dtype="<i4").tobytes())
    ids = open_token_file(TokenFileData(path=str(path), dtype="int32"))
    batches = TokenBatches(ids, Share(global_batch_size=1), seq_length=4, vocab_size=32_000, origin=str(path))
    with pytest.raises(DataError, match=r"tokens\.bin contains token id 70000, outside the model's 0\.\.31999"):
        batches[0]


def _save(path, colour, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_an_image_folder(tmp_path):
    _save(tmp_path / "dogs" / "a.JPEG", "red")
    _save(tmp_path / "cats" / "b.jpg", "blue", (30, 50))
    (tmp_path / "cats" / "notes.txt").write_text("no image")
    pictures = open_images(ImageFolderData(path=str(tmp_path)), ResNetModel(num_classes=2, image_size=16))
    assert [(picture.source, picture.label) for picture in pictures] == [
        (tmp_path / "cats" / "b.jpg", 0),
        (tmp_path / "dogs" / "a.JPEG", 1),
    ]
    images, labels = ImageBatches(pictures, Share(global_batch_size=2), image_size=16)[0]
    assert images.shape == (2, 3, 16, 16)
    red = images[labels.tolist().index(1)]
    assert red[0].mean() > 2.0 and red[2].mean() < -1.5  # (1 - 0.485) / 0.229, (0 - 0.406) / 0.225


def test_image_errors_are_clear(tmp_path):
    model = ResNetModel(num_classes=1, image_size=16)
    with pytest.raises(DataError, match="does not exist"):
        open_images(ImageFolderData(path=str(tmp_path / "missing")), model)
    with pytest.raises(DataError, match="no JPEG file"):
        open_images(ImageFolderData(path=str(tmp_path)), model)
    _save(tmp_path / "a" / "1.jpg", "red")
    whole = (tmp_path / "a" / "1.jpg").read_bytes()
    (tmp_path / "a" / "1.jpg").write_bytes(whole[: len(whole) // 2])
    pictures = open_images(ImageFolderData(path=str(tmp_path)), model)
    with pytest.raises(DataError, match=r"cannot decode image .*a/1\.jpg"):
        ImageBatches(pictures, Share(global_batch_size=1), image_size=16)[0]
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match="2 class directories, but the model has 1 classes"):
        open_images(ImageFolderData(path=str(tmp_path)), model)


def test_synthetic_images_are_deterministic_and_cover_all_classes():
    first, second = make_up_images(16, 10), make_up_images(16, 10)
    assert first == second and {picture.label for picture in first} == set(range(10))
    data_set = open_images(ImageFolderData(), ResNetModel(num_classes=10, image_size=16))
    assert ImageBatches(data_set, Share(global_batch_size=256), image_size=16).epoch_length > 1000


def test_data_that_does_not_fit_the_model_is_refused():
    from dataclasses import replace

    with pytest.raises(InfeasibleSpec, match="a llama model cannot train on data of kind random"):
        build_dataset(replace(WORKLOAD, data=RandomData()), Share(global_batch_size=1))


TOKENS = TokenBatches(
    (np.arange(5000) % 256).astype(np.uint8), Share(global_batch_size=12), seq_length=16, vocab_size=256
)


class WorkerIds(StepBatches):
    """Three steps an epoch; an item holds its step and the process that read it."""

    def __init__(self):
        super().__init__(Share(global_batch_size=1), 3)

    def read(self, step, rows):
        return torch.tensor([step]), torch.tensor([os.getpid()])


@pytest.mark.parametrize("loader", [Loader(), Loader(num_workers=2, prefetch_factor=2)])
def test_batches_come_in_order(loader):
    batches = stream_batches(TOKENS, loader, pin_memory=False)
    for step, (inputs, targets) in enumerate(islice(batches, 6)):
        wanted = TOKENS[step]
        assert torch.equal(inputs, wanted[0]) and torch.equal(targets, wanted[1])
    batches.close()


@pytest.mark.parametrize(
    ("loader", "num_processes"),
    [
        (Loader(), 1),
        (Loader(num_workers=1, prefetch_factor=2), 3),
        (Loader(num_workers=1, prefetch_factor=2, persistent_workers=True), 1),
    ],
)
def test_steps_go_on_over_epochs_and_workers_stay_when_persistent(loader, num_processes):
    batches = stream_batches(WorkerIds(), loader, pin_memory=False)
    read = [(step.item(), pid.item()) for step, pid in islice(batches, 9)]
    batches.close()
    assert [step for step, _ in read] == list(range(9))
    assert len({pid for _, pid in read}) == num_processes


class Broken(WorkerIds):
    def read(self, step, rows):
        raise DataError("row 7 of x.bin is broken; fix it")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_error_from_a_worker_has_the_same_message(num_workers):
    loader = Loader(num_workers=num_workers, prefetch_factor=num_workers)
    with pytest.raises(DataError) as raised:
        next(stream_batches(Broken(), loader, pin_memory=False))
    assert str(raised.value) == "row 7 of x.bin is broken; fix it"


def _hold_a_loader(pipe):
    batches = stream_batches(TOKENS, Loader(num_workers=1, prefetch_factor=1), pin_memory=False)
    next(batches)
    pipe.send([os.getpid(), *(child.pid for child in multiprocessing.active_children())])
    time.sleep(60)


@pytest.mark.fault
def test_loader_workers_die_with_their_rank(tmp_path):
    with gang(_hold_a_loader, 1, tmp_path / "rendezvous") as (pipe,):
        rank_pid, worker_pid = receive(pipe, 60.0)
        os.kill(worker_pid, 0)
        os.kill(rank_pid, signal.SIGKILL)
    deadline = time.monotonic() + 4.0  # torch's own check for a lost parent takes 5 s
    while _is_running(worker_pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_running(worker_pid)


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


START = (2, 2)


def surface(point, *, work, cores, transfer, contention, burst, memory):
    """Seconds per batch of a loader whose workers share ``cores``; unimodal in workers and in prefetch."""
    workers, prefetch = point
    if workers == 0:
        return work
    reading = work / min(workers, cores) * (1.0 + contention * max(0.0, workers - cores))
    return max(reading, transfer) * (1.0 + burst / prefetch**2 + memory * prefetch) + transfer


SURFACES = {
    "work": st.floats(1e-4, 1.0),
    "cores": st.floats(1.0, 16.0),
    "contention": st.floats(0.0, 0.3),
    "burst": st.floats(0.0, 0.5),
    "memory": st.floats(0.0, 0.02),
}


@given(max_workers=st.integers(1, 20), transfer=st.floats(0.0, 1.0), **SURFACES)
def test_a_climb_is_cheap_and_never_worse_than_its_start(max_workers, transfer, **shape):
    def time_of(point):
        return surface(point, transfer=transfer, **shape)

    times = climb(time_of, max_workers)
    assert len(times) <= MAX_SHARE * len(grid(max_workers))
    assert set(times) <= set(grid(max_workers))
    best = min(times.values())
    assert best <= time_of((0, 0))
    if max_workers >= 2:
        assert best <= time_of(START)


@given(max_workers=st.integers(8, 20), share=st.floats(0.0, 0.02), **SURFACES)
@example(max_workers=16, share=0.0, work=1.0, cores=10.0, contention=1 / 64, burst=0.0, memory=0.0).via("slow rise")
@example(max_workers=9, share=0.0, work=0.8, cores=7.14, contention=0.3, burst=0.5, memory=0.0).via("few points")
@example(max_workers=18, share=0.0, work=1.0, cores=12.9, contention=0.025, burst=0.26, memory=0.0).via("both axes")
def test_a_climb_finds_the_best_within_five_per_cent(max_workers, share, **shape):
    def time_of(point):
        return surface(point, transfer=share * shape["work"], **shape)

    found = min(climb(time_of, max_workers).values())
    assert found <= 1.05 * min(map(time_of, grid(max_workers)))


def test_no_workers_are_found_when_reading_is_cheap():
    times = climb(lambda point: 1.0 if point[0] == 0 else 3.0 + 0.001 * point[0], max_workers=8)
    assert min(times, key=times.__getitem__) == (0, 0)


def test_noise_moves_nothing():
    times = climb(lambda point: 1.0 - 0.001 * point[0], max_workers=8)
    assert list(times) == [(0, 0), (2, 2), *neighbours((2, 2), 8)]


class Slow(StepBatches):
    """Waits, as reading from far away does: workers help whatever the number of cores."""

    def __init__(self, delay_s):
        super().__init__(Share(global_batch_size=1), 1000)
        self.delay_s = delay_s

    def read(self, step, rows):
        time.sleep(self.delay_s)
        return torch.tensor([step]), torch.tensor([step])


@pytest.mark.slow
def test_tuning_finds_workers_for_slow_reading(caplog):
    caplog.set_level(logging.INFO, "trials.datasets")
    wanted = Loader(persistent_workers=True, tuning=LoaderTuning(tuning_steps=24, max_workers=4))
    assert wanted.tuning is not None
    agreed = []
    loader, report = tune_loader(
        Slow(0.01), wanted, wanted.tuning, pin_memory=False, agree=lambda own_s: agreed.append(own_s) or own_s
    )
    assert loader.num_workers >= 3 and loader.prefetch_factor >= 1
    assert loader.tuning is None and loader.persistent_workers
    assert (report.chosen.num_workers, report.chosen.prefetch_factor) == (loader.num_workers, loader.prefetch_factor)
    assert agreed == [point.batch_time_s for point in report.points] and len(agreed) <= 6
    assert report.points[0].num_workers == 0 and report.chosen.batch_time_s < report.points[0].batch_time_s / 2
    assert len(caplog.records) == len(agreed)


@pytest.mark.slow
def test_a_gang_tunes_together_and_trains_the_same(tmp_path):
    tuning = LoaderTuning(tuning_steps=4, max_workers=2)
    layout = Layout(dp_replicate=2)
    plain, tuned = run_gang(
        [tiny_spec(layout), tiny_spec(layout, loader=Loader(persistent_workers=True, tuning=tuning))], tmp_path
    )
    assert isinstance(plain, RankReport) and isinstance(tuned, RankReport), (plain, tuned)
    assert tuned.losses == plain.losses and plain.findings.loader is None
    found = tuned.findings.loader
    assert found is not None and found.chosen in found.points
    assert found.points[0].num_workers == 0 and 2 <= len(found.points) <= 3
    assert found.tuning_time_s > sum(point.batch_time_s for point in found.points)
    assert "waiting for data takes" in found.verdict


def _reads_slowly():
    """Rank 1 waits for every batch."""
    from trials.datasets import TokenBatches

    read = TokenBatches.read

    def delayed(self, step, rows):
        time.sleep(0.1)
        return read(self, step, rows)

    if os.environ["RANK"] == "1":
        TokenBatches.read = delayed


@pytest.mark.slow
def test_the_slowest_rank_decides(tmp_path):
    """Rank 0, which reports, reads fast; all walk by the other one's times, and its share of the step is judged."""
    tuning = LoaderTuning(tuning_steps=2, max_workers=1)
    spec = tiny_spec(Layout(dp_replicate=2), loader=Loader(persistent_workers=True, tuning=tuning))
    (result,) = run_gang([spec], tmp_path, before=_reads_slowly)
    assert isinstance(result, RankReport), result
    found = result.findings.loader
    assert found is not None and found.points[0].batch_time_s >= 0.1
    judged_ms = re.search(r"\((\S+) of", found.verdict)
    assert found.verdict.startswith("Data loading limits") and judged_ms is not None
    assert float(judged_ms[1]) > 3 * result.breakdown.data_s * 1e3


@pytest.mark.parametrize(
    ("inline_s", "data_s", "sentence"),
    [
        (
            0.001,
            0.001,
            "Data loading does not limit the speed: waiting for data takes 1.0% of the step (1.00 of 100.00 ms).",
        ),
        (
            0.07,
            0.02,
            "Data loading limits the speed: with the best loader found, waiting for data takes 20.0% of the step",
        ),
        (
            0.07,
            0.0008,
            "Data loading would limit the speed, but tuning fixed it: waiting for data takes 0.8% of the step (0.80 of "
            "100.00 ms);"
            " without workers it would take 41% (70 ms per batch).",
        ),
    ],
)
def test_the_verdict_is_about_the_measured_share_and_that_before_tuning(inline_s, data_s, sentence):
    points = [LoaderPoint(num_workers=n, prefetch_factor=2, batch_time_s=s) for n, s in ((0, inline_s), (6, 0.0001))]
    report = LoaderTuningReport(points=tuple(points), chosen=points[1], tuning_time_s=1.0, verdict="")
    assert with_verdict(report, data_s=data_s, step_time_s=0.1).verdict.startswith(sentence)
    assert "solved" not in with_verdict(replace(report, chosen=points[0]), data_s=data_s, step_time_s=0.1).verdict
