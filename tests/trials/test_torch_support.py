"""Other releases of torch: what is too old is told once in words, what has another name is called by it."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support import ROOT
from trials import torch_support
from trials.accelerator.kinds import without_devices

OLD = "2.9.1"
WORDS = f"torch {OLD} is too old for trials, which need {'.'.join(map(str, torch_support.OLDEST))} or newer"


@pytest.fixture
def run_with_old_torch(tmp_path):
    """Run Python where the packages' index says that torch is old, as ``pip`` would."""
    index = tmp_path / f"torch-{OLD}.dist-info"
    index.mkdir()
    (index / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {OLD}\n", encoding="utf-8")
    env = without_devices(os.environ) | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}

    def run(*arguments):
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, check=False)

    return run


def test_a_rank_says_that_its_torch_is_too_old_before_it_misses_a_name(run_with_old_torch):
    done = run_with_old_torch("-m", "trials.worker", "--spec", "none.json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.strip() == f"error: {WORDS}. {torch_support.REMEDY}"


@pytest.mark.exhaustive
def test_the_benchmark_of_a_machine_says_so_once(run_with_old_torch):
    done = run_with_old_torch("-m", "benchmarks.gpu", "--device", "cpu", "--quick")
    assert (done.returncode, done.stdout, done.stderr.strip()) == (1, "", f"error: {WORDS}")


@pytest.mark.parametrize("name", ["forward_sync_buffers", "broadcast_buffers"])
def test_replicas_keep_their_buffers_whatever_the_argument_is_called(name, monkeypatch):
    replica = type("Replica", (), {})
    exec(f"def __init__(self, module, init_sync=True, {name}=True): pass", scope := {})
    replica.__init__ = scope["__init__"]
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", replica)
    assert torch_support.replicas_keep_buffers() == {"init_sync": False, name: False}
    assert replica(None, **torch_support.replicas_keep_buffers())


def test_one_group_of_parameters_is_found_under_its_former_name(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(2, 2))
        groups = torch_support.parameter_groups(model._get_fsdp_state())
        assert len(groups) == 1
        assert torch_support.parameter_groups(SimpleNamespace(_fsdp_param_group=groups[0])) == groups
        assert torch_support.parameter_groups(SimpleNamespace(_fsdp_param_group=None)) == []
    finally:
        torch.distributed.destroy_process_group()


def test_only_images_need_the_package_that_decodes_them(tmp_path):
    (tmp_path / "PIL.py").write_text("raise ModuleNotFoundError(\"No module named 'PIL'\", name='PIL')")
    code = """
import trials.worker
from trials.datasets import open_images
from trials.spec import ImageFolderData, ResNetModel
open_images(ImageFolderData(), ResNetModel())
"""
    env = without_devices(os.environ) | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "trials.failure.DataError: images are decoded by Pillow, but: No module named 'PIL'" in done.stderr
