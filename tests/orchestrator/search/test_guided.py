"""The guided sampler on a sweep: a known machine that differs from the cost model's prior."""

import functools
from itertools import product

import numpy as np
import pytest

from cluster.cost.cost_model import Calibrated, CostModel, inputs_of
from cluster.cost.inputs import load_prior
from cluster.hardware.topology import describe_topology, uniform_topology
from orchestrator.search import predictor
from orchestrator.search.predictor import Predictor, UnpredictableError, make_predictor
from orchestrator.search.search import GuidedSearch, Search
from orchestrator.space.notation import flat_params
from orchestrator.space.rules import check
from orchestrator.sweep.events import Budget
from orchestrator.sweep.fold import fold
from tests.support.story import created, ended, failures, launched, measured, proposed, ruled_out
from trials.health import DeviceMemory
from trials.spec import Candidate, Layout, LlamaModel, Loader, Precision, Recompute, TextData, Workload

MODEL = LlamaModel(
    hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_hidden_size=11008, vocab_size=32000
)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=4096, global_batch_size=64)
TOPOLOGY = uniform_topology(2, 8, device_name="A100-80GB", memory_bytes=80 * 10**9)
CLUSTER = describe_topology(TOPOLOGY)


def candidates():
    found = []
    for pp, tp, zero, size, full, workers in product((1, 2, 4), (1, 2, 4), (0, 1, 3), (1, 2, 4), (0, 1), (0, 4)):
        dp = 16 // (pp * tp)
        layers = ((32 // pp,) * pp,)
        candidate = Candidate(
            layout=Layout(
                pp=pp,
                tp=tp,
                dp_shard=dp if zero else 1,
                dp_replicate=1 if zero else dp,
                zero_stage=zero,
                sequence_parallel=tp > 1,
                tp_engine="local" if tp > 1 else "dtensor",
                stage_layers=layers if pp > 1 else (),
            ),
            micro_batch_size=size,
            recompute=Recompute(full=layers) if full else Recompute(),
            precision=Precision(level="O1", dtype="bfloat16"),
            loader=Loader(num_workers=workers, prefetch_factor=2 if workers else 0),
        )
        if not check(candidate, WORKLOAD, TOPOLOGY):
            found.append(candidate)
    return found


CANDIDATES = candidates()


@functools.cache
def truth():
    """Step times and peaks of a machine one deviation off the prior, slower by 5% without workers."""
    rng = np.random.default_rng(5)
    parts = []
    for kind in ("time", "memory"):
        prior = load_prior(kind)
        moved = prior.mean + np.linalg.cholesky(prior.covariance) @ rng.standard_normal(len(prior.mean))
        parts.append(Calibrated.of_prior(type(prior)(prior.group, moved, prior.covariance, prior.noise)))
    found = CostModel(*parts).estimate(inputs_of([(WORKLOAD, c) for c in CANDIDATES], CLUSTER))
    times = found.step_s * np.array([1.0 if c.loader.num_workers else 1.05 for c in CANDIDATES])
    return dict(zip(CANDIDATES, zip(times.tolist(), found.peak_bytes.tolist(), strict=True), strict=True))


def outcome_of(candidate):
    step_s, peak = truth()[candidate]
    if peak > CLUSTER.accelerator.usable_memory_bytes:
        return failures()["oom"]
    return measured(step_s, world_size=16, tokens_per_step=WORKLOAD.tokens_per_step, peak_reserved_bytes=(int(peak),))


def make_search(sampler="guided", **options):
    guide = GuidedSearch(Predictor(WORKLOAD, CANDIDATES, CLUSTER, features=flat_params))
    return Search(CANDIDATES, features=flat_params, sampler=sampler, guide=guide, **options)


BASELINE = next(c for c in CANDIDATES if c.layout.pp == 4 and c.recompute.full and c.micro_batch_size == 1)


def start():
    return [
        created(workload=WORKLOAD, budget=Budget(max_trials=40)),
        proposed(0, BASELINE),
        launched(0),
        ended(0, outcome_of(BASELINE)),
    ]


def run(search, num_trials, events=None):
    events = list(events or start())
    while len(fold(events).trials) < num_trials and not search.is_converged(fold(events)):
        number = len(fold(events).trials)
        events += search.newly_pruned(fold(events))
        suggestion = search.suggest(number, fold(events))
        if suggestion is None:
            break
        events += [proposed(number, suggestion.candidate), launched(number)]
        events.append(ended(number, outcome_of(suggestion.candidate)))
    return fold(events), events


def fitting():
    return [step_s for step_s, peak in truth().values() if peak <= CLUSTER.accelerator.usable_memory_bytes]


def test_the_machine_is_a_challenge():
    assert len(CANDIDATES) > 100
    assert 0.2 < len(fitting()) / len(CANDIDATES) < 0.9


def test_the_best_is_found_within_few_trials_and_few_run_out_of_memory():
    state, _ = run(make_search(), 12)
    assert state.best.measurement.step_time_s <= 1.02 * min(fitting())
    assert [trial.status for trial in state.trials].count("oom") <= 4


def reserved(taken):
    """As in a measurement with figures of the allocator only."""
    return {"peak_reserved_bytes": (taken,)}


def kept(taken):
    """As on a device whose allocator has kept all there is, whatever the candidate needed."""
    outside, total = 2 << 30, int(CLUSTER.accelerator.usable_memory_bytes)
    return {
        "peak_allocated_bytes": (taken - outside,),
        "peak_reserved_bytes": (total - outside,),
        "device_memory": DeviceMemory(total_bytes=total, outside_bytes=outside),
    }


@pytest.mark.parametrize("peak", [reserved, kept])
def test_memory_predictions_learn_from_measurements(peak):
    """Where every trial takes half as much again as the cost model predicts, later predictions follow."""
    estimates = Predictor(WORKLOAD, CANDIDATES, CLUSTER, features=flat_params).estimates.peak_bytes
    peaks = dict(zip(CANDIDATES, estimates.tolist(), strict=True))

    def taking(candidate, number):
        changes = {"world_size": 16, **peak(int(1.5 * peaks[candidate]))}
        return ended(number, measured(truth()[candidate][0], tokens_per_step=WORKLOAD.tokens_per_step, **changes))

    events, search = [*start()[:-1], taking(BASELINE, 0)], make_search()
    for number in range(1, 6):
        suggestion = search.suggest(number, fold(events))
        ratio = suggestion.expected.peak_bytes / peaks[suggestion.candidate]
        events += [proposed(number, suggestion.candidate), launched(number), taking(suggestion.candidate, number)]
    assert 1.4 < ratio < 1.55


def test_every_candidate_is_proposed_once_or_ruled_out_by_a_witness():
    few = CANDIDATES[::3]
    guide = GuidedSearch(Predictor(WORKLOAD, [*few, BASELINE], CLUSTER, features=flat_params))
    search = Search(few, features=flat_params, sampler="guided", guide=guide)
    state, _ = run(search, len(CANDIDATES))
    tried = [trial.candidate for trial in state.trials[1:]]
    assert len(tried) == len(set(tried))
    why = ruled_out(few, state)
    assert set(few) - {BASELINE} == set(tried) | (set(why) - set(tried) - {BASELINE})
    assert sum(sum(event.rules.values()) for event in state.pruned) == len(
        set(why) - {t.candidate for t in state.trials}
    )
    for candidate, rule_id in why.items():
        assert isinstance(outcome_of(candidate), type(failures()["oom"])), "nothing that fits is ruled out"
        assert rule_id.startswith("oom-")
    assert {event.witness for event in state.pruned} == {t.number for t in state.trials if t.status == "oom"}


def test_a_restarted_search_proposes_the_same():
    whole, events = run(make_search(), 9)
    cut = next(i for i, event in enumerate(events) if event.kind == "trial_proposed" and event.trial == 5)
    resumed, _ = run(make_search(), 9, events[:cut])
    assert [t.candidate for t in resumed.trials] == [t.candidate for t in whole.trials]
    assert [t.reason for t in resumed.trials[5:]] == [t.reason for t in whole.trials[5:]]


def test_concurrent_trials_are_all_different_and_faults_are_not_tried_again():
    search, events = make_search(), start()
    for number in range(1, 6):
        suggestion = search.suggest(number, fold(events))
        events += [proposed(number, suggestion.candidate), launched(number)]
    events.append(ended(2, failures()["crashed"]))
    events.append(ended(3, failures()["diverged"]))
    last = search.suggest(6, fold(events)).candidate
    tried = [trial.candidate for trial in fold(events).trials]
    assert len({*tried, last}) == 7


def test_it_stops_by_itself_only_if_configured():
    state, _ = run(make_search(stop_when_converged=True), len(CANDIDATES))
    assert 4 <= len(state.trials) < len(CANDIDATES) / 2
    assert state.best.measurement.step_time_s <= 1.03 * min(fitting())
    assert not make_search().is_converged(state)


@pytest.mark.exhaustive
def test_other_samplers_leave_out_what_an_out_of_memory_outcome_rules_out():
    big = next(c for c in CANDIDATES if isinstance(outcome_of(c), type(failures()["oom"])) and c.micro_batch_size == 1)
    events = [*start(), proposed(1, big), launched(1), ended(1, failures()["oom"])]
    search = make_search("grid")
    pruned = set(ruled_out(CANDIDATES, fold(events)))
    assert any(candidate.micro_batch_size > 1 for candidate in pruned)
    state, _ = run(search, len(CANDIDATES) + 5, events)
    assert not pruned & {trial.candidate for trial in state.trials[2:]}


def test_reasons_contain_the_expectation():
    suggestion = make_search().suggest(1, fold(start()))
    assert "tokens/s/p expected" in suggestion.reason


@pytest.mark.parametrize("case", ["device", "unknown hardware", "too many"])
def test_the_cost_model_rejects_what_it_cannot_predict(case, monkeypatch):
    topology = TOPOLOGY
    if case == "device":
        topology = uniform_topology(1, 8, device_name="Abacus 9", memory_bytes=10**9)
    if case == "unknown hardware":
        topology = None
    if case == "too many":
        monkeypatch.setattr(predictor, "MAX_CANDIDATES", 10)
    with pytest.raises(UnpredictableError, match=r"Abacus|hardware is unknown|too many"):
        make_predictor(WORKLOAD, tuple(CANDIDATES), topology)


def test_without_a_guide_the_guided_sampler_is_tpe():
    alone = Search(CANDIDATES, features=flat_params, sampler="guided", seed=4)
    tpe = Search(CANDIDATES, features=flat_params, sampler="tpe", seed=4)
    assert alone.suggest(1, fold(start())) == tpe.suggest(1, fold(start()))
