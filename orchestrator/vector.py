"""Immutable sequences for states that are folded from long ledgers: they share what they have in common, and parts of
them may be read only when somebody asks for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")

BLOCK_SIZE = 128


class LazyBlock(Sequence[T], Generic[T]):
    """A block of ``size`` items that ``load`` makes when the first of them is asked for. Equal to the tuple of them."""

    __slots__ = ("_items", "_load", "_size")

    def __init__(self, size: int, load: Callable[[], tuple[T, ...]]) -> None:
        self._size = size
        self._load: Callable[[], tuple[T, ...]] | None = load
        self._items: tuple[T, ...] = ()

    @property
    def items(self) -> tuple[T, ...]:
        if self._load is not None:
            self._items, self._load = self._load(), None
            assert len(self._items) == self._size
        return self._items

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self.items[index]

    def __eq__(self, other: Any) -> bool:
        return self is other or (self.items == (other.items if isinstance(other, LazyBlock) else other))

    def __hash__(self) -> int:
        return hash(self.items)


Block = tuple[T, ...] | LazyBlock[T]


class Vector(Sequence[T], Generic[T]):
    """Like a tuple, but :meth:`append` and :meth:`with_item` copy one block and the list of blocks, not every item."""

    __slots__ = ("_blocks",)

    def __init__(self, items: Iterable[T] = ()) -> None:
        flat = tuple(items)
        self._blocks: tuple[Block[T], ...] = tuple(flat[i : i + BLOCK_SIZE] for i in range(0, len(flat), BLOCK_SIZE))

    @classmethod
    def of_blocks(cls, blocks: Iterable[Block[T]]) -> Vector[T]:
        """Made of blocks of :data:`BLOCK_SIZE` items each, the last of at least one."""
        return _of_blocks(tuple(blocks))

    @property
    def blocks(self) -> tuple[Block[T], ...]:
        """The items in blocks of :data:`BLOCK_SIZE`; the last one may be shorter, none is empty."""
        return self._blocks

    def append(self, item: T) -> Vector[T]:
        """With ``item`` at the end."""
        if not self._blocks or len(self._blocks[-1]) == BLOCK_SIZE:
            return _of_blocks((*self._blocks, (item,)))
        return _of_blocks((*self._blocks[:-1], (*self._blocks[-1], item)))

    def with_item(self, index: int, item: T) -> Vector[T]:
        """With ``item`` in place of the one at ``index``, which is not negative."""
        number, within = divmod(index, BLOCK_SIZE)
        block = self._blocks[number]
        new = (*block[:within], item, *block[within + 1 :])
        return _of_blocks((*self._blocks[:number], new, *self._blocks[number + 1 :]))

    def starts_with(self, other: Vector[T]) -> bool:
        """Whether the first items are those of ``other``; quick where one was made from the other."""
        if not other._blocks:
            return True
        *whole, last = other._blocks
        number = len(whole)
        return (
            len(self) >= len(other)
            and self._blocks[:number] == tuple(whole)
            and self._blocks[number][: len(last)] == last
        )

    def since(self, start: int) -> Iterator[T]:
        """The items from ``start`` on, without going through those before."""
        number, within = divmod(start, BLOCK_SIZE)
        return itertools.islice(itertools.chain.from_iterable(self._blocks[number:]), within, None)

    def __len__(self) -> int:
        return (len(self._blocks) - 1) * BLOCK_SIZE + len(self._blocks[-1]) if self._blocks else 0

    def __iter__(self) -> Iterator[T]:
        return itertools.chain.from_iterable(self._blocks)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                return tuple(self)[index]
            return tuple(itertools.islice(self.since(start), max(0, stop - start)))
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError("vector index out of range")
        return self._blocks[index // BLOCK_SIZE][index % BLOCK_SIZE]

    def __eq__(self, other: Any) -> bool:
        return self._blocks == other._blocks if isinstance(other, Vector) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._blocks)

    def __repr__(self) -> str:
        return f"Vector({list(self)!r})"


def _of_blocks(blocks: tuple[Block[T], ...]) -> Vector[T]:
    """All full but the last, none empty."""
    vector: Vector[T] = Vector.__new__(Vector)
    vector._blocks = blocks
    return vector
