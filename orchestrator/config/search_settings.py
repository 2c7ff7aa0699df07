"""Section ``search`` of a sweep file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from orchestrator.config.settings import Size
from orchestrator.mlflow_urls import URI_PATTERN
from orchestrator.space.file_types import Section, fault, off_is_false, received


def _known_factor(value: object) -> object:
    """Refuse anything but a number or ``off``, with one message."""
    value = off_is_false(value)
    if value == "off" or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise fault(None, f"expected a number or 'off'{received(value)}", "Set a slowdown factor above 1, such as 1.5.")


EarlyStopFactor = Annotated[
    Annotated[float, Field(ge=1, le=100)] | Literal["off"],
    BeforeValidator(_known_factor),
    WithJsonSchema({"anyOf": [{"type": "number", "minimum": 1, "maximum": 100}, {"enum": ["off", False]}]}),
]


SpeedUnit = Literal["s/step", "ms/step", "steps/s", "tokens/s", "samples/s", "tokens/s/device", "samples/s/device"]
"""Units of a metric that states how fast a run was."""


class LearnFromSection(Section):
    """Earlier runs of the same program that you recorded in MLflow yourself."""

    experiment: str = Field(
        min_length=1, max_length=500, description="The name or ID of the MLflow experiment whose finished runs to read."
    )
    uri: str | None = Field(
        default=None,
        pattern=URI_PATTERN,
        description="The URI of the MLflow store that has the experiment: `http(s)://host:port` or "
        "`sqlite:////absolute/path.db`. If null, the store in the `tracking` section is used.",
    )
    metric: str = Field(
        min_length=1,
        max_length=250,
        description="The metric that contains the speed. If a run has several values, the median of the later half is "
        "used.",
    )
    unit: SpeedUnit = Field(
        description="The unit of the metric. Rates without `/device` are totals over all devices of the run."
    )
    params: dict[Annotated[str, Field(min_length=1, max_length=250)], str] = Field(
        min_length=1,
        max_length=64,
        description="A mapping from MLflow params to the knobs in this file that have the same values. Other knobs are "
        "assumed to have the value in the baseline.",
    )

    @model_validator(mode="after")
    def _distinct(self) -> LearnFromSection:
        for knob in self.params.values():
            if sum(knob == other for other in self.params.values()) > 1:
                raise fault("params", f"two params map to the knob {knob!r}", "Keep one of them.")
        return self


class SearchSection(Section):
    """How to choose the candidates to try."""

    sampler: Literal["guided", "tpe", "random", "grid"] = Field(
        default="guided",
        description="The sampler that chooses candidates. `guided` uses the cost model, or the typical effects of "
        "knobs, corrected by the sweep's trials; `tpe` is a tree-structured Parzen estimator; `random` "
        "chooses at random; `grid` tries every candidate in order.",
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="The seed for the sampler.")
    max_concurrent: Size = Field(default=1, description="The maximum number of trials that run at the same time.")
    stop_when_converged: bool = Field(
        default=False, description="Whether to stop early when the guided sampler expects no further improvement."
    )
    patience: Size | None = Field(
        default=None,
        description="The number of consecutive trials without a new best after which the search stops. If null, it "
        "never stops for this reason.",
    )
    transfer: bool = Field(
        default=True,
        description="Whether the guided sampler learns from earlier sweeps in the same MLflow store, on the same "
        "hardware.",
    )
    learn_from: LearnFromSection | None = Field(
        default=None,
        description="Earlier runs of the same program that you recorded in MLflow yourself. The guided sampler learns "
        "from them too. If null, it uses none.",
    )
    early_stop: EarlyStopFactor = Field(
        default=1.5,
        description="The factor by which the first steps of a trial must be slower than the best trial, by the "
        "objective, for it to be stopped early. `off` measures every trial in full.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> SearchSection:
        if self.stop_when_converged and self.sampler != "guided":
            raise fault(
                "stop_when_converged",
                f"not supported by sampler: {self.sampler}",
                "Use sampler: guided, or remove the key.",
            )
        if self.learn_from is not None and self.sampler != "guided":
            raise fault(
                "learn_from",
                f"not supported by sampler: {self.sampler}",
                "Use sampler: guided, or remove the key.",
            )
        return self
