"""Sweeps on a thousand simulated nodes of which some are slow, some go away, and gangs fail: the winner stays right."""

from __future__ import annotations

import functools
import shutil
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cluster.base import ClusterLostError, Deadlines, GangLaunch
from cluster.hardware.topology import describe_topology, uniform_topology
from cluster.virtual import Behaviour, Course, ModelledCost, SimulatedCluster, trial_spec
from orchestrator.controller import runtime
from orchestrator.controller.runtime import MAX_LOST_IN_A_ROW, Runtime, TrialLauncher
from orchestrator.controller.step import Recovered
from orchestrator.search.predictor import Predictor
from orchestrator.search.search import GuidedSearch, Search
from orchestrator.space.notation import flat_params
from orchestrator.sweep.events import Budget
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import DiskFullError, Ledger, LedgerGoneError
from tests.support.story import created, ruled_out
from tests.support.virtual_sweeps import Quiet
from trials.files import to_json
from trials.outcome import Evidence, GangLost
from trials.spec import Candidate, Layout, LlamaModel, Precision, Protocol, Recompute, TextData, TrialSpec, Workload

NUM_NODES = 1000
TOPOLOGY = uniform_topology(NUM_NODES, 8, device_name="A100-40GB", memory_bytes=40 * 10**9)
CLUSTER = describe_topology(TOPOLOGY)
MODEL = LlamaModel(
    hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=32, ffn_hidden_size=11008, vocab_size=32000
)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=4096, global_batch_size=1024)
NUM_STEPS = 8
COST = ModelledCost(CLUSTER, deviation=1.0, seed=1)


def make(dp, tp, size, full):
    return Candidate(
        layout=Layout(dp_shard=dp, tp=tp, zero_stage=3, sequence_parallel=tp > 1),
        micro_batch_size=size,
        recompute=Recompute(full=((32,),)) if full else Recompute(),
        precision=Precision(level="O1", dtype="bfloat16"),
    )


CANDIDATES = tuple(make(*knobs) for knobs in product((32, 128, 256), (1, 2), (1, 2, 4), (False, True)))


def spec_of(candidate):
    return TrialSpec(workload=WORKLOAD, candidate=candidate, protocol=Protocol(num_steps=NUM_STEPS), device="cuda")


@functools.cache
def truth(candidate):
    """Device-seconds per step on healthy nodes; infinite where it does not fit."""
    cost = COST(spec_of(candidate))
    fits = cost.peak_bytes <= TOPOLOGY.nodes[0].device_memory_bytes
    return cost.step_time_s * candidate.layout.world_size if fits else float("inf")


@functools.cache
def predictor():
    return Predictor(WORKLOAD, CANDIDATES, CLUSTER, features=flat_params)


def build(trial, attempt_id, token, placement):
    return GangLaunch(
        attempt_id=attempt_id,
        token=token,
        runner="trials.worker:run",
        spec=to_json(spec_of(trial.candidate)),
        placement=placement,
        deadlines=Deadlines(starting_s=600.0, warmup_s=1e5, measuring_s=1e5, stall_s=1e4),
    )


def run(behaviour, sampler, seed, folder, *, kind=SimulatedCluster, max_concurrent=16, **budget):
    guide = GuidedSearch(predictor())
    search = Search(CANDIDATES, features=flat_params, sampler=sampler, seed=seed, guide=guide)
    cluster = kind(TOPOLOGY, COST, behaviour=behaviour, seed=seed)
    with Ledger(folder) as ledger, cluster:
        allowed = Budget(consecutive_failures=len(CANDIDATES), **budget)
        ledger.append(created(workload=WORKLOAD, budget=allowed, max_concurrent=max_concurrent))
        lost = GangLost(evidence=Evidence(message=""), cause="controller")
        return Runtime(
            ledger=ledger,
            cluster=cluster,
            search=search,
            launcher=TrialLauncher(
                baseline=make(32, 2, 1, True),
                isolation="node",
                build=build,
                recover=lambda trial: Recovered(outcome=lost, device_seconds=0.0),
            ),
            projections=[Nowhere()],
            observer=Quiet(),
            clock=cluster.clock,
        ).run()


class Nowhere:
    def sync(self, ledger, state):
        return 0


nodes = st.one_of(st.integers(0, 80), st.integers(NUM_NODES - 80, NUM_NODES - 1)).map("node{:04d}".format)
behaviours = st.builds(
    Behaviour,
    noise=st.sampled_from([0.0, 0.02]),
    slow_nodes=st.dictionaries(nodes, st.floats(1.1, 3.0), max_size=40),
    node_losses=st.dictionaries(nodes, st.floats(1.0, 2000.0), max_size=4),
    probabilities=st.fixed_dictionaries(
        {"crash": st.floats(0, 0.15), "hang": st.floats(0, 0.1), "start_hang": st.floats(0, 0.05)}
    ),
)


@pytest.mark.exhaustive
@settings(max_examples=6)
@example(Behaviour(), "random", 0)  # larger micro-batches that do not fit come before smaller ones that do
@given(behaviours, st.sampled_from(["guided", "grid", "random"]), st.integers(0, 9))
def test_the_winner_is_right_despite_node_faults(behaviour, sampler, seed):
    with TemporaryDirectory() as folder:
        state = run(behaviour, sampler, seed, Path(folder))
    assert state.status == "finished" or "same error" in state.finish_reason
    if state.status == "failed":  # by chance the first three crashed alike
        return
    tried = [trial.candidate for trial in state.trials]
    without_trial = set(ruled_out(CANDIDATES, state)) - set(tried)
    assert len(tried) == len(set(tried))
    assert set(tried) | without_trial == set(CANDIDATES)
    assert all(truth(candidate) == float("inf") for candidate in without_trial)
    for trial in state.trials:
        assert trial.status != "gang_lost" or trial.num_lost == state.sweep.budget.lost_attempts_per_trial
        assert (trial.status == "oom") <= (truth(trial.candidate) == float("inf"))
        for attempt in trial.attempts:
            gone = {node for node, at_s in behaviour.node_losses.items() if at_s <= attempt.launched_at_s}
            assert gone.isdisjoint(device.node for device in attempt.ranks)
    on_healthy_nodes = [
        truth(trial.candidate)
        for trial in state.trials
        if trial.measurement and not behaviour.slow_nodes.keys() & {d.node for d in trial.attempts[-1].ranks}
    ]
    if on_healthy_nodes:
        # Slow nodes only ever hide a candidate's speed, so nothing measured without them may be faster than the winner.
        allowance = 1 + 4 * behaviour.noise
        assert truth(state.best.candidate) <= allowance * min(on_healthy_nodes)


def test_the_candidates_differ_enough_in_speed():
    fitting = [truth(candidate) for candidate in CANDIDATES if truth(candidate) < float("inf")]
    assert len(CANDIDATES) / 3 < len(fitting) < len(CANDIDATES)
    assert max(fitting) > 1.5 * min(fitting)


class LosingSome(SimulatedCluster):
    """Loses every gang whose candidate :attr:`loses` names; :attr:`is_hang`: with all ranks in one operation."""

    loses = staticmethod(lambda candidate: candidate.micro_batch_size == 2)
    is_hang = True
    cause = "infrastructure"

    def _course(self, launch):
        course = super()._course(launch)
        if not self.loses(trial_spec(launch).candidate):
            return course
        lost = GangLost(evidence=Evidence(message="all wait"), is_hang=self.is_hang, cause=self.cause)
        return Course(moments=(), end_at_s=600.0, outcome=lost)


def test_candidates_that_always_hang_do_not_indicate_a_broken_cluster(tmp_path):
    """Several in a row, three times each, on a cluster that measures all others."""
    state = run(Behaviour(), "grid", 0, tmp_path, kind=LosingSome, max_concurrent=1)
    assert state.status == "finished"
    ends = [trial.status for trial in state.trials]
    lost = [trial for trial in state.trials if trial.status == "gang_lost"]
    assert {trial.candidate.micro_batch_size for trial in lost} == {2}
    assert {len(trial.attempts) for trial in lost} == {state.sweep.budget.lost_attempts_per_trial}
    assert any(one == other == "gang_lost" for one, other in pairwise(ends)), "two in a row: six lost attempts"
    assert state.best is not None


@pytest.mark.parametrize(
    ("cluster", "num_trials"),
    [
        (type("LosingAll", (LosingSome,), {"loses": staticmethod(lambda _: True)}), MAX_LOST_IN_A_ROW),
        (type("BreakingSome", (LosingSome,), {"loses": staticmethod(lambda _: True), "is_hang": False}), 2),
    ],
)
def test_a_cluster_that_loses_trial_after_trial_is_broken(tmp_path, cluster, num_trials):
    with pytest.raises(ClusterLostError, match="5 attempts in a row were lost"):
        run(Behaviour(), "grid", 0, tmp_path, kind=cluster, max_concurrent=1)
    with Ledger(tmp_path) as ledger:
        state = fold(ledger.events())
    assert sum(bool(trial.attempts) for trial in state.trials) == num_trials


class KillingSome(LosingSome):
    """A rank of the baseline is killed once; those of one kind of candidate are every time."""

    is_hang = False
    cause = "killed"
    baseline_is_due = True

    def loses(self, candidate):
        is_baseline, self.baseline_is_due = self.baseline_is_due, False
        return is_baseline or candidate.micro_batch_size == 4


def test_a_killed_trial_is_launched_again_and_crashes_if_always_killed(tmp_path):
    state = run(Behaviour(), "grid", 0, tmp_path, kind=KillingSome, max_concurrent=1, max_trials=7)
    assert [attempt.outcome.kind for attempt in state.trials[0].attempts] == ["gang_lost", "measured"]
    killed = [trial for trial in state.trials[1:] if trial.candidate.micro_batch_size == 4]
    limit = state.sweep.budget.lost_attempts_per_trial
    assert killed and {(trial.status, len(trial.attempts)) for trial in killed} == {("crashed", limit)}
    assert not state.strikes


def small_run(folder, cluster=SimulatedCluster):
    return run(Behaviour(), "grid", 0, folder, kind=cluster, max_concurrent=2, max_trials=5)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_ledger_that_is_deleted_ends_the_sweep(tmp_path, is_replaced):
    class DeletesHome(SimulatedCluster):
        num_launched = 0

        def _course(self, launch):
            self.num_launched += 1
            if self.num_launched == 3:
                shutil.rmtree(tmp_path / "sweep")
                if is_replaced:
                    Ledger(tmp_path / "sweep").close()
            return super()._course(launch)

    with pytest.raises(LedgerGoneError, match=r"ledger\.sqlite was deleted or replaced .* no longer saved"):
        small_run(tmp_path / "sweep", DeletesHome)
    assert (tmp_path / "sweep").exists() == is_replaced


def test_a_full_disk_is_waited_out_without_launches_or_losses(tmp_path, monkeypatch):
    undisturbed = small_run(tmp_path / "one")
    full_for = iter([*(False,) * 6, *(True,) * 5])
    monkeypatch.setattr(runtime, "is_disk_full", lambda _: next(full_for, False))
    monkeypatch.setattr(runtime, "SPACE_PAUSE_S", 0.0)
    append, refused = Ledger.append, iter([*(False,) * 20, *(True,) * 4])

    def refusing(ledger, event):
        if next(refused, False):
            raise DiskFullError("no space")
        return append(ledger, event)

    monkeypatch.setattr(Ledger, "append", refusing)
    state = small_run(tmp_path / "two")
    assert [trial.status for trial in state.trials] == [trial.status for trial in undisturbed.trials]
    assert {len(trial.attempts) for trial in state.trials} == {1}


def test_a_disk_that_stays_full_ends_the_sweep(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "is_disk_full", lambda _: True)
    monkeypatch.setattr(runtime, "SPACE_S", 0.0)
    with pytest.raises(DiskFullError, match="Free some space, then resubmit"):
        small_run(tmp_path)
