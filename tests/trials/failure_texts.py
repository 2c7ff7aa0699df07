"""Texts by which libraries report failures, as users have met them: tests/data/failures/texts.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass

from tests.support import ROOT
from trials.accelerator.kinds import DeviceKind

FILE = ROOT / "tests" / "data" / "failures" / "texts.toml"
_KNOWN = tomllib.loads(FILE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class FailureText:
    """The message of an error, its kind, and its kind where the device's memory is used up."""

    words: str
    kind: str
    device: DeviceKind = "cuda"
    if_full: str = ""
    type: str = "RuntimeError"
    in_logs: bool = True

    @property
    def kind_if_full(self):
        return self.if_full or self.kind

    def raised(self):
        """An error of that type, as far as its name goes; a builtin one is itself."""
        base = {"ValueError": ValueError, "KeyError": KeyError, "TypeError": TypeError, "OSError": OSError}
        kind = base.get(self.type) or type(self.type, (RuntimeError,), {})
        return kind(self.words)

    def __str__(self):
        return f"{self.kind}-{self.words.strip()[:40]}"


@dataclass(frozen=True)
class LogText:
    """The end of a log and what is to be found in it."""

    name: str
    words: str
    kind: str = ""
    says: str = ""
    aborted: bool = True

    def __str__(self):
        return self.name


def _texts(name, **defaults):
    fields = ({**defaults, **{key: value for key, value in entry.items() if key != "from"}} for entry in _KNOWN[name])
    return tuple(FailureText(**values) for values in fields)


def _logs(name):
    return tuple(LogText(**{key: value for key, value in entry.items() if key != "from"}) for entry in _KNOWN[name])


RAISED = (
    *_texts("text"),
    *(
        FailureText(form.format(code=code), entry["kind"], "npu")
        for entry in _KNOWN["cann"]
        for code in entry["codes"].values()
        for form in _KNOWN["cann_forms"].values()
    ),
)
UNLIKE = _texts("unlike", kind="error")
LOGS = _logs("log")
LAUNCHERS = _logs("launcher")
UNSOURCED = [entry for name in ("text", "log", "launcher") for entry in _KNOWN[name] if not entry.get("from")]
"""Entries without a source; there must be none."""
