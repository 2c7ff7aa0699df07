"""Section ``notify`` of a sweep file: who is told when something happens to the sweep."""

from __future__ import annotations

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, field_validator, model_validator

from orchestrator.config.scalars import Size, resolve
from orchestrator.space.file_types import Section, fault
from trials.secrets import is_secret_name

NotifyEvent = Literal["finished", "budget", "failed", "paused", "cancelled", "repeated_failure"]
EVENTS: tuple[NotifyEvent, ...] = get_args(NotifyEvent)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")


def _variable(value: str) -> str:
    """Refuse an environment variable whose name does not look like a secret's: its value would not be redacted.

    The message does not repeat what was written: it may be the secret itself.
    """
    if _VARIABLE.fullmatch(value) is None:
        raise fault(
            None,
            "expected the name of an environment variable that holds the webhook's URL",
            "Keep the URL itself out of the file: whoever knows it can post there.",
        )
    if not is_secret_name(value):
        raise fault(
            None,
            f"{value} does not look like the name of a secret",
            "Name it like TUNE_CLUSTER_WEBHOOK or TEAM_WEBHOOK.",
        )
    return value


class NotifySection(Section):
    """Who is told when something happens to the sweep. Each way gets every notification at least once, in order."""

    webhook_env: Annotated[str, AfterValidator(_variable)] | None = Field(
        default=None, description="Environment variable with the URL that notifications are posted to, as JSON."
    )
    webhook_file: str | None = Field(
        default=None, description="File with that URL instead: where the controller runs on another host."
    )
    command: list[Annotated[str, Field(min_length=1, max_length=4096)]] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Program and arguments, run without a shell: JSON on its input, TUNE_CLUSTER_EVENT in its "
        "environment.",
    )
    on: list[NotifyEvent] = Field(
        default=list(EVENTS), min_length=1, description="What to tell: " + ", ".join(EVENTS) + "."
    )
    after_failures: Size = Field(
        default=3, description="repeated_failure: this many trials in a row failed, or a node is not used any more."
    )

    _resolve = field_validator("webhook_file")(resolve)

    @model_validator(mode="after")
    def _consistent(self) -> NotifySection:
        if self.webhook_env is not None and self.webhook_file is not None:
            raise fault("webhook_file", "webhook_env names the URL already", "Keep one of the two.")
        if not self.is_on:
            raise fault(None, "nobody is told", "Give webhook_env, webhook_file or command.")
        if self.command is not None and any("\0" in part for part in self.command):
            raise fault("command", "a NUL character in an argument", "Remove it.")
        if len(set(self.on)) != len(self.on):
            raise fault("on", "the same event is listed twice", "Remove one.")
        return self

    @property
    def is_on(self) -> bool:
        """Whether there is anybody to tell."""
        return not (self.webhook_env is None and self.webhook_file is None and self.command is None)
