"""Sections ``confirm`` and ``gate`` of a sweep file: how a finalist is proven."""

from __future__ import annotations

import shutil
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer, PrivateAttr, ValidationInfo, model_validator

from orchestrator.config.scalars import Duration, Positive
from orchestrator.space.file_types import Section, ShortForms, Word, fault
from orchestrator.sweep.events import ConfirmSettings, GateSettings, PromotedRounds

_SOAKS: dict[str, float | None] = {"auto": None, "off": 0.0}


class Switchable(Section):
    """A section that may be the word ``off`` instead."""

    _is_on: bool = PrivateAttr(default=True)

    @property
    def is_on(self) -> bool:
        return self._is_on


class PromotedSection(Section):
    """Rounds of a promotion that those of a verification are compared with; written by `verify`."""

    own: list[Positive] = Field(
        min_length=1, description="Speed of the configuration in each round of its promotion, in tokens/s/p."
    )
    baseline: list[Positive] = Field(default=[], description="Speed of the baseline in the same rounds, if measured.")
    tolerance: Annotated[float, Field(ge=0, lt=1)] = Field(description="Relative loss of speed that does not count.")
    hardware: dict[str, str] = Field(
        default={}, description="Entries of the fingerprint that must be the same for speeds to be compared."
    )

    @model_validator(mode="after")
    def _paired(self) -> PromotedSection:
        if self.baseline and len(self.baseline) != len(self.own):
            raise fault(
                "baseline", f"{len(self.baseline)} speeds beside {len(self.own)} of own", "Write one per round."
            )
        return self

    def to_settings(self) -> PromotedRounds:
        return PromotedRounds(
            own=tuple(self.own), baseline=tuple(self.baseline), tolerance=self.tolerance, hardware=self.hardware
        )


class ConfirmSection(Switchable):
    """How the fastest trials are measured again before one of them is believed."""

    finalists: Annotated[int, Field(ge=1, le=20)] = Field(
        default=ConfirmSettings().num_finalists, description="Trials to confirm: those that may be the fastest."
    )
    min_rounds: Annotated[int, Field(ge=2, le=100)] = Field(
        default=ConfirmSettings().min_rounds, description="Times each is measured again, at least."
    )
    max_rounds: Annotated[int, Field(ge=2, le=100)] = Field(
        default=ConfirmSettings().max_rounds, description="Times each is measured again, at most."
    )
    budget_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=ConfirmSettings().budget_share,
        description="Share of device_hours and wall_time that the search leaves over for confirmation and gate.",
    )

    soak: Literal["auto", "off"] | Duration = Field(
        default="auto",
        description="One longer run each of winner and baseline before the winner is confirmed: how long its measured "
        "steps take at the speed of the rounds. auto: as long as its rounds together, and at least 30s; none on "
        "clusters that do not exist.",
    )
    always: bool = Field(
        default=ConfirmSettings().always,
        description="Measure the fastest trials again even where none may be faster than the baseline.",
    )
    promoted: PromotedSection | None = Field(
        default=None,
        description="Written by `verify`: rounds go on until they show whether the finalist has lost speed since its "
        "promotion.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> ConfirmSection:
        if self.max_rounds < self.min_rounds:
            raise fault("max_rounds", f"{self.max_rounds} is below min_rounds {self.min_rounds}", "Raise it.")
        return self

    def to_settings(self) -> ConfirmSettings:
        return ConfirmSettings(
            num_finalists=self.finalists,
            min_rounds=self.min_rounds,
            max_rounds=self.max_rounds,
            budget_share=self.budget_share,
            always=self.always,
            soak_s=_SOAKS[self.soak] if isinstance(self.soak, str) else self.soak,
            promoted=self.promoted.to_settings() if self.promoted else None,
        )


class GateSection(Switchable):
    """Whether the winner trains the same model as the baseline."""

    num_steps: Annotated[int, Field(ge=2, le=10_000)] = Field(
        default=GateSettings().num_steps, description="Steps that baseline and finalist train with the same seed."
    )
    loss_tolerance: Positive | None = Field(
        default=None, description="Relative deviation of the loss allowed; null: by number format, docs/loss-gate.md."
    )
    grad_norm_tolerance: Positive | None = Field(
        default=None, description="Relative deviation of the gradient norm allowed; null: by number format."
    )
    command: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(
        default=[],
        max_length=64,
        description="Your own evaluation of the finalist: program and arguments, run without a shell; `{facts}` stands "
        "for a JSON file about it. Exit code 0 passes. Empty: none.",
    )
    command_timeout_s: Duration = Field(
        default=GateSettings().command_timeout_s, alias="command_timeout", description="How long it may take."
    )

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> GateSection:
        if any("\0" in part for part in self.command):
            raise fault("command", "a NUL character in an argument", "Remove it.")
        context = info.context or {}
        is_run_here = context.get("check_files", True) and not context.get("is_remote", False)
        if self.command and is_run_here and shutil.which(self.command[0]) is None:
            where = "cannot be run" if "/" in self.command[0] else "is not on PATH"
            raise fault("command.0", f"the program {self.command[0]!r} {where}", "Install it, or give its whole path.")
        return self

    def to_settings(self) -> GateSettings:
        return GateSettings(
            num_steps=self.num_steps,
            loss_tolerance=self.loss_tolerance,
            grad_norm_tolerance=self.grad_norm_tolerance,
            command=tuple(self.command),
            command_timeout_s=self.command_timeout_s,
        )


def _off(section: Switchable) -> Any:
    section._is_on = False
    return (
        ShortForms({}, others=("off",)),
        Word("off", section),
        PlainSerializer(lambda value: value.model_dump(mode="json", by_alias=True) if value.is_on else "off"),
    )


ConfirmValue = Annotated[ConfirmSection, *_off(ConfirmSection())]
GateValue = Annotated[GateSection, *_off(GateSection())]
