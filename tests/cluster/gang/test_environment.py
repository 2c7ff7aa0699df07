"""The environment that ranks start in."""

import dataclasses
from pathlib import Path

import pytest

from cluster.base import Deadlines
from cluster.gang.environment import rank_env
from cluster.gang.messages import NodeLaunch, RankSlot

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
SLOT = RankSlot(rank=0, local_rank=0, index=0)


def launch(attempt, runner="trials.worker:run_rank", **env):
    return NodeLaunch(
        attempt_id=attempt,
        token="t",
        runner=runner,
        spec={},
        node="n",
        directory=str(Path("/sweep/attempts") / attempt),
        slots=(SLOT,),
        world_size=1,
        deadlines=Deadlines(),
        env=env,
    )


def caches(attempt, **options):
    found = rank_env(launch(attempt, **options), SLOT)
    return {name: found[name] for name in CACHES if name in found}


def test_compilers_caches_are_the_sweeps(monkeypatch: pytest.MonkeyPatch):
    """Alike for all attempts of a lease on a node, whatever the node's own environment; unless the sweep says where."""
    for name in CACHES:
        monkeypatch.setenv(name, "/home/me/.cache")
    assert (
        caches("a")
        == caches("b")
        == {
            "TORCHINDUCTOR_CACHE_DIR": "/sweep/attempts/cache-n/inductor",
            "TRITON_CACHE_DIR": "/sweep/attempts/cache-n/triton",
        }
    )
    assert caches("a", TRITON_CACHE_DIR="/fast/triton")["TRITON_CACHE_DIR"] == "/fast/triton"
    assert caches("a", runner="trials.script.runner:run_rank") == {}, "its program gets them with its own environment"


def test_what_the_launch_or_a_program_of_the_users_own_says_under_an_older_name_is_not_overridden():
    cuda = dataclasses.replace(launch("a"), device_kind="cuda")
    assert rank_env(cuda, SLOT)["TORCH_NCCL_ENABLE_TIMING"] == "1"
    told = dataclasses.replace(cuda, env={"NCCL_ENABLE_TIMING": "0"})
    assert "TORCH_NCCL_ENABLE_TIMING" not in rank_env(told, SLOT)
    script = {"runner": "trials.script.runner:run_rank", "spec": {"env": [["NCCL_ENABLE_TIMING", "0"]]}}
    assert "TORCH_NCCL_ENABLE_TIMING" not in rank_env(dataclasses.replace(cuda, **script), SLOT)
