"""A number depends on its place alone: parts drawn in any way put together are the whole, and the whole is normal."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trials.models import model
from trials.models.model import Draws, Initial, key_of, tiles
from trials.parallel.mesh import Piece, fill

CPU = torch.device("cpu")
MASK = (1 << 64) - 1


def splitmix64(state: int) -> int:
    """The published algorithm, word by word."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def integers(key: int, size: tuple[int, ...], start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """Those behind the values of a part."""
    drawn = Draws(CPU)
    out = torch.empty(shape, dtype=torch.int32)
    for tile in drawn.tiles(out, size, start):
        tile.rows.copy_(drawn._integers(key, tile))
    return out


def normal(name: str, size: tuple[int, ...], start: tuple[int, ...], shape: tuple[int, ...], **options) -> torch.Tensor:
    part = torch.empty(shape, dtype=options.pop("dtype", torch.float32))
    piece = Piece(name=name, size=torch.Size(size), start=start, part=part)
    fill(piece, Draws(CPU), Initial(std=1.0), 3, **options)
    return part


def whole(name: str, size: tuple[int, ...], **options) -> torch.Tensor:
    return normal(name, size, (0,) * len(size), size, **options)


def test_words_are_those_of_the_published_generator() -> None:
    first_five = [splitmix64((1234567 + n * 0x9E3779B97F4A7C15) & MASK) for n in range(5)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert first_five == [*published, 16408922859458223821]
    for key in (1234567, key_of("a", 1), MASK):
        drawn = integers(key, (3, 5), (0, 0), (3, 5)).flatten().tolist()
        words = [splitmix64((key + n * 0x9E3779B97F4A7C15) & MASK) for n in range(8)]
        halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
        assert [n % 2**32 for n in drawn] == halves[:15]


@given(
    size=st.lists(st.integers(1, 9), max_size=4), seed=st.integers(0, 2**63), words=st.integers(1, 40), data=st.data()
)
def test_a_part_is_that_part_of_the_whole(size: list[int], seed: int, words: int, data: st.DataObject) -> None:
    ends = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in size]
    start, shape = tuple(low for low, _ in ends), tuple(high - low for low, high in ends)
    name = f"{seed}"
    together = whole(name, tuple(size), perturbation=1e-3)
    cut = tuple(slice(low, high) for low, high in ends)
    before = model.CPU_TILE_WORDS
    try:
        model.CPU_TILE_WORDS = words  # tiles that cut rows, and tiles of several rows
        assert torch.equal(normal(name, tuple(size), start, shape, perturbation=1e-3), together[cut])
    finally:
        model.CPU_TILE_WORDS = before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_values_are_those_of_fp32_rounded(dtype: torch.dtype) -> None:
    assert torch.equal(whole("a", (37, 53), dtype=dtype), whole("a", (37, 53)).to(dtype))


def test_values_are_standard_normal_far_into_the_tails() -> None:
    values = whole("weight", (1 << 11, 1 << 11)).double()
    number = values.numel()
    assert abs(values.mean()) < 4 / math.sqrt(number)
    assert abs(values.var() - 1) < 4 * math.sqrt(2 / number)
    assert abs((values**3).mean()) < 4 * math.sqrt(15 / number)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / number)
    for bound in (0.01, 0.5, 1.0, 2.0, 3.0, 4.0, 4.5):
        expected = number * math.erfc(bound / math.sqrt(2))
        assert abs((values.abs() > bound).sum() - expected) < 4 * math.sqrt(expected), bound
    assert 4.8 < values.abs().max() < 6.4


def test_quantiles_are_within_a_fifty_thousandth() -> None:
    drawn = Draws(CPU)
    numbers = torch.linspace(-(2**31) + 1, 2**31 - 129, 100_001, dtype=torch.float64).to(torch.int32)
    drawn._integers = lambda *_: numbers  # type: ignore[method-assign]
    wanted = torch.special.ndtri((numbers.double() + 0.5) / -(2.0**32) % 1.0)
    found = drawn.normal(0, next(tiles(torch.empty(1), (1,), (0,), 2)))
    assert (found.double().abs() - wanted.abs()).abs().max() < 2e-5


def test_tensors_rows_and_neighbours_are_independent() -> None:
    size = (512, 1024)
    one, other, reseeded = whole("layers.0.wq", size), whole("layers.1.wq", size), whole("layers.0.wq perturbed", size)
    bound = 4.5 / math.sqrt(one.numel())
    pairs = [(one, other), (one, reseeded), (one[:-1], one[1:]), (one[:, :-1], one[:, 1:]), (one[:, :-2], one[:, 2:])]
    pairs += [(a.abs() - a.abs().mean(), b.abs() - b.abs().mean()) for a, b in pairs]
    correlations = [float((a * b).mean() / (a.std() * b.std())) for a, b in pairs]
    assert max(map(abs, correlations)) < bound * 1.1, correlations


def test_indices_are_no_32_bit_numbers() -> None:
    size = (1 << 20, 1 << 13)
    part, other = (normal("huge", size, (row, 0), (2, 1 << 13)) for row in ((1 << 20) - 2, (1 << 19) - 2))
    assert part.std() > 0.9 and not torch.equal(part, other)
