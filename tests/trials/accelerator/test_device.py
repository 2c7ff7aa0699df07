"""What this build of torch cannot compute on is said with what to do; children that compute nothing see no device."""

import re
import sys

import pytest
import torch

from orchestrator.errors import ConfigError
from orchestrator.planning import dry_runs
from tests.trials.tiny import tiny_spec
from trials.accelerator.device import collectives_of, is_host, kind_of, mark, open_device, seconds_between
from trials.accelerator.kinds import FAMILIES, without_devices
from trials.dryrun.estimate import DryRunRequest
from trials.failure import classify
from trials.spec import Layout


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("cuda", "sees no such device; look at what nvidia-smi says, at CUDA_VISIBLE_DEVICES"),
        ("rocm", f"needs a torch built for ROCm, but this is {re.escape(torch.__version__)}"),
        ("xpu", "sees no such device; look at what xpu-smi says, at ZE_AFFINITY_MASK"),
        ("npu", "needs the package torch_npu, which cannot be imported"),
    ],
)
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device here")
def test_a_device_that_torch_cannot_use_is_the_nodes_fault_and_never_traded_for_cores(kind, words):
    with pytest.raises(RuntimeError, match=words) as caught:
        open_device(kind, 0)
    assert classify(caught.value, kind) == "node_setup"


def test_cores_have_a_clock_of_their_own():
    device = open_device("cpu", 3)
    assert is_host(device) and kind_of(device) == "cpu" and collectives_of(device) == "gloo"
    start = mark(device)
    assert 0 <= seconds_between(start, mark(device)) < 60


def test_every_kind_has_what_the_others_have():
    for family in FAMILIES.values():
        assert family.ray_resource and family.collectives
        assert bool(family.visible_variable) == bool(family.query_tool) == (family.kind != "cpu")


def test_children_that_compute_nothing_see_no_device(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    told = "import os, sys; sys.exit(' '.join(f'{n}={os.environ.get(n)}' for n in sys.argv[1:]))"
    names = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
    told_of = "CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES=-1 ASCEND_RT_VISIBLE_DEVICES="
    monkeypatch.setattr(dry_runs, "python_module", lambda _: [sys.executable, "-c", told, *names])
    with pytest.raises(ConfigError, match=told_of):
        list(dry_runs._batch([DryRunRequest(spec=tiny_spec(Layout()), rank=0)]))
    assert without_devices({"A": "1"})["A"] == "1"
