"""Mixtures of experts train like one process in fp32, whatever the knobs; and the grouped product is a loop's."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import pytest
import torch

from tests.trials.gang import differences, run_gang
from tests.trials.initial import check_all
from tests.trials.parity_knobs import ROWS_FILE, is_legal, read_rows, spec_of
from tests.trials.test_parity import NEUTRAL, name_of, tolerances
from trials.legality import violations
from trials.models.experts import MixtureOfExperts, grouped_matmul
from trials.spec import Experts

EXPERTS = Experts(
    num_experts=4, experts_per_token=2, ffn_hidden_size=24, shared_ffn_hidden_size=16, num_dense_layers=1, scores="sigmoid"
)


def with_experts(spec):
    model = dataclasses.replace(spec.workload.model, experts=EXPERTS)
    return dataclasses.replace(spec, workload=dataclasses.replace(spec.workload, model=model))


def rows():
    """The rows of the dense matrix that mixtures of experts can run, and a single process."""
    assert ROWS_FILE.exists()
    chosen = [NEUTRAL, *(row for row in read_rows() if row["tp"] == "whole" and row["precision"] != "O1-fp8")]
    specs = {name_of(row): with_experts(spec_of(row)) for row in chosen if is_legal(row)}
    return {name: spec for name, spec in specs.items() if not list(violations(spec.workload, spec.candidate))}


SPECS = rows()


@functools.cache
def results(world_size):
    names = [name for name, spec in SPECS.items() if spec.candidate.layout.world_size == world_size]
    with tempfile.TemporaryDirectory() as folder:
        found = run_gang([SPECS[name] for name in names], Path(folder), before=check_all)
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("name", sorted(SPECS, key=lambda name: SPECS[name].candidate.layout.world_size))
def test_trains_like_a_single_process(name):
    spec = SPECS[name]
    loss, norm = differences(results(spec.candidate.layout.world_size)[name], results(1)[name_of(NEUTRAL)])
    loss_limit, norm_limit = tolerances(spec.candidate.precision)
    assert loss <= loss_limit and norm <= norm_limit, (loss, norm)
