"""Files of an attempt that come home: from the node where a rank wrote them to the controller's host.

Ranks write them to the folder ``profile`` of the attempt's folder. Where that is the controller's own file system they
are home already. Elsewhere the node's agent sends them, in pieces, before it says that the gang is gone; so they are
there when the controller hears of the end. Names are checked on both sides, and no link is followed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from cluster.gang.messages import RankSlot
from trials.files import make_private_folder
from trials.reports.profile import FOLDER

logger = logging.getLogger(__name__)

MAX_BYTES_PER_RANK = 64 << 20
"""Most bytes of a rank's files together; those of a rank that has more stay on its node."""
PIECE_BYTES = 4 << 20
"""Most bytes of a file that are sent at once."""
_NAME = re.compile(r"rank(\d{1,7})\.[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
"""Names of files that come home: a rank's number first, no separators, not hidden, leading nowhere else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece:
    """A part of a file. The parts of a file are sent in order."""

    attempt_id: str
    token: str
    name: str
    offset: int
    data: bytes
    is_last: bool


class HomeMark:
    """A file that the controller leaves in its folder: an agent that finds it works on the controller's file system."""

    def __init__(self, workdir: Path) -> None:
        self.name = f".home-{uuid4().hex}"
        for left in make_private_folder(workdir).glob(".home-*"):  # by a controller that was killed
            left.unlink(missing_ok=True)
        self._path = workdir / self.name
        self._path.touch(mode=0o600)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)

    @staticmethod
    def is_home(workdir: Path, name: str) -> bool:
        return (workdir / name).is_file()


def pieces(directory: Path, attempt_id: str, token: str, slots: tuple[RankSlot, ...]) -> Iterator[FilePiece]:
    """The files that the ranks in ``slots`` left in an attempt's folder, piece by piece."""
    for slot in slots:
        files = _files_of(directory / FOLDER, slot.rank)
        size = sum(num_bytes for _, num_bytes in files)
        if size > MAX_BYTES_PER_RANK:
            logger.warning(
                "the files of rank %d stay in %s: %d MiB, and %d MiB are brought home at most",
                *(slot.rank, directory / FOLDER, size >> 20, MAX_BYTES_PER_RANK >> 20),
            )
            continue
        for path, num_bytes in files:
            try:
                yield from _pieces_of(path, num_bytes, attempt_id, token)
            except OSError as error:
                logger.warning("%s stays where it is: %s", path, error)


def _files_of(folder: Path, rank: int) -> list[tuple[Path, int]]:
    found = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match and int(match[1]) == rank and stat.S_ISREG((status := path.lstat()).st_mode):
                found.append((path, status.st_size))
    return found


def _pieces_of(path: Path, num_bytes: int, attempt_id: str, token: str) -> Iterator[FilePiece]:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        for offset in range(0, max(1, num_bytes), PIECE_BYTES):
            data = file.read(min(PIECE_BYTES, num_bytes - offset))
            is_last = offset + PIECE_BYTES >= num_bytes
            yield FilePiece(
                attempt_id=attempt_id, token=token, name=path.name, offset=offset, data=data, is_last=is_last
            )


class FileReceiver:
    """Writes what comes home below ``workdir``. A file is there as a whole or not at all."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._received: dict[tuple[str, str], int] = {}
        """Bytes that have come so far, by attempt and rank."""

    def take(self, piece: FilePiece) -> None:
        """Add a piece of a file of a known attempt; what is not as it should be is left out, with a warning."""
        match = _NAME.fullmatch(piece.name)
        if match is None:
            logger.warning("a file of attempt %s is refused for its name: %.100r", piece.attempt_id, piece.name)
            return
        key = piece.attempt_id, match[1]
        self._received[key] = self._received.get(key, 0) + len(piece.data)
        if self._received[key] > MAX_BYTES_PER_RANK:
            logger.warning("attempt %s sends too much for rank %s", *key)
            return
        folder = self._workdir / piece.attempt_id / FOLDER
        try:
            self._write(folder, piece)
        except OSError as error:
            logger.warning("cannot write %s: %s", folder / piece.name, error)

    def _write(self, folder: Path, piece: FilePiece) -> None:
        beside = make_private_folder(folder) / f".{piece.name}"
        if piece.offset == 0:
            beside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if piece.offset == 0 else 0)
        with os.fdopen(os.open(beside, flags, 0o600), "wb") as file:
            if file.seek(0, os.SEEK_END) != piece.offset:
                raise OSError(f"a piece is missing before byte {piece.offset}")
            file.write(piece.data)
        if piece.is_last:
            beside.replace(folder / piece.name)
