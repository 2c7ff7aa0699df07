"""Small parts without processes: clocks, JSON lines, discovery, the choice of a backend."""

import socket
import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.base import ClusterError, ClusterRequest, Deadlines
from cluster.connect import connect, describe
from cluster.gang.environment import several_nodes_env
from cluster.gang.messages import CompileTime, Lines, RankClock, RankProgress, StopGang, due_at_s, line, overdue_reason
from cluster.hardware import topology
from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import path_safe
from cluster.ray.backend import interface_of
from trials.files import from_json

DEADLINES = Deadlines(starting_s=10, warmup_s=20, measuring_s=30, stall_s=5)


def test_before_its_first_report_only_the_starting_deadline_counts():
    assert due_at_s(RankClock(entered_at_s=100), DEADLINES) == 110


def test_a_report_starts_the_stall_clock_and_a_new_phase_its_own():
    clock = RankClock(entered_at_s=0)
    clock.advance(RankProgress(phase="warmup", step=1, step_time_s=None), 8.0)
    assert due_at_s(clock, DEADLINES) == 13.0
    assert "no progress for 5 s in phase warmup at step 1" in overdue_reason(clock, DEADLINES)
    for now_s in (12.0, 16.0, 20.0, 24.0):
        clock.advance(RankProgress(phase="warmup", step=2, step_time_s=0.1), now_s)
    assert due_at_s(clock, DEADLINES) == 28.0, "the phase began at 8"
    assert "phase warmup took longer than 20 s" in overdue_reason(clock, DEADLINES)


def test_concurrent_compilations_count_once_and_are_bounded():
    compiling = CompileTime(left_s=10.0)
    assert compiling.passed(0.0, 4.0) == 4.0
    assert compiling.passed(2.0, 6.0) == 2.0, "another rank, half of whose time is counted already"
    assert compiling.passed(6.0, 20.0) == 4.0, "all that was left"
    assert (compiling.passed(20.0, 30.0), compiling.left_s) == (0.0, 0.0)


def test_a_clock_stands_still_while_a_rank_compiles():
    """Neither the deadline of the phase nor that of a sign of life counts it; compiling for ever is a sign no more."""
    compiles = RankProgress(phase="warmup", step=1, step_time_s=None, is_compiling=True)
    own, peers = RankClock(entered_at_s=0.0), RankClock(entered_at_s=0.0)
    for clock in (own, peers):
        clock.advance(RankProgress(phase="warmup", step=0, step_time_s=None), 1.0)
    own.advance(compiles, 2.0)
    for now_s in range(6, 102, 4):
        for clock in (own, peers):
            clock.stand_still(4.0, float(now_s))
        own.advance(compiles, float(now_s))
    assert due_at_s(peers, DEADLINES) == 1.0 + 96.0 + 5.0, "the peer waits for it"
    assert due_at_s(own, DEADLINES) == 98.0 + 5.0
    own.advance(compiles, 110.0, is_sign=False)
    assert due_at_s(own, DEADLINES) == 98.0 + 5.0


@given(st.lists(st.text(), max_size=5), st.integers(1, 7))
def test_lines_survive_any_cut(reasons, size):
    orders = [StopGang(reason=reason, is_cause=True) for reason in reasons]
    data = b"".join(line(order) for order in orders)
    lines, found = Lines(), []
    for start in range(0, len(data), size):
        found += [from_json(StopGang, message) for message in lines.feed(data[start : start + size])]
    assert found == orders


def test_this_host_is_described():
    node = discover_node(device="cpu")
    assert node.num_devices == topology.num_usable_cores()
    assert node.threads_per_device == 1
    assert node.device_memory_bytes * node.num_devices <= topology.usable_memory_bytes()
    assert node.device_name


def test_overrides_win_over_what_is_found():
    node = discover_node(device="cpu", num_devices=1, device_memory_bytes=5, name="x")
    assert (node.name, node.num_devices, node.device_memory_bytes) == ("x", 1, 5)
    assert node.threads_per_device == topology.num_usable_cores()


def test_asking_for_gpus_without_any_names_the_remedy(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ClusterError, match="set device: cpu"):
        describe(ClusterRequest(kind="local", device="cuda"))


def test_describe_starts_nothing_and_returns_available_facts():
    found = describe(ClusterRequest(devices_per_node=3, device="cpu"))
    assert found is not None
    assert found.num_devices == 3
    assert describe(ClusterRequest(address="10.0.0.1:6379")) is None
    with pytest.raises(ClusterError, match="2 nodes"):
        describe(ClusterRequest(kind="local", min_nodes=2, max_nodes=2))


def test_an_unreachable_address_is_reported_at_once(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ClusterError, match=f"nothing responds at 127.0.0.1:{port}.*ray start"):
        connect(ClusterRequest(address=f"127.0.0.1:{port}"), workdir=tmp_path)
    with pytest.raises(ClusterError, match="HOST:PORT"):
        connect(ClusterRequest(address="head"), workdir=tmp_path)


def test_names_become_safe_for_paths():
    assert path_safe("../a b/c") == "a-b-c"
    assert path_safe("..") == "node"


def test_the_loopback_interface_has_the_loopback_address():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.1") is None
    assert interface_of("::1") == "lo"
    assert interface_of("2001:db8::1") is None


def test_an_ipv6_address_makes_a_rendezvous_that_torch_reads():
    url = urllib.parse.urlparse(several_nodes_env("fd00::1", 20000)["TUNE_CLUSTER_RENDEZVOUS"])
    assert (url.hostname, url.port) == ("fd00::1", 20000)
