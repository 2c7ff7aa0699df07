"""Section ``profile`` of a sweep file: which trials run once more under the profiler."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PlainSerializer, field_validator, model_validator

from orchestrator.config.scalars import resolve
from orchestrator.space.file_types import Section, Word, fault
from trials.spec import ProfileSpec

MAX_STEPS = 20
"""Steps recorded at most: traces grow with the steps, and three tell as much."""
_DEFAULT = ProfileSpec()

Step = Annotated[int, Field(ge=1, le=10_000)]
Rank = Annotated[int, Field(ge=0, lt=2**20)]


Ranks = Annotated[list[Rank], Word("stages", []), PlainSerializer(lambda ranks: ranks or "stages")]


class ProfileSection(Section):
    """Trials run once more, at the end, under torch's profiler."""

    trials: list[Literal["winner", "baseline"]] = Field(
        default=["winner"],
        min_length=1,
        description="Which trials: winner, baseline. `tune-cluster profile` takes any other.",
    )
    start_step: Step = Field(
        default=_DEFAULT.start_step,
        description="First recorded step, counted from 1 with the warm-up: the first ones compile and allocate.",
    )
    stop_step: Step = Field(default=_DEFAULT.stop_step, description="Last recorded step.")
    ranks: Ranks = Field(
        default=[],
        json_schema_extra={"default": "stages"},
        description="Ranks to record; stages: the first rank of every pipeline stage.",
    )
    memory: bool = Field(default=_DEFAULT.memory, description="Record allocations too: a timeline, and the peak.")
    stack: bool = Field(default=_DEFAULT.stack, description="Record Python's call stacks too; traces get large.")
    communication: bool = Field(
        default=_DEFAULT.communication,
        description="Count collectives per module and flag redundant ones, in one further step.",
    )
    output: str | None = Field(
        default=None, description="Folder that traces are copied to besides; null: the sweep's own folder has them."
    )

    _resolve = field_validator("output")(resolve)

    @model_validator(mode="after")
    def _consistent(self) -> ProfileSection:
        if self.stop_step < self.start_step:
            raise fault(
                "stop_step",
                f"stop_step {self.stop_step} comes before start_step {self.start_step}",
                "Both steps are recorded; make stop_step at least start_step.",
            )
        if self.stop_step - self.start_step >= MAX_STEPS:
            raise fault(
                "stop_step", f"records more than {MAX_STEPS} steps", f"Record {MAX_STEPS} or fewer; 3 tell as much."
            )
        for key, values in (("trials", self.trials), ("ranks", self.ranks)):
            if len(set(map(str, values))) < len(values):
                raise fault(key, "the same one is listed twice", "Leave one out.")
        return self

    def to_spec(self) -> ProfileSpec:
        return ProfileSpec(
            start_step=self.start_step,
            stop_step=self.stop_step,
            ranks=tuple(self.ranks),
            memory=self.memory,
            stack=self.stack,
            communication=self.communication,
        )
