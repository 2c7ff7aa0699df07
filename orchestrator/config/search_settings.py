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
        min_length=1, max_length=500, description="Name or id of the MLflow experiment; its finished runs are read."
    )
    uri: str | None = Field(
        default=None,
        pattern=URI_PATTERN,
        description="MLflow store with the experiment: http(s)://host:port or sqlite:////absolute/path.db; null: the "
        "store of section `tracking`.",
    )
    metric: str = Field(
        min_length=1,
        max_length=250,
        description="Metric with the speed; of several values in a run, the median of the later half counts.",
    )
    unit: SpeedUnit = Field(description="Unit of the metric; rates without `/device` count all devices of the run.")
    params: dict[Annotated[str, Field(min_length=1, max_length=250)], str] = Field(
        min_length=1,
        max_length=64,
        description="MLflow param to the knob of this file with the same values. Other knobs count as in the baseline.",
    )

    @model_validator(mode="after")
    def _distinct(self) -> LearnFromSection:
        for knob in self.params.values():
            if sum(knob == other for other in self.params.values()) > 1:
                raise fault("params", f"two params map to the knob {knob!r}", "Keep one of them.")
        return self


class SearchSection(Section):
    """Order in which candidates are tried."""

    sampler: Literal["guided", "tpe", "random", "grid"] = Field(
        default="guided",
        description="guided: cost model, or typical effects of knobs, corrected by the trials of the sweep; "
        "tpe: tree-structured Parzen estimator; random; grid: every candidate in order.",
    )
    seed: int = Field(default=0, ge=0, le=2**31 - 1, description="Seed of the sampler.")
    max_concurrent: Size = Field(default=1, description="Number of trials that run at the same time.")
    stop_when_converged: bool = Field(
        default=False, description="Stop early when the guided sampler expects no further improvement."
    )
    patience: Size | None = Field(
        default=None, description="Stop after this many consecutive trials without a new best; null: never."
    )
    transfer: bool = Field(
        default=True,
        description="Start the guided sampler from measurements of earlier sweeps in the same MLflow store, on "
        "the same hardware.",
    )
    learn_from: LearnFromSection | None = Field(
        default=None,
        description="Runs of the same program in your own MLflow experiment, as further prior knowledge of the guided "
        "sampler; null: none.",
    )
    early_stop: EarlyStopFactor = Field(
        default=1.5,
        description="Stop a trial once its first steps show that it is slower than the best one by this factor, "
        "according to the objective; off: measure every trial in full.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> SearchSection:
        if self.stop_when_converged and self.sampler != "guided":
            raise fault(
                "stop_when_converged",
                f"sampler: {self.sampler} does not support this",
                "Use sampler: guided, or remove the key.",
            )
        if self.learn_from is not None and self.sampler != "guided":
            raise fault(
                "learn_from",
                f"sampler: {self.sampler} does not support this",
                "Use sampler: guided, or remove the key.",
            )
        return self
