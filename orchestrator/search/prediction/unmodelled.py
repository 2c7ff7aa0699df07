"""What candidates are in the knobs that the cost model of decoders knows nothing of."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from cluster.candidate_table import CandidateTable
from orchestrator.search.prediction.gaussian_process import Array
from orchestrator.space.knobs.own import INHERITED
from orchestrator.space.naming import Features, Scalar, feature_columns
from trials.spec import Candidate

MODELLED = frozenset(
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
"""Features that the cost model's own terms, or :func:`physical_places`, cover."""


class UnmodelledKnobs:
    """What candidates are in the knobs that the cost model knows nothing of, one row per candidate.

    ``one_hot`` has a column per value of each knob; in ``places`` knobs that are numbers have one column.
    """

    def __init__(self, candidates: CandidateTable, others: Sequence[Candidate], features: Features) -> None:
        known = feature_columns(candidates, functools.partial(_unmodelled, features=features))
        rest = [_unmodelled(candidate, features) for candidate in others]
        names = dict.fromkeys([*known, *(name for row in rest for name in row)])
        num = len(candidates) + len(rest)
        hot, places = [np.zeros((num, 0))], [np.zeros((num, 0))]
        for name in names:
            told, codes = known.get(name, ([INHERITED], np.zeros(len(candidates), dtype=np.int32)))
            last = [row.get(name, INHERITED) for row in rest]
            distinct = sorted({*told, *last}, key=str)
            if len(distinct) < 2:
                continue
            where = np.array([distinct.index(value) for value in [*told, *last]])
            code = np.concatenate([where[codes], where[len(told) :]])
            columns = np.eye(len(distinct))[code]
            hot.append(columns)
            if all(isinstance(value, int | float) for value in distinct):
                columns = (np.log2(1.0 + np.array(distinct, dtype=float)) / 1.5)[code][:, None]
            places.append(columns)
        self.one_hot: Array = np.hstack(hot)
        self.places: Array = np.hstack(places)


def _unmodelled(candidate: Candidate, features: Features) -> dict[str, Scalar]:
    own = {name: value for name, value in features(candidate).items() if name not in MODELLED}
    own["selective"] = " ".join(sorted(part.pattern for part in candidate.recompute.selective))
    return own
