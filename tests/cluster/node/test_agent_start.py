"""Agents that cannot start say why, at once, and nobody waits for them."""

import sys
import time

import pytest

from cluster.base import ClusterError
from cluster.connect import connect
from cluster.hardware.discovery import discover_node
from cluster.node.agent import Agent
from cluster.request import ClusterRequest


def test_a_fork_server_that_cannot_start_ends_with_its_own_words(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(ClusterError, match="does not start: ModuleNotFoundError: No module named torch"):
        Agent(node="n", workdir=tmp_path / "work")


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
