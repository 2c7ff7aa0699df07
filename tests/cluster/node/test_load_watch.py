"""Load by others on a gang's node: processes of this host as the kernel counts them, GPUs as nvidia-smi prints them."""

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from cluster.hardware.topology import DeviceHandle
from cluster.node import load_watch
from cluster.node.load_watch import LoadWatch, most_used, parse_samples, with_devices
from trials.reports import FOREIGN_CPU_LIMIT, Disturbance, most_disturbed

BURN = "import sys, time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass"
CLOCKS = """\
0, GPU-1f6b2a54-7a1e-ea31-9c5d-6c2f2b1f0a01, 0x0000000000000004, 1755, 1980, 61, 9000, 97, 410.25
1, GPU-5d0c9b12-03c7-51ab-8f0e-9a7be3d4c102, 0x0000000000000040, 1245, 1980, 88, 20, 3, 95.50
2, GPU-aa11bb22-3344-5566-7788-99aabbccdd03, [Not Supported], [N/A], [N/A], 45, [N/A], [N/A], [N/A]
0, GPU-1f6b2a54-7a1e-ea31-9c5d-6c2f2b1f0a01, 0x0000000000000004, 1740, 1980, 63, 12000, 99, 415.75
1, GPU-5d0c9b12-03c7-51ab-8f0e-9a7be3d4c102, 0x00000000000"""
"""What ``nvidia-smi -l`` has written when it is killed: two GPUs with figures, one without, the last line cut off."""


def called(*names):
    return [DeviceHandle(name=name) for name in names]


@pytest.fixture
def burner():
    """A process that keeps one processor busy and is not the sweep's: it descends from this one by no parent."""
    popen = f"subprocess.Popen([sys.executable, '-c', {BURN!r}], stdout=subprocess.DEVNULL)"
    script = f"import subprocess, sys\nprint({popen}.pid, flush=True)"
    started = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, check=True)
    return int(started.stdout)


def test_what_descends_from_the_owner_is_no_foreign_load():
    """However busy the host is: from the first process all others descend but the kernel's own threads."""
    before = load_watch.look()
    time.sleep(load_watch.MIN_WINDOW_S)
    after = load_watch.look()
    found = load_watch.disturbance("n", before, after, owner=1)
    assert found.foreign_cpu is not None and found.foreign_cpu < 2 * FOREIGN_CPU_LIMIT
    kernel = {one.name for one in after.processes.values() if one.parent_pid == 2}
    assert {name.rpartition(" ")[0] for name in found.foreign_processes} <= kernel


def test_a_busy_process_of_somebody_else_is_found_and_named(burner):
    before = load_watch.look()
    end_s = time.monotonic() + load_watch.MIN_WINDOW_S
    while time.monotonic() < end_s:  # our own load, beside it
        pass
    after = load_watch.look()
    own = load_watch.family(after.processes, os.getpid())
    assert os.getpid() in own and burner not in own
    burnt_s = (after.processes[burner].own_ticks - before.processes[burner].own_ticks) / os.sysconf("SC_CLK_TCK")
    found = load_watch.disturbance("n", before, after, owner=os.getpid())
    assert found.foreign_cpu is not None
    assert found.foreign_cpu >= 0.9 * burnt_s / found.seconds / after.num_cpus - 0.02
    assert found.foreign_cpu <= 1 - 0.9 * _burnt_here(before, after) / found.seconds / after.num_cpus
    assert found.is_disturbing == (found.foreign_cpu >= FOREIGN_CPU_LIMIT)


def _burnt_here(before, after):
    pid = os.getpid()
    return (after.processes[pid].own_ticks - before.processes[pid].own_ticks) / os.sysconf("SC_CLK_TCK")


def test_a_window_too_short_to_count_in_says_nothing(tmp_path):
    watch = LoadWatch("n", (), tmp_path)
    watch.end()
    assert watch.found is None, "it never measured"
    watch.enter("measuring")
    watch.end()
    assert watch.found is not None
    assert (watch.found.foreign_cpu, watch.found.is_disturbing) == (None, False)


def test_throttling_clocks_and_heat_are_read_from_what_nvidia_smi_prints():
    assert [one.throttle_mask for one in parse_samples(CLOCKS)] == [4, 64, None, 4]
    quiet = with_devices(Disturbance(node="n", seconds=9.0), CLOCKS, "", called("0", "2"), ())
    assert (quiet.throttled_by, quiet.highest_temperature_c, quiet.is_disturbing) == ((), 63.0, False)
    assert quiet.lowest_clock == pytest.approx(1740 / 1980), "a power cap lowers it, and is normal"
    hot = with_devices(Disturbance(node="n", seconds=9.0), CLOCKS, "", called("GPU-5d0c"), ())
    assert (hot.throttled_by, hot.highest_temperature_c, hot.is_disturbing) == (("hw_thermal",), 88.0, True)
    nothing = with_devices(Disturbance(node="n", seconds=9.0), "", "", called("0"), ())
    assert nothing == Disturbance(node="n", seconds=9.0), "nvidia-smi said nothing: unknown, and no error"


def test_usage_of_a_busy_node_is_sampled_and_halved_when_full(monkeypatch):
    monkeypatch.setattr(load_watch, "USAGE_PERIOD_S", 0.05)
    monkeypatch.setattr(load_watch, "MAX_USAGE", 8)
    watch = load_watch.UsageWatch()
    end_s = time.monotonic() + 1.0
    while time.monotonic() < end_s:
        watch.sample()
    cpu, memory = watch.usage()
    assert (cpu.kind, memory.kind) == ("cpu_percent", "memory_bytes")
    assert 0.1 <= cpu.period_s <= 0.4 and 4 <= len(cpu.values) < 8
    assert 80 / len(os.sched_getaffinity(0)) <= cpu.mean <= 100, "this process alone keeps one processor busy"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert all(0 < value < total for value in memory.values)


def test_usage_of_the_gangs_devices_is_read_from_what_nvidia_smi_prints():
    found = {(one.kind, one.device): one.values for one in load_watch.device_usage(parse_samples(CLOCKS), called("0"))}
    assert found == {
        ("device_percent", "0"): (97.0, 99.0),
        ("device_memory_bytes", "0"): (9000 << 20, 12000 << 20),
        ("device_power_w", "0"): (410.25, 415.75),
    }
    assert load_watch.device_usage(parse_samples(CLOCKS), called("2")) == (), "it reports none"


def test_the_most_memory_in_use_on_devices_is_kept():
    samples = parse_samples(CLOCKS)
    assert (most_used(samples, called("0", "1")), most_used(samples, called("GPU-5d0c"))) == (12000 << 20, 20 << 20)
    assert most_used(samples, called("2")) == 0, "not told"


def test_processes_of_others_on_the_devices_are_told_from_the_gangs_own():
    uuid, mine, other, hidden = CLOCKS.split(", ")[1], os.getpid(), os.getppid(), 4194305
    told = "".join(f"{uuid}, {pid}\n" for pid in (mine, other, hidden, "[N/A]"))
    found = with_devices(Disturbance(node="n", seconds=9.0), CLOCKS, told, called("0"), {mine})
    assert found.foreign_on_devices == (f"pid {other} on GPU 0",), "a pid that means nothing here is nobody's"
    assert not with_devices(Disturbance(node="n", seconds=9.0), CLOCKS, told, called("1"), {mine}).foreign_on_devices


def test_of_a_slice_clocks_and_heat_are_its_gpus_but_not_memory_or_processes():
    """nvidia-smi tells of whole GPUs; in the other slices of one somebody else may compute, as in another machine."""
    uuid = CLOCKS.split("\n")[1].split(", ")[1]
    part = [DeviceHandle(name="MIG-cccc", uuid="MIG-cccc", gpu_uuid=uuid)]
    found = with_devices(Disturbance(node="n", seconds=9.0), CLOCKS, f"{uuid}, {os.getppid()}\n", part, ())
    assert (found.throttled_by, found.highest_temperature_c) == (("hw_thermal",), 88.0)
    assert found.lowest_clock == pytest.approx(1245 / 1980)
    assert not found.foreign_on_devices
    assert most_used(parse_samples(CLOCKS), part) == 0


def test_of_many_nodes_the_most_disturbed_are_kept():
    quiet = [Disturbance(node=f"n{i}", seconds=5.0, foreign_cpu=0.001 * i) for i in range(20)]
    kept = most_disturbed([*quiet, replace(quiet[0], node="busy", steal=0.4)])
    assert len(kept) == 8 and kept[0].node == "busy" and kept[1].node == "n19"
