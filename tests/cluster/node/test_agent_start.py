"""Agents that cannot start say why, at once, and nobody waits for them."""

import sys
import time

import pytest

from cluster.base import ClusterError, ClusterRequest
from cluster.connect import connect
from cluster.hardware.discovery import discover_node
from cluster.node.agent import Agent
from tests.support import ROOT


def test_a_fork_server_that_cannot_start_ends_with_its_own_words(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ClusterError, match="does not start: ModuleNotFoundError: No module named torch"):
        Agent(node="n", workdir=tmp_path / "work")


WITH_LITTLE_SHARED_MEMORY = """
import pathlib, runpy, sys
import cluster.node.load_watch as host_memory
host_memory.SHARED_MEMORY = pathlib.Path({folder!r})
sys.argv = sys.argv[sys.argv.index("-m") + 1 :]
runpy.run_module("cluster.node.warden", run_name="__main__")
"""


@pytest.mark.parametrize("is_short", [True, False])
def test_an_agent_warns_of_a_small_dev_shm_when_it_starts(tmp_path, monkeypatch, caplog, is_short):
    """Which its fork server looks at, where ranks come from; here in a folder of the test's."""
    text = WITH_LITTLE_SHARED_MEMORY.format(folder=str(tmp_path / "none" if is_short else "/dev"))
    if not is_short:
        text = text.replace("sys.argv =", "host_memory.MIN_SHARED_BYTES = 0\nsys.argv =", 1)
    (tmp_path / "server.py").write_text(text)
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/server.py "$@"\n')
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    agent = Agent(node="n7", workdir=tmp_path / "work", preload=("json",), search_path=sys.path)
    agent.close()
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    warned = [text for text in told if text.startswith("fork server on n7: there is no ") and "--shm-size=8g" in text]
    assert (told != [], warned) == (is_short, told)


@pytest.mark.exhaustive
@pytest.mark.ray
def test_a_lease_whose_agents_cannot_start_ends_at_once(tmp_path):
    """What waits for nodes would otherwise wait for ever: it would be the same tomorrow."""
    name = discover_node().name
    (tmp_path / f"fork-server-{name}.log").mkdir(parents=True)
    told = []
    began_s = time.monotonic()
    with pytest.raises(ClusterError, match=r"the agent does not start .* Is a directory"):
        connect(ClusterRequest(devices_per_node=1), workdir=tmp_path, on_wait=told.append)
    assert time.monotonic() - began_s < 100
