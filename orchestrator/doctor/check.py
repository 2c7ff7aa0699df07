"""What a check is, and how many of them run side by side without any holding up the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from trials.secrets import redact

Level = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check came to."""

    subject: str
    level: Level
    """warn: a sweep can run, worse than it could; fail: it cannot."""
    words: str
    remedy: str = ""
    """What to do about it; empty where there is nothing to do."""

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form, one line of ``doctor --json``."""
        return {"subject": self.subject, "level": self.level, "words": self.words, "remedy": self.remedy}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing to look at. ``look`` gives words for people, or raises :class:`TroubleError`."""

    subject: str
    look: Callable[[], str]
    deadline_s: float = 10.0
    level: Level = "fail"
    """How bad it is where the check raises anything else, or does not end."""


class TroubleError(Exception):
    """Something is not as it should be: what, how bad that is, and what to do."""

    def __init__(self, words: str, remedy: str, level: Level = "warn") -> None:
        super().__init__(words)
        self.words, self.remedy, self.level = words, remedy, level


def run_checks(checks: Sequence[Check]) -> list[Finding]:
    """The findings in the order of the checks. They run at the same time, in threads that are left alone at their
    deadlines: one that hangs in the kernel, as on a file server that is away, cannot be ended."""
    began_s = time.monotonic()
    running = [(check, _started(check)) for check in checks]
    return [_finding(check, future, began_s + check.deadline_s) for check, future in running]


def _started(check: Check) -> Future[str]:
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(check.look())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name=f"check {check.subject}").start()
    return future


def _finding(check: Check, future: Future[str], until_s: float) -> Finding:
    try:
        words = future.result(max(0.1, until_s - time.monotonic()))
    except TroubleError as trouble:
        return Finding(
            subject=check.subject, level=trouble.level, words=redact(trouble.words), remedy=redact(trouble.remedy)
        )
    except TimeoutError:
        words = f"no answer within {check.deadline_s:g} s"
        return Finding(
            subject=check.subject, level=check.level, words=words, remedy="Is what it asks overloaded or away?"
        )
    except Exception as error:
        words = redact(f"cannot be looked at: {str(error) or type(error).__name__}")
        return Finding(subject=check.subject, level=check.level, words=words, remedy="Mend what the message names.")
    return Finding(subject=check.subject, level="ok", words=redact(words))
