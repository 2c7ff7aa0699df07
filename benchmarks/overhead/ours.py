"""Our side of the comparison: the real runtime, ledger, search, tracking and Ray cluster, over a runner that does
nothing but form its gang."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.overhead import WORLD_SIZE, clock_ms, temporary_folder
from benchmarks.runner.runners import STAMP
from cluster.base import Cluster, ClusterRequest, GangEnded, GangLaunch
from cluster.connect import connect
from cluster.hardware.topology import Placement, Pool
from orchestrator.controller.runtime import Runtime, TrialLauncher
from orchestrator.search.search import Search
from orchestrator.sweep.events import Budget, Hardware, SweepCreated
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.state import SweepState, Trial
from orchestrator.tracking.mlflow_tracker import Tracker
from trials.outcome import Measured
from trials.spec import Candidate, Kernels, Layout, LlamaModel, Loader, Precision, Recompute, TextData, Workload

RUNNER = "benchmarks.runner.runners:no_op"
MODEL = LlamaModel(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=4, ffn_hidden_size=128)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=64, global_batch_size=64)
LAYOUT = Layout(dp_replicate=WORLD_SIZE)


@contextmanager
def cluster(num_gangs: int = 2) -> Iterator[Cluster]:
    """A private Ray with room for so many gangs, on which a short sweep has imported everything, as the peers' modules
    are."""
    request = ClusterRequest(devices_per_node=num_gangs * WORLD_SIZE)
    with temporary_folder() as folder, connect(request, workdir=Path(folder)) as lease:
        no_op_trial_ms(lease, num_trials=4, slots=1)
        yield lease


def no_op_trial_ms(lease: Cluster, num_trials: int, slots: int) -> float:
    """Wall milliseconds per trial of a whole sweep, from an empty ledger to the last run in MLflow."""
    with temporary_folder() as folder:
        tracker = Tracker(f"sqlite:///{folder}/mlflow.db", "overhead")
        tracker.prepare()
        with Ledger(Path(folder)) as ledger, ledger.hold():
            ledger.append(_created(num_trials, slots, lease))
            runtime = Runtime(
                ledger=ledger,
                cluster=lease,
                search=Search(_candidates(), features=_features, sampler="tpe"),
                launcher=TrialLauncher(
                    baseline=Candidate(layout=LAYOUT), isolation="device", build=_launch, recover=_never
                ),
                projections=[tracker],
                observer=_Nobody(),
            )
            wall_ms = clock_ms(runtime.run, num_trials)
            _check(ledger, num_trials)
    return wall_ms


def gang_start_s(lease: Cluster) -> float:
    """Seconds from dispatch to the first all-reduce of a 2-rank gang."""
    with temporary_folder() as folder:
        stamp = Path(folder) / "stamp"
        placement = Pool(lease.topology).place(world_size=WORLD_SIZE, tp=1, isolation="device")
        assert placement is not None, "the lease holds a gang"
        attempt_id = f"gang-{time.time_ns()}"
        launch = GangLaunch(
            attempt_id=attempt_id, token="t", runner=RUNNER, spec={}, placement=placement, env={STAMP: str(stamp)}
        )
        start = time.time()
        lease.launch(launch)
        while not any(isinstance(event, GangEnded) for event in lease.poll(1.0)):
            pass
        return float(stamp.read_text(encoding="ascii")) - start


def _created(num_trials: int, slots: int, lease: Cluster) -> SweepCreated:
    return SweepCreated(
        at_s=time.time(),
        sweep="overhead",
        spec_hash="0" * 64,
        workload=WORKLOAD,
        budget=Budget(max_trials=num_trials),
        max_concurrent=slots,
        num_legal=len(_candidates()),
        hardware=lease.topology.label,
        devices=Hardware.of(lease.topology),
        cluster_kind="local",
        fingerprint={},
    )


@functools.cache
def _candidates() -> tuple[Candidate, ...]:
    """All combinations of as many knobs as the peers sample, all of them legal: TPE has as much to choose from."""
    layouts = [LAYOUT, replace(LAYOUT, replicate_with="fsdp2")]
    layouts += [Layout(dp_shard=WORLD_SIZE, zero_stage=stage) for stage in (1, 2, 3)]
    precisions = [Precision(), *(Precision(level=level, dtype="bfloat16") for level in ("O1", "O2"))]
    recomputes = [Recompute(), Recompute(full=((1,),)), Recompute(full=((2,),))]
    kernels = [Kernels(), Kernels(compile="block"), Kernels(compile="block", backend="aot_eager")]
    return tuple(
        Candidate(
            layout=layout,
            micro_batch_size=mbs,
            recompute=recompute,
            precision=precision,
            loader=Loader(num_workers=workers, prefetch_factor=prefetch),
            kernels=kernel,
        )
        for layout, mbs, recompute, precision, workers, prefetch, kernel in product(
            layouts, (1, 2, 4), recomputes, precisions, (1, 2, 3), (1, 2, 4), kernels
        )
    )


def _features(candidate: Candidate) -> dict[str, int | str]:
    layout, loader = candidate.layout, candidate.loader
    return {
        "dp_shard": layout.dp_shard,
        "layout": f"{layout.replicate_with} {layout.zero_stage}",
        "micro_batch_size": candidate.micro_batch_size,
        "recompute": sum(map(sum, candidate.recompute.full)),
        "precision": candidate.precision.level,
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor,
        "compile": f"{candidate.kernels.compile} {candidate.kernels.backend}",
    }


def _launch(trial: Trial, attempt_id: str, token: str, placement: Placement) -> GangLaunch:
    return GangLaunch(attempt_id=attempt_id, token=token, runner=RUNNER, spec={"t": trial.number}, placement=placement)


def _never(trial: Trial) -> Any:
    raise AssertionError(f"a fresh sweep left trial {trial.number} behind")


def _check(ledger: Ledger, num_trials: int) -> None:
    state = fold(ledger.events())
    measured = sum(isinstance(trial.outcome, Measured) for trial in state.trials)
    if measured != num_trials or ledger.cursor("mlflow") == 0:
        raise RuntimeError(f"{measured} of {num_trials} trials measured: {state.counts()}")


class _Nobody:
    def on_state(self, state: SweepState) -> None:
        """No observer."""

    def on_lease(self, *_: object) -> None:
        pass

    def on_progress(self, trial: int, progress: Any) -> None:
        """No observer."""
