"""Probes of real ranks, and the line through their message times."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import ROOT
from trials import probe
from trials.files import from_json
from trials.probe import neighbours_of
from trials.reports import Link, MessageTime, RankRates, fit_line, probe_spec

SIZES = probe_spec("cuda").message_bytes


def line(latency_s, s_per_byte, sizes=SIZES):
    return tuple(MessageTime(num_bytes=n, time_s=latency_s + n * s_per_byte) for n in sizes)


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-7))
def test_latency_and_bandwidth_are_found_again(latency_s, s_per_byte):
    assert fit_line(line(latency_s, s_per_byte)) == pytest.approx((latency_s, s_per_byte), rel=1e-3)


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=len(SIZES)))
def test_latency_and_bandwidth_are_positive_for_any_times(times_s):
    times = tuple(MessageTime(num_bytes=n, time_s=t) for n, t in zip(SIZES, times_s, strict=False))
    assert min(fit_line(times)) > 0


def test_the_bus_bandwidth_of_an_all_reduce_is_that_of_the_links_of_a_rank():
    """Eight ranks in a ring send 7/4 of the message each, so a message of 8e9 bytes moves 14e9."""
    link = Link(world_size=8, times=line(1e-5, 1 / 8e9))
    assert link.bus_bytes_per_s == pytest.approx(14e9, rel=1e-3)


@pytest.mark.parametrize(("per_node", "num_nodes"), [(1, 2), (1, 3), (2, 4), (3, 7), (8, 6)])
def test_neighbours_are_mutual_and_on_other_nodes(per_node, num_nodes):
    ranks = range(per_node * num_nodes)
    for which in (0, 1):
        peers = {rank: neighbours_of(rank, per_node, num_nodes)[which] for rank in ranks}
        met = {rank: peer for rank, peer in peers.items() if peer is not None}
        assert all(met[peer] == rank and peer // per_node != rank // per_node for rank, peer in met.items())
        assert len(met) >= per_node * (num_nodes - num_nodes % 2)
    assert all(any(peer is not None for peer in neighbours_of(rank, per_node, num_nodes)) for rank in ranks)


def test_a_named_device_is_the_only_one_probed(monkeypatch):
    looks = []
    monkeypatch.setattr(probe, "installed_kind", lambda: looks.append(1) or "cpu")
    monkeypatch.setattr(sys, "argv", ["worker", "--device", "toaster"])
    with pytest.raises(SystemExit):
        probe.main()
    assert not looks


@pytest.mark.exhaustive
@pytest.mark.slow
def test_plain_torchrun(tmp_path):
    out = tmp_path / "rates.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "trials.probe", "--device", "cpu", "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    ranks = [from_json(RankRates, rank) for rank in json.loads(out.read_text())]
    assert [rank.rank for rank in ranks] == [0, 1]
    for rank in ranks:
        assert {"float32", "bfloat16", "float16"} == set(rank.matmul_flops_per_s)
        assert all(1e6 < rate.per_s < 1e13 for rate in rank.matmul_flops_per_s.values())
        assert 1e7 < rank.copy_bytes_per_s["device"].per_s < 1e12
        assert rank.node_all_reduce.world_size == 2
        assert rank.network_all_reduce is None
    assert ranks[0].node_all_reduce == ranks[1].node_all_reduce, "all ranks tell the slowest one's time"
