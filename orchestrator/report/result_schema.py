"""The JSON documents of results: their form, its version, and the JSON Schema in ``docs/result.schema.json``.

``python -m orchestrator.report.result_schema`` writes the schema; a test fails when it is out of date. Keys may be
added within a version; one that is renamed, removed or changes its meaning raises :data:`SCHEMA_VERSION`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from configs import CONFIGS

SCHEMA_VERSION = 2
"""Version of all documents that ``--json`` prints."""
SCHEMA_FILE = "docs/result.schema.json"

SearchVerdict = Literal["faster", "slower", "tie"]


class FiguresDocument(TypedDict):
    """The speed of a configuration, derived from its step time. Rates count tokens, or samples if the workload's
    samples are not sequences. The keys of the other rate are absent."""

    step_time_s: float
    num_devices: int
    tokens_per_s: NotRequired[Annotated[float, Field(description="The total over all devices.")]]
    tokens_per_s_per_device: NotRequired[float]
    device_hours_per_1e9_tokens: NotRequired[float]
    price_per_1e9_tokens: NotRequired[float | None]
    samples_per_s: NotRequired[Annotated[float, Field(description="The total over all devices.")]]
    samples_per_s_per_device: NotRequired[float]
    device_hours_per_1e9_samples: NotRequired[float]
    price_per_1e9_samples: NotRequired[float | None]


class SpeedupDocument(TypedDict):
    """The speed-up over the baseline, by the sweep's objective, with its 95% confidence interval."""

    value: float
    low: float | None
    high: float | None


class ConfirmedSpeedupDocument(SpeedupDocument):
    """The speed-up measured by the rounds of the confirmation, which interleave the trial with the baseline."""

    num_rounds: int


class SearchSpeedupDocument(SpeedupDocument):
    """The speed-up measured by the search, from one run each of the trial and the baseline, and its verdict."""

    verdict: SearchVerdict


class TrialDocument(FiguresDocument):
    """A trial, as measured by the search."""

    trial: int
    reason: str
    config: dict[str, Any]
    score: Annotated[float, Field(description="The score by the sweep's objective, in `unit`.")]
    score_low: float | None
    score_high: float | None


class BestDocument(TrialDocument):
    """The fastest trial in the search. It is not necessarily the winner."""

    speedup: SearchSpeedupDocument | None


class WinnerDocument(TypedDict):
    """The configuration to use, with its confirmed speed-up. On a simulated cluster, the winner of the simulation."""

    trial: int
    reason: str
    config: dict[str, Any]
    speedup: ConfirmedSpeedupDocument | None
    figures: Annotated[FiguresDocument, Field(description="The speed of the winner, as measured by the confirmation.")]
    baseline: Annotated[FiguresDocument | None, Field(description="The speed of the baseline in the same rounds.")]
    search: Annotated[TrialDocument, Field(description="The same trial, as measured by the search.")]


class RemeasuredDocument(TypedDict):
    """The finalist that the verdict is about and the baseline, as measured by the rounds of the confirmation."""

    trial: int
    num_rounds: int
    figures: FiguresDocument
    baseline: FiguresDocument


class VerdictDocument(TypedDict):
    """The verdict of the confirmation."""

    conclusion: Literal["confirmed", "keep", "unconfirmed", "rehearsed"]
    winner: int | None
    reason: str
    speedup: dict[str, float | None] | None
    num_rounds: int
    tied_with: list[int]
    gates: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    soaks: list[dict[str, Any]]
    disqualified: list[dict[str, Any]]
    shared: list[str]
    left_out: list[int]


class NoteDocument(TypedDict):
    """A note that a user added to a trial, or to the sweep if `trial` is null."""

    trial: int | None
    text: str
    tags: dict[str, str]
    by: Annotated[str, Field(description="The user and host that last changed the note.")]
    at_s: Annotated[float, Field(description="The time of the last change, in seconds since the epoch.")]


class ResultDocument(TypedDict):
    """The output of ``submit --json``, ``resume --json`` and ``report --json``. ``ps`` and ``status`` print it with
    further keys."""

    schema_version: int
    winner: WinnerDocument | None
    best_of_search: BestDocument | None
    baseline: TrialDocument | None
    proof: VerdictDocument | None
    remeasured: RemeasuredDocument | None
    sweep: str
    state: str
    reason: str
    objective: Literal["tokens_per_s_per_device", "step_time", "device_cost"]
    unit: Annotated[str, Field(description="The unit of scores, such as tokens/s/p (p stands for a device).")]
    measured: Annotated[bool, Field(description="Whether trials were measured. False on a simulated cluster.")]
    virtual: Literal["simulated"] | None
    num_leased_devices: int
    trials: Annotated[dict[str, int], Field(description="The number of trials by outcome, and their `total`.")]
    ruled_out: list[dict[str, Any]]
    device_hours: float
    saved_device_hours: float
    duration_s: float
    paused_s: float
    learned_from: dict[str, int]
    tracking_uri: str
    disturbed: dict[str, Any] | None
    notes: list[NoteDocument]
    profiles: list[dict[str, Any]]


def versioned(body: Any) -> Any:
    """The document with its version first; for a list, every document in it."""
    if isinstance(body, list):
        return [versioned(one) for one in body]
    return {"schema_version": SCHEMA_VERSION, **body} if isinstance(body, dict) else body


def result_schema() -> dict[str, Any]:
    """The JSON Schema of :class:`ResultDocument`."""
    schema = TypeAdapter(ResultDocument).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "tune-cluster result"}


def schema_text() -> str:
    return json.dumps(result_schema(), indent=2) + "\n"


def write(root: Path) -> None:
    """Write the schema into the repository at ``root``."""
    (root / SCHEMA_FILE).write_text(schema_text(), encoding="utf-8")


if __name__ == "__main__":
    write(CONFIGS.parent)
