"""The queue of the sweeps that share this host: a file in a folder that they have in common."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from cluster.hardware.topology import path_safe
from cluster.processes import process_info
from cluster.queue.entries import QueueEntry, divided
from cluster.queue.share import Claim, Grant, QueuePolicy
from trials.codec import CodecError, from_json, to_json
from trials.files import make_private_folder, write_atomically

logger = logging.getLogger(__name__)

EXPIRES_S = 600.0
"""How long a living process may go without renewing its claim before it counts as hanging."""

LOCK_TIMEOUT_S = 2.0
"""How long to wait for the lock: others hold it for milliseconds, unless they are stopped meanwhile."""


class HostAdmission:
    """Admission to this host, one node. A claim ends when its process does."""

    def __init__(self, folder: Path, policy: QueuePolicy, *, devices_per_node: int) -> None:
        self._folder = folder
        self._devices_per_node = devices_per_node
        self._policy = policy
        self._keys: set[str] = set()

    def beat(self, claim: Claim) -> Grant:
        pid = os.getpid()
        entry = QueueEntry(
            claim=replace(claim, devices_per_node=self._devices_per_node),
            num_nodes=1,
            policy=self._policy,
            renewed_at_s=time.monotonic(),
            process=(pid, _start_time(pid)),
        )
        self._keys.add(claim.key)
        try:
            with _locked(self._folder) as file:
                entries = {**_read(file), claim.key: entry}
                _write(file, entries)
        except OSError as error:
            return Grant(claim.held, f"the queue in {self._folder} cannot be used: {error}")
        return divided(entries.values())[claim.key].grant

    def leave(self) -> None:
        try:
            with _locked(self._folder) as file:
                entries = _read(file)
                ours = {key for key in self._keys if key in entries and entries[key].process[0] == os.getpid()}
                _write(file, {key: entry for key, entry in entries.items() if key not in ours})
        except OSError as error:
            logger.warning("the queue in %s is not left: %s; the claim ends with this process", self._folder, error)
        self._keys.clear()


def _file(folder: Path) -> Path:
    return folder / f"queue-{path_safe(socket.gethostname())}.json"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """The queue's file, while no other process writes it.

    Raises:
        OSError: the lock was not free within :data:`LOCK_TIMEOUT_S`, or the folder cannot be used.
    """
    file = _file(folder)
    make_private_folder(folder)
    with FileLock(file.with_suffix(".lock"), timeout=LOCK_TIMEOUT_S):
        yield file


def _read(file: Path) -> dict[str, QueueEntry]:
    """The claims that stand, without those that have expired or whose process is gone."""
    try:
        entries: list[QueueEntry] = [
            from_json(QueueEntry, body) for body in json.loads(file.read_text(encoding="utf-8"))
        ]
    except FileNotFoundError:
        return {}
    except (ValueError, CodecError) as error:
        logger.warning("%s is begun anew: %s", file, error)
        return {}
    return {entry.claim.key: entry for entry in entries if _stands(entry)}


def _stands(entry: QueueEntry) -> bool:
    pid, started_at = entry.process
    age_s = time.monotonic() - entry.renewed_at_s
    return 0 <= age_s <= EXPIRES_S and _start_time(pid) == started_at


def _start_time(pid: int) -> int:
    """When the process started, in clock ticks since the host booted; -1 when there is none."""
    info = process_info(pid)
    return -1 if info is None else info.started_at


def _write(file: Path, entries: dict[str, QueueEntry]) -> None:
    write_atomically(file, [json.dumps([to_json(entry) for entry in entries.values()], indent=1).encode()])
