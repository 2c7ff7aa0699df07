"""Random numbers by place: each is a pure function of a key and of the element's index in the whole tensor.

Whoever holds a part of a tensor draws that part alone, on its own device, and finds what every other holder of the same
elements finds, bit for bit: the counter-based way of Salmon et al. (SC 2011). The generator is SplitMix64 (Steele, Lea
and Flood, OOPSLA 2014) entered at the place wanted, one word of 64 bits for two elements. All arithmetic is exact
(integers) or rounded as IEEE 754 says (single additions and multiplications of fp32), so that neither the shape at hand
nor vector units can change a bit; a vectorised ``log`` differs in the last elements of its loop.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

CPU_TILE_WORDS = 1 << 16
"""Words of 64 bits drawn at a time on a CPU: what its caches hold."""
DEVICE_TILE_WORDS = 1 << 20
"""The same on other devices: enough to keep one busy, with temporaries below 64 MiB."""

_INCREMENT = 0x9E3779B97F4A7C15
_MIXING = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""SplitMix64's steps: the bits that a word is shifted by, and what it is multiplied with then."""
_MANTISSA_BITS = 6
"""The normal quantile is a straight line over each 64th of every power of two; within 2e-5 of the true one."""
_NUM_LINES = 1 << (1 + 8 + _MANTISSA_BITS)
"""One line for every sign, exponent and leading part of the mantissa of an fp32 number."""


def key_of(*parts: object) -> int:
    """64 bits that stand for all of ``parts``: for instance a seed and a parameter's name."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A part of a tensor as rows ``[R, N]`` of elements with consecutive indices in the whole tensor."""

    rows: Tensor
    first: Tensor
    """Index of the first element of every row, ``[R]``."""
    parity: int | None
    """Whether these are all even (0), all odd (1) or mixed (None)."""


class Draws:
    """Draws on one device. Holds tables and one tile's counters, so make it where it is needed and let it go."""

    def __init__(self, device: torch.device, tile_words: int | None = None) -> None:
        """``tile_words``: words drawn at a time, if not those that suit the device; no number depends on it."""
        self.tile_words = tile_words or (CPU_TILE_WORDS if device.type == "cpu" else DEVICE_TILE_WORDS)
        self._counters = torch.arange(self.tile_words + 1, device=device) * _signed(_INCREMENT)
        self._intercepts, self._slopes = (torch.tensor(table, device=device) for table in _quantile_lines())

    def tiles(self, part: Tensor, size: Sequence[int], start: Sequence[int]) -> Iterator[Tile]:
        """Cut ``part``, which begins at ``start`` in a tensor of this ``size``, into tiles that are drawn at once."""
        return tiles(part, size, start, 2 * self.tile_words)

    def normal(self, key: int, tile: Tile) -> Tensor:
        """Standard normal values of a tile's elements in fp32, at most 6.4 from 0."""
        centred = self._integers(key, tile).float().add_(0.5)
        lines = (centred.view(torch.int32) >> (23 - _MANTISSA_BITS)).bitwise_and_(_NUM_LINES - 1).flatten()
        slopes, intercepts = (
            torch.index_select(table, 0, lines).view_as(centred) for table in (self._slopes, self._intercepts)
        )
        return slopes.mul_(centred).add_(intercepts)

    def uniform(self, key: int, tile: Tile) -> Tensor:
        """Values of a tile's elements in fp32, uniform within 1 of 0."""
        return self._integers(key, tile).float().add_(0.5).mul_(2.0**-31)

    def _integers(self, key: int, tile: Tile) -> Tensor:
        """Uniform 32-bit integers ``[R, N]``: the halves of words. A row of odd start leaves out the first half."""
        length = tile.rows.shape[1]
        before = 1 if tile.parity is None else tile.parity
        words = (tile.first >> 1).mul_(_signed(_INCREMENT)).add_(_signed(key + _INCREMENT)).unsqueeze(1)
        halves = _mixed(words + self._counters[: (before + length + 1) // 2]).view(torch.int32)
        if tile.parity is not None:
            return halves[:, before : before + length].contiguous()
        is_odd = (tile.first & 1).bool().unsqueeze(1)
        return torch.where(is_odd, halves[:, 1 : length + 1], halves[:, :length])


def tiles(part: Tensor, size: Sequence[int], start: Sequence[int], max_elements: int) -> Iterator[Tile]:
    """Cut a part of a tensor into tiles of at most ``max_elements``, an even number, with views of its memory."""
    if part.numel() == 0:
        return
    if not size:
        part, size, start = part.view(1), (1,), (0,)
    strides = [math.prod(size[dim + 1 :]) for dim in range(len(size))]
    # The last dimension of which the part lacks something: from there on its elements are consecutive in the whole.
    split = max((dim for dim, whole in enumerate(size) if part.shape[dim] < whole), default=0)
    origin = sum(begin * stride for begin, stride in zip(start, strides, strict=True))
    first = torch.full((1,), origin, device=part.device)
    for dim in range(split):
        first = (first.unsqueeze(1) + torch.arange(part.shape[dim], device=part.device) * strides[dim]).flatten()
    all_alike = all(strides[dim] % 2 == 0 or part.shape[dim] == 1 for dim in range(split))
    length = math.prod(part.shape[split:])
    rows = part.view(len(first), length)
    height = max(1, max_elements // (length + 2))
    for row in range(0, len(first), height):
        for column in range(0, length, max_elements):
            yield Tile(
                rows=rows[row : row + height, column : column + max_elements],
                first=first[row : row + height] + column,
                parity=origin % 2 if all_alike else None,
            )


def _mixed(words: Tensor) -> Tensor:
    """SplitMix64's output function, in place. Shifting right has to bring in zeros, unlike that of signed integers."""
    for shift, factor in _MIXING:
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            words.mul_(_signed(factor))
    return words


def _signed(word: int) -> int:
    """The int64 with the bits of the lowest 64 of ``word``."""
    word %= 1 << 64
    return word - (1 << 64) if word >= 1 << 63 else word


@functools.cache
def _quantile_lines() -> tuple[list[float], list[float]]:
    """Intercepts and slopes of the normal quantile of ``|x| / 2**32`` by the leading bits of ``x``, and odd in ``x``.

    ``|x|`` lies in [0.5, 2**31]: up to the median, where all is 0. Worked out in fp64; fp32 numbers made of these are
    rounded once.
    """
    intercepts, slopes = [0.0] * _NUM_LINES, [0.0] * _NUM_LINES
    quantile, num_pieces = NormalDist().inv_cdf, 1 << _MANTISSA_BITS
    for exponent in range(-1, 31):
        ends = [2.0**exponent * (1 + piece / num_pieces) for piece in range(num_pieces + 1)]
        heights = [quantile(end * 2.0**-32) for end in ends]
        for piece in range(num_pieces):
            slope = (heights[piece + 1] - heights[piece]) / (ends[piece + 1] - ends[piece])
            line = ((exponent + 127) << _MANTISSA_BITS) + piece
            negative = line + _NUM_LINES // 2
            slopes[line] = slopes[negative] = slope
            intercepts[line] = heights[piece] - slope * ends[piece]
            intercepts[negative] = -intercepts[line]
    return intercepts, slopes
