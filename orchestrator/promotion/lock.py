"""A lock that works through the registry itself, for processes of any host that share nothing else.

Whoever wants it creates an entry of its own, a registered model with a unique name, and then looks: alone, it has the
lock; otherwise it takes its entry away and tries again. Of two that want it at once at least one sees the other, since
each has created its entry before it looks; so never do two have it. Entries are deleted by their unique names: nobody
can take away another one than was looked at.

An entry stands for too long when its process is known to be gone, or when it has not changed for ``STALE_S`` while
somebody watched: clocks of hosts are not compared. Its owner, if it only slept, finds it gone before its next write.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from cluster.processes import process_info
from orchestrator.errors import ConfigError
from orchestrator.processes import pause_s
from orchestrator.tracking.registry import Registry

logger = logging.getLogger(__name__)

STALE_S = 60.0


WAIT_S = 150.0
"""Seconds to wait for the lock: longer than until an entry of a host that is gone is stale."""


_POLL_S = 0.05


_MAX_PAUSE_S = 0.4


class LockLostError(ConfigError):
    """The lock was taken away because somebody took this process for gone; the next command ends what it began."""


class RegistryLock:
    """The right to change what is in production under ``name``; see :meth:`hold`."""

    def __init__(self, registry: Registry, name: str, owner: str, *, stale_s: float = STALE_S) -> None:
        self._registry = registry
        self._name = name
        self._prefix = f"{name} (being changed) "  # no name that users may give holds a space
        self._entry = f"{self._prefix}{uuid4().hex}"
        self._tags = {"owner": owner, "place": own_place(), "process": own_identity()}
        self._stale_s = stale_s
        self._num_renewals = 0
        self._watched: dict[str, tuple[Mapping[str, str], float]] = {}

    @contextmanager
    def hold(self, wait_s: float = WAIT_S) -> Iterator[Callable[[], None]]:
        """Hold the lock; yields a function to call before every write, which raises LockLostError where it was lost.

        Raises:
            ConfigError: others have held it for ``wait_s``.
        """
        self._acquire(time.monotonic() + wait_s)
        try:
            yield self.renew
        finally:
            self._registry.delete_entry(self._entry)

    def renew(self) -> None:
        """Show that this process is still at work, if it still has the lock."""
        self._num_renewals += 1
        if not self._registry.tag_entry(self._entry, "renewals", str(self._num_renewals)):
            raise LockLostError(
                f"another process took over changing {self._name}, as this one had not moved for {self._stale_s:.0f} s",
                remedy=f"See what it has become: tune-cluster history {self._name}",
            )

    def _acquire(self, deadline_s: float) -> None:
        num_tries = 0
        while others := self._others() or self._collision():
            if time.monotonic() > deadline_s:
                raise self._busy(others)
            self._remove_stale(others)
            time.sleep(random.uniform(0.2, 1.0) * pause_s(num_tries, first_s=_POLL_S, last_s=_MAX_PAUSE_S))
            num_tries += 1

    def _collision(self) -> dict[str, dict[str, str]]:
        """Other processes that want the lock at the same time; empty: it is ours."""
        about = f"{self._tags['owner']} changes what {self._name}@production is. Gone in a moment."
        try:
            self._registry.create_entry(self._entry, self._tags, about)
            others = self._others()
        except BaseException:
            self._registry.delete_entry(self._entry)
            raise
        if others:
            self._registry.delete_entry(self._entry)
        return others

    def _others(self) -> dict[str, dict[str, str]]:
        return {name: tags for name, tags in self._registry.entries(self._prefix).items() if name != self._entry}

    def _remove_stale(self, others: Mapping[str, Mapping[str, str]]) -> None:
        now_s = time.monotonic()
        for entry, tags in others.items():
            seen, since_s = self._watched.get(entry, (None, now_s))
            if seen != tags:
                self._watched[entry] = (tags, now_s)
                since_s = now_s
            if is_gone(tags.get("place", ""), tags.get("process", "")) or now_s - since_s > self._stale_s:
                logger.warning("%s was left locked by %s, which is gone", self._name, tags.get("owner", "somebody"))
                self._registry.delete_entry(entry)

    def _busy(self, others: Mapping[str, Mapping[str, str]]) -> ConfigError:
        owners = " and ".join(sorted({tags.get("owner", "somebody") for tags in others.values()}))
        return ConfigError(f"{owners} is changing what {self._name} is", remedy="Try again in a minute.")


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


_NAMESPACE = Path("/proc/self/ns/pid")


def own_place() -> str:
    """This boot of this host and the namespace of its process numbers, equal where those can be compared.

    Empty where that cannot be told.
    """
    try:
        return f"{_BOOT_ID.read_text(encoding='ascii').strip()} {_NAMESPACE.readlink()}"
    except OSError:
        return ""


def own_identity() -> str:
    """Process number and when it began: the number alone may be used again."""
    return f"{os.getpid()} {_start_time(os.getpid())}"


def is_gone(place: str, identity: str) -> bool:
    """Whether the process is known to have ended. False where it runs elsewhere, or nobody can say."""
    if not place or place != own_place():
        return False
    pid, _, started_at = identity.partition(" ")
    return pid.isdigit() and str(_start_time(int(pid))) != started_at


def _start_time(pid: int) -> int:
    """In clock ticks since the host booted; -1 when there is no such process, or it only waits to be reaped."""
    info = process_info(pid)
    return info.started_at if info is not None and info.is_running else -1
