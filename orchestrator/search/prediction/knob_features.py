"""Knobs that differ between candidates and that the cost model knows nothing of, as features to learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from orchestrator.search.prediction.gaussian_process import Array
from trials.spec import Candidate

Scalar = str | int | float | bool
Features = Callable[[Candidate], Mapping[str, Scalar]]

DESCRIBED = frozenset(
    (
        "world_size",
        "pp",
        "dp_replicate",
        "dp_shard",
        "cp",
        "tp",
        "zero_stage",
        "sequence_parallel",
        "micro_batch_size",
        "num_virtual_stages",
        "stage_layers",
        "recompute",
    )
)
"""Features that ``beliefs.physical_places`` or the cost model's own terms cover."""


class OwnKnobs:
    """One row per candidate: ``one_hot`` (a column per value of each knob) and ``places`` (a column per number)."""

    def __init__(self, candidates: Sequence[Candidate], features: Features) -> None:
        rows = [_own_features(candidate, features) for candidate in candidates]
        names = dict.fromkeys(name for row in rows for name in row)
        hot, places = [np.zeros((len(rows), 0))], [np.zeros((len(rows), 0))]
        for name in names:
            values = [row.get(name, "") for row in rows]
            distinct = sorted(set(values), key=str)
            if len(distinct) < 2:
                continue
            columns = np.array([[value == other for other in distinct] for value in values], dtype=float)
            numbers = all(isinstance(value, int | float) for value in distinct)
            hot.append(columns)
            places.append(np.log2(1.0 + np.array(values, dtype=float))[:, None] / 1.5 if numbers else columns)
        self.one_hot: Array = np.hstack(hot)
        self.places: Array = np.hstack(places)


def _own_features(candidate: Candidate, features: Features) -> dict[str, Scalar]:
    own = {name: value for name, value in features(candidate).items() if name not in DESCRIBED}
    own["selective"] = " ".join(sorted(part.pattern for part in candidate.recompute.selective))
    return own
