from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.trials.tiny import WORKLOAD
from trials.datasets import (
    MAX_TEXT_BYTES,
    ImageBatches,
    Share,
    StepBatches,
    TokenBatches,
    VectorBatches,
    build_dataset,
    decode,
    load_text,
    make_up_images,
    open_images,
    open_token_file,
)
from trials.failure import DataError, InfeasibleSpec
from trials.spec import ImageFolderData, RandomData, ResNetModel, TextData, TokenFileData

IDS = (np.arange(5000) % 256).astype(np.uint8)
PICTURES = make_up_images(16, 10)[:40]
MAKERS: dict[str, Callable[[Share], StepBatches]] = {
    "tokens": lambda share: TokenBatches(IDS, share, seq_length=16, vocab_size=256),
    "images": lambda share: ImageBatches(PICTURES, share, image_size=16),
    "vectors": lambda share: VectorBatches(share, size=24),
}


def tokens(**share: Any) -> TokenBatches:
    return TokenBatches(IDS, Share(global_batch_size=12, **share), seq_length=16, vocab_size=256)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("full_batch", [False, True])
@pytest.mark.parametrize(("dp", "seed", "step"), [(1, 0, 0), (2, 5, 3), (3, 1, 7), (4, 2**31, 10_000), (12, 9, 2)])
def test_ranks_partition_the_global_batch(kind: str, full_batch: bool, dp: int, seed: int, step: int) -> None:
    make = MAKERS[kind]
    whole = make(Share(global_batch_size=12, seed=seed))[step]
    shares = [Share(global_batch_size=12, dp_rank=rank, dp=dp, seed=seed, full_batch=full_batch) for rank in range(dp)]
    for wanted, *parts in zip(whole, *(make(share)[step] for share in shares), strict=True):
        assert {len(part) for part in parts} == {12 // dp}
        assert torch.equal(torch.cat(parts), wanted)


@pytest.mark.parametrize("kind", MAKERS)
def test_steps_and_seeds_differ(kind: str) -> None:
    first, other = (MAKERS[kind](Share(global_batch_size=4, seed=seed)) for seed in (0, 1))
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], other[0][0])


@pytest.mark.parametrize(("full_batch", "num_decoded"), [(False, 3), (True, 12)])
def test_a_full_batch_reads_every_row(full_batch: bool, num_decoded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("trials.datasets.decode", lambda *args: calls.append(1) or decode(*args))
    share = Share(global_batch_size=12, dp_rank=1, dp=4, full_batch=full_batch)
    inputs, _ = ImageBatches(PICTURES, share, image_size=16)[0]
    assert len(calls) == num_decoded
    assert inputs.untyped_storage().nbytes() == 3 * 3 * 16 * 16 * 4  # the other rows are not dragged along


@given(st.integers(0, 2**31), st.integers(0, 10_000))
def test_rows_are_runs_of_the_tokens(seed: int, step: int) -> None:
    rows, following = tokens(seed=seed)[step]
    assert rows.shape == following.shape == (12, 16) and rows.dtype == torch.long
    assert bool(((rows[:, 1:] - rows[:, :-1]) % 256 == 1).all())
    assert torch.equal(rows[:, 1:], following[:, :-1])


def test_an_epoch_shows_each_image_once() -> None:
    batches = ImageBatches(PICTURES, Share(global_batch_size=8), image_size=16)
    assert batches.epoch_length == 5
    orders = []
    for epoch in range(2):
        shown = [image.sum().item() for step in range(5) for image in batches[epoch * 5 + step][0]]
        assert len(set(shown)) == 40
        orders.append(shown)
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


def test_a_batch_larger_than_the_data_starts_over() -> None:
    batches = ImageBatches(PICTURES[:3], Share(global_batch_size=8), image_size=16)
    assert batches.epoch_length == 1 and batches[4][0].shape == (8, 3, 16, 16)


def test_epochs_of_tokens_go_once_through_the_text() -> None:
    assert tokens().epoch_length == 5000 // (16 * 12)


def test_the_default_text_is_the_standard_library() -> None:
    ids = load_text(TextData())
    assert len(ids) == MAX_TEXT_BYTES
    assert np.array_equal(ids, load_text(TextData()))
    assert b"import" in ids[:100_000].tobytes()


def test_text_files_are_read_in_a_fixed_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, content in {"b/x.txt": "3", "a.txt": "1", "c.txt": "2", "c.md": "no"}.items():
        (tmp_path / name).write_text(content)
    assert load_text(TextData(path=str(tmp_path), pattern="*.txt")).tobytes() == b"123"
    assert load_text(TextData(path=str(tmp_path / "c.md"))).tobytes() == b"no"


def test_text_errors_are_clear(tmp_path: Path) -> None:
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
def test_token_files_of_every_type(dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes((np.arange(3000) % 200).astype(np.dtype(dtype).newbyteorder("<")).tobytes())
    ids = open_token_file(TokenFileData(path=str(path), dtype=dtype))  # type: ignore[arg-type]
    rows, following = TokenBatches(ids, Share(global_batch_size=4), seq_length=8, vocab_size=200)[0]
    assert rows.is_contiguous() and following.is_contiguous() and torch.equal(rows[:, 1:], following[:, :-1])
    assert rows.dtype == torch.long and bool(((rows[:, 1:] - rows[:, :-1]) % 200 == 1).all())


def test_token_file_errors_are_clear(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    with pytest.raises(DataError, match=r"cannot read token file .*tokens\.bin: No such file"):
        open_token_file(TokenFileData(path=str(path)))
    path.write_bytes(b"abc")
    with pytest.raises(DataError, match="3 bytes, which is no whole number of uint16 ids"):
        open_token_file(TokenFileData(path=str(path)))
    path.write_bytes(np.full(100, 70_000, dtype="<i4").tobytes())
    ids = open_token_file(TokenFileData(path=str(path), dtype="int32"))
    batches = TokenBatches(ids, Share(global_batch_size=1), seq_length=4, vocab_size=32_000, origin=str(path))
    with pytest.raises(DataError, match=r"tokens\.bin holds token id 70000, outside the model's 0\.\.31999"):
        batches[0]


def _save(path: Path, colour: str, size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


def test_an_image_folder(tmp_path: Path) -> None:
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


def test_image_errors_are_clear(tmp_path: Path) -> None:
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
    with pytest.raises(DataError, match="2 class folders, the model 1 classes"):
        open_images(ImageFolderData(path=str(tmp_path)), model)


def test_made_up_images_are_always_the_same_and_all_classes_occur() -> None:
    first, second = make_up_images(16, 10), make_up_images(16, 10)
    assert first == second and {picture.label for picture in first} == set(range(10))
    data_set = open_images(ImageFolderData(), ResNetModel(num_classes=10, image_size=16))
    assert ImageBatches(data_set, Share(global_batch_size=256), image_size=16).epoch_length > 1000


def test_data_that_does_not_go_with_the_model_is_refused() -> None:
    from dataclasses import replace

    with pytest.raises(InfeasibleSpec, match="a llama model cannot train on data of kind random"):
        build_dataset(replace(WORKLOAD, data=RandomData()), Share(global_batch_size=1))
