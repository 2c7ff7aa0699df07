"""What a program refuses once is not tried again, and nothing that it takes is left out."""

import functools
import sys

import pytest
import yaml

from orchestrator.config.sweep import load_sweep
from orchestrator.search.search import Search
from orchestrator.space.inside import knobs_set
from orchestrator.space.notation import flat_params
from orchestrator.space.space import make_space
from orchestrator.sweep.events import Budget
from orchestrator.sweep.fold import apply, fold
from tests.support.story import created, ended, evidence, launched, measured, proposed
from trials.outcome import Infeasible

REASONS = {
    "never": lambda knobs, fields: "recompute" in knobs,
    "compiled": lambda knobs, fields: "recompute" in knobs and knobs.get("compile") == "block",
    "its own autocast": lambda knobs, fields: (
        "precision" in knobs and knobs.get("training_arguments", {}).get("bf16", False)
    ),
    "wrapped by an option": lambda knobs, fields: "precision" in knobs and fields["wrap"] == "fsdp",
    "accumulates": lambda knobs, fields: "ddp_static_graph" in knobs and fields["micro_batch_size"] < 8,
    "iterable": lambda knobs, fields: knobs.get("num_workers", 0) > 1,
}
"""Of six programs, whether they refuse a knob: for what they are, for another knob, for the command."""
AT_FAULT = dict(
    zip(REASONS, ("recompute", "recompute", "precision", "precision", "ddp_static_graph", "num_workers"), strict=True)
)
WAYS_TO_START = 2 * 2 * 2
"""Of the program, as far as a knob may be refused for one: `wrap`, `bf16`, `compile`."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusals")
    (folder / "train.py").write_text("import sys; sys.argv\n")
    run = [sys.executable, "train.py", "--batch", "{micro_batch_size}", "--wrap", "{wrap}"]
    content = {
        "name": "refusals",
        "workload": {"recipe": "custom", "run": run, "global_batch_size": 8, "launcher": "own"},
        "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 1},
        "baseline": {"micro_batch_size": 2, "own": {"wrap": "ddp"}},
        "space": {
            "micro_batch_size": [2, 4, 8],
            "own": {"wrap": {"values": ["ddp", "fsdp"]}},
            "inside": {
                "num_workers": [0, 1, 2, 4],
                "precision": ["O0", "O1"],
                "recompute": ["none", "full"],
                "compile": ["off", "block"],
                "ddp_static_graph": ["as_is", True],
                "training_arguments": {"bf16": ["as_is", True]},
            },
        },
    }
    (folder / "sweep.yaml").write_text(yaml.safe_dump(content))
    return load_sweep(folder / "sweep.yaml")


@pytest.mark.parametrize("program", REASONS)
def test_omitted_candidates_are_those_that_the_program_refuses(spec, program):
    candidates = list(make_space(spec.choices, spec.to_workload().model, spec.custom_knobs))
    assert len(candidates) == 3 * 2 * 4 * 2 * 2 * 2 * 2 * 2

    def is_refused(candidate):
        fields = {"micro_batch_size": candidate.micro_batch_size, **{one.name: one.value for one in candidate.own}}
        return REASONS[program](knobs_set(candidate, spec.script.inside), fields)

    search = Search(candidates, features=flat_params, sampler="grid", inside=spec.script.inside)
    state = fold([created(budget=Budget(max_trials=len(candidates)))])
    while (suggestion := search.suggest(len(state.trials), state)) is not None:
        number, wrong = len(state.trials), is_refused(suggestion.candidate)
        refusal = Infeasible(evidence=evidence("not applied"), refused=(AT_FAULT[program],))
        outcome = ended(number, refusal if wrong else measured())
        state = functools.reduce(apply, [proposed(number, suggestion.candidate), launched(number), outcome], state)
        state = functools.reduce(apply, search.newly_pruned(state), state)
    tried = [trial.candidate for trial in state.trials]
    left_out = set(candidates) - set(tried)
    assert left_out == {candidate for candidate in candidates if is_refused(candidate)} - set(tried)
    refused = [trial for trial in state.trials if trial.status == "infeasible"]
    assert left_out and len(refused) <= WAYS_TO_START * (2 if program == "accumulates" else 1)
    assert sum(sum(event.rules.values()) for event in state.pruned) == len(left_out)
    assert {event.witness for event in state.pruned} == {trial.number for trial in refused}
