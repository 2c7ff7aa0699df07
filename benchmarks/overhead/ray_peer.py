"""The peers of the comparison: Ray Tune with OptunaSearch, and TorchTrainer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.overhead import NUM_KNOBS, WORLD_SIZE, clock_ms, temporary_folder


@contextmanager
def cluster(num_gangs: int = 2) -> Iterator[None]:
    """A private Ray on this host, with as many slots as ours has devices."""
    import ray

    ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=num_gangs * WORLD_SIZE)
    try:
        yield
    finally:
        ray.shutdown()


def no_op_trial_ms(num_trials: int, slots: int, *, reuse: bool) -> float:
    """Wall milliseconds per trial of a Tune run whose trainable only returns a number."""
    from ray import tune
    from ray.tune.search.optuna import OptunaSearch

    space = {f"k{i}": tune.randint(0, 8) for i in range(NUM_KNOBS)}
    with temporary_folder() as folder:
        tuner = tune.Tuner(
            _reusable_trainable() if reuse else _function_trainable,
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="speed",
                mode="max",
                num_samples=num_trials,
                max_concurrent_trials=slots,
                search_alg=OptunaSearch(),
                reuse_actors=reuse,
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        )
        results: list[Any] = []
        wall_ms = clock_ms(lambda: results.extend(tuner.fit()), num_trials)
    if len(results) != num_trials or any(row.error for row in results):
        raise RuntimeError(f"{len(results)} of {num_trials} Tune trials came back")
    return wall_ms


def gang_start_s() -> float:
    """Seconds from ``fit`` to the first all-reduce of a 2-worker TorchTrainer on gloo."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    with temporary_folder() as folder:
        stamp = Path(folder) / "stamp"
        trainer = TorchTrainer(
            _all_reduce_once,
            train_loop_config={"stamp": str(stamp)},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=WORLD_SIZE, use_gpu=False),
            run_config=RunConfig(storage_path=folder),
        )
        start = time.time()
        trainer.fit()
        return float(stamp.read_text(encoding="ascii")) - start


def _function_trainable(config: dict[str, int]) -> dict[str, float]:
    return {"speed": float(config["k0"] + config["k1"])}


def _reusable_trainable() -> Any:
    from ray import tune

    class Reusable(tune.Trainable):  # type: ignore[misc]
        def setup(self, config: dict[str, int]) -> None:
            self.knobs = config

        def step(self) -> dict[str, Any]:
            return {"speed": float(self.knobs["k0"] + self.knobs["k1"]), "done": True}

        def reset_config(self, new_config: dict[str, int]) -> bool:
            self.knobs = new_config
            return True

        def save_checkpoint(self, checkpoint_dir: str) -> None:
            """Nothing to save."""

        def load_checkpoint(self, checkpoint: Any) -> None:
            """Nothing to load."""

    return Reusable


def _all_reduce_once(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist
    from ray import train

    dist.all_reduce(torch.ones(1))
    if train.get_context().get_world_rank() == 0:
        Path(config["stamp"]).write_text(repr(time.time()), encoding="ascii")
