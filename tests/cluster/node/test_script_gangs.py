"""Gangs whose ranks run a user's program: where they meet, what is known of them, how a hang is reported."""

import socket
import sys
from pathlib import Path

import pytest

from cluster.base import Deadlines
from cluster.gang.environment import cache_folder
from cluster.hardware.discovery import discover_node
from cluster.local import LocalCluster
from cluster.node.agent import SCRIPT_PRELOAD
from tests.cluster import scripts
from tests.cluster.gangs import events_until_end, launch, run
from tests.support.disks import fill, small_disk
from trials.outcome import GangLost, Measured, TimedOut

pytestmark = pytest.mark.slow
SLOW_START = Deadlines(starting_s=110.0)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with LocalCluster(tmp_path_factory.mktemp("work"), discover_node(num_devices=4), preload=SCRIPT_PRELOAD) as cluster:
        yield cluster


def measured(cluster, path, **options):
    spec = scripts.spec(path, **options.pop("spec", {}))
    end = run(cluster, scripts.RUNNER, spec=spec, deadlines=Deadlines(starting_s=60.0), **options)
    assert isinstance(end.outcome, Measured), end.outcome
    return end, end.outcome.measurement


def test_ranks_meet_and_unreported_figures_come_from_the_system_or_are_unknown(tmp_path):
    text = scripts.MEETS + scripts.STEPS + "time.sleep(1.5)\ntrain()\n"  # memory is looked at twice a second
    with LocalCluster(tmp_path / "work", discover_node(num_devices=2), preload=SCRIPT_PRELOAD) as cluster:
        end, found = measured(cluster, scripts.write(tmp_path / "own", text))
        cache = cache_folder(Path(end.log_dir).parent, cluster.topology.nodes[0].name)
        cache.mkdir(exist_ok=True)
    assert (found.world_size, len(found.step_times_s), found.step_time_resolution_s) == (2, scripts.NUM_STEPS, 0.001)
    assert found.losses[-1] == pytest.approx(2.6) and found.grad_norms == () and found.mfu is None
    assert 2 << 20 < found.peak_bytes < 1 << 30, "a Python without torch"
    assert found.findings.script.source_of("rss_bytes").source == "system"
    assert not (Path(end.log_dir) / "script").exists()
    assert not cache.exists(), "caches go with the lease"


def test_a_command_that_starts_its_ranks_gets_all_devices_of_its_slot(cluster, tmp_path):
    seen = 'assert os.environ["NPROC_PER_NODE"] == "3" and os.environ["WORLD_SIZE"] == "unset"'
    text = f"import os\nos.environ.setdefault('WORLD_SIZE', 'unset')\n{seen}\n{scripts.STEPS}train()\n"
    options = {"num_devices": 3, "launcher": "own"}
    path = scripts.write(tmp_path / "own", text)
    _, found = measured(cluster, path, world_size=3, options={"one_rank_per_node": True}, spec=options)
    assert (found.world_size, len(found.places)) == (3, 3)


def test_a_port_in_use_is_no_fault_of_the_candidate(cluster, tmp_path):
    text = "import socket\nwith socket.create_server(('127.0.0.1', PORT)): pass\n"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        text = text.replace("PORT", str(taken.getsockname()[1]))
        spec = scripts.spec(scripts.write(tmp_path / "own", text))
        outcome = run(cluster, scripts.RUNNER, spec=spec).outcome
    assert isinstance(outcome, GangLost), outcome
    assert outcome.cause == "infrastructure"
    assert "address already in use" in outcome.evidence.message.lower()


FILLS = """
import os, time
if os.environ["RANK"] != "0":
    time.sleep(600)
with open(os.path.join(os.environ["TUNE_CLUSTER_REPORT"], "fill"), "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        time.sleep(0.5)
"""
"""Rank 0 ends well without any report, on a disk that is full until its folder is removed; the other one waits."""


@pytest.mark.parametrize("is_full_before", [True, False])
def test_a_full_disk_is_no_fault_of_the_candidate(tmp_path, is_full_before):
    with small_disk(tmp_path / "disk") as disk:
        path = scripts.write(tmp_path / "own", FILLS)
        with LocalCluster(disk / "work", discover_node(num_devices=2), preload=SCRIPT_PRELOAD) as cluster:
            filler = fill(disk) if is_full_before else disk / "none"
            full = run(cluster, scripts.RUNNER, spec=scripts.spec(path)).outcome
            filler.unlink(missing_ok=True)
            path.write_text(f"{scripts.STEPS}train()\n")
            again = run(cluster, scripts.RUNNER, spec=scripts.spec(path)).outcome
    assert isinstance(full, GangLost), full
    assert full.cause == "infrastructure" and full.evidence.message.endswith("free disk space on the node")
    assert isinstance(again, Measured), again


ABORTS = """
import os, sys, time
print("CUDA out of memory. Tried to allocate 3.00 GiB. Ignoring this choice.", flush=True)
if os.environ.get("RANK", "1") == "1":
    why = "Process group watchdog thread terminated with exception: CUDA error: uncorrectable ECC error encountered"
    sys.stderr.write(f"[rank1]:[E1103 08:24:03.805 ProcessGroupNCCL.cpp:2068] [PG 0 Rank 1] {why}\\n")
    sys.stderr.flush()
    os.abort()
time.sleep(600)
"""
"""What NCCL's watchdog does to a rank; another one waits for it."""

ABORTS_AS_A_CHILD = f"""
import torch.multiprocessing
def work(number):
    exec({ABORTS!r})
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
"""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
DEEPSPEED = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--no_local_rank")
ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1")


@pytest.mark.parametrize(
    ("head", "program"),
    [
        pytest.param((sys.executable, *TORCHRUN), ABORTS, id="torchrun"),
        pytest.param(("/bin/sh", "-c", 'PYTHON "$0"; exit $?'), ABORTS, id="shell"),
        pytest.param((sys.executable, *DEEPSPEED), ABORTS, id="deepspeed", marks=pytest.mark.exhaustive),
        pytest.param((sys.executable, *ACCELERATE), ABORTS, id="accelerate", marks=pytest.mark.exhaustive),
        pytest.param((sys.executable,), ABORTS_AS_A_CHILD, id="spawn", marks=pytest.mark.exhaustive),
    ],
)
def test_an_abort_of_a_rank_started_by_the_command_is_classified_by_its_log(cluster, tmp_path, head, program):
    """Its launcher ends with another exit code. The out-of-memory error of a kernel under tuning was survived."""
    path = scripts.write(tmp_path / "own", program)
    argv = [word.replace("PYTHON", sys.executable) for word in (*head, str(path))]
    spec = scripts.spec(path, num_devices=2, launcher="own") | {"argv": argv}
    end = run(cluster, scripts.RUNNER, spec=spec, options={"one_rank_per_node": True}, deadlines=SLOW_START)
    assert isinstance(end.outcome, GangLost), end.outcome
    evidence = end.outcome.evidence
    assert evidence.node == cluster.topology.nodes[0].name
    first = evidence.message.splitlines()[0]
    assert "uncorrectable ECC error encountered" in first and "reset or replace the device" in first


REGISTERS = """
import faulthandler, json, os, signal, sys
if os.environ["RANK"] == sys.argv[1]:
    faulthandler.register(signal.SIGUSR1)
    reported = {"v": 1, "source": "hook:torch", "t": 0.0, "event": "loaded", "pid": os.getpid(), "stack_signal": True}
    with open(os.path.join(os.environ["TUNE_CLUSTER_REPORT"], f"rank{os.environ['RANK']}.jsonl"), "a") as file:
        file.write(json.dumps(reported) + "\\n")
def stuck():
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("rank", "how"), [("0", "it was in stuck (train.py:"), ("none", "its program had printed nothing for ")]
)
def test_the_stack_of_a_hanging_program_is_requested_only_if_that_does_not_end_it(cluster, tmp_path, rank, how):
    text = f"{scripts.STEPS}{REGISTERS}train(2)\nstuck()\n"
    path = scripts.write(tmp_path / "own", text)
    spec = scripts.spec(path)
    spec["argv"].append(rank)
    outcome = run(cluster, scripts.RUNNER, world_size=1, spec=spec, deadlines=Deadlines(stall_s=1.5)).outcome
    assert isinstance(outcome, TimedOut), outcome
    assert how in outcome.evidence.message
    assert "step 2 loss 2.8 took 20 ms" in outcome.evidence.log_tail


def test_silent_ranks_keep_the_deadlines_of_reporting_ranks(cluster, tmp_path):
    text = f"import os\n{scripts.STEPS}\ntime.sleep(1.5)\ntrain() if os.environ['RANK'] == '1' else time.sleep(2)\n"
    spec = scripts.spec(scripts.write(tmp_path / "own", text))
    deadlines = Deadlines(starting_s=4.0)
    *reported, end = events_until_end(cluster, launch(cluster, scripts.RUNNER, spec=spec, deadlines=deadlines))
    assert isinstance(end.outcome, Measured), end.outcome
    assert (reported[-1].phase, reported[-1].step) == ("measuring", scripts.NUM_STEPS)


STUCK = """
def wait_for_nothing():
    time.sleep(600)
"""


@pytest.mark.exhaustive
def test_the_hook_reports_the_line_at_which_one_of_two_ranks_hangs(cluster, tmp_path):
    stops = "    if step == 3 and dist.get_rank() == 1:\n        wait_for_nothing()\n    loss.backward()\n"
    text = STUCK + scripts.DDP.replace("    loss.backward()\n", stops)
    spec = scripts.spec(scripts.write(tmp_path / "own", text), hook=True)
    outcome = run(cluster, scripts.RUNNER, spec=spec, deadlines=Deadlines(stall_s=8.0)).outcome
    assert isinstance(outcome, TimedOut), outcome
    assert outcome.evidence.rank == 1
    assert "it was in wait_for_nothing (train.py:3)" in outcome.evidence.message


STARTS_RANKS = """
import os, subprocess, sys, threading, time
if "RANK" not in os.environ:
    size = os.environ["NPROC_PER_NODE"]
    each = [{**os.environ, "RANK": str(rank), "WORLD_SIZE": size} for rank in range(int(size))]
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=environment) for environment in each]
    sys.exit(max(rank.wait() for rank in ranks))
"""
RECORDS = """
import torch, torch.distributed as dist
rank, dump = int(os.environ["RANK"]), torch._C._distributed_c10d._dump_fr_trace
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
dump()  # the first takes seconds
def listen():
    pipe = f"{os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{rank}.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    while not os.read(reader, 1):
        time.sleep(0.1)
    with open(f"{os.environ['TORCH_NCCL_DEBUG_INFO_TEMP_FILE']}{rank}", "wb") as file:
        file.write(dump())
threading.Thread(target=listen, daemon=True).start()
for step in range(1, 9):
    if step == 3 and rank == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(4))
    if rank == 0:
        print(f"step {step} loss 2 took 20 ms", flush=True)
"""
"""A thread stands in for NCCL's, which listens on the pipe of each rank; the gang and its recorders are gloo's."""


@pytest.mark.exhaustive
def test_ranks_started_by_a_program_are_distinguished_by_their_records(cluster, tmp_path):
    """One slot, three ranks: the records name ranks, of which the slot's number is one by chance only."""
    spec = scripts.spec(scripts.write(tmp_path / "own", STARTS_RANKS + RECORDS), num_devices=3, launcher="own")
    options = {"one_rank_per_node": True}
    deadlines = Deadlines(stall_s=3.0, starting_s=60.0)
    end = run(cluster, scripts.RUNNER, world_size=3, spec=spec, deadlines=deadlines, options=options)
    assert isinstance(end.outcome, TimedOut), end.outcome
    message = end.outcome.evidence.message
    assert "; rank 1: its program had printed nothing for " in message
    assert "waits for it in all_reduce number 4 of group default_pg" in message
    assert [text.partition(":")[0] for text in end.outcome.evidence.collateral] == ["rank 0", "rank 2"]
    assert end.outcome.evidence.rank == 0, "the slot's number, after which its log is called"


def test_ranks_of_one_slot_dump_their_stacks_one_by_one(cluster, tmp_path):
    """They write to one log, and only the one that registered a handler gets a request."""
    text = f"{STARTS_RANKS}{scripts.STEPS}{REGISTERS}train(2) if os.environ['RANK'] == '0' else None\nstuck()\n"
    for reported in ("0", "1"):
        spec = scripts.spec(scripts.write(tmp_path / reported, text), num_devices=2, launcher="own")
        spec["argv"].append(reported)
        options = {"one_rank_per_node": True}
        end = run(cluster, scripts.RUNNER, spec=spec, deadlines=Deadlines(stall_s=1.5), options=options)
        assert isinstance(end.outcome, TimedOut), end.outcome
        seen = (end.outcome.evidence.message, *end.outcome.evidence.collateral)
        assert ["it was in stuck (train.py:" in words for words in seen] == [reported == "0", reported == "1"], seen


def test_a_rank_that_reports_nothing_is_inspected_too(cluster, tmp_path):
    """Rank 0 alone prints, and waits for rank 1: who hangs cannot be known, and is not taken to be rank 0."""
    text = f"import os\n{scripts.STEPS}\ntrain(2) if os.environ['RANK'] == '0' else None\ntime.sleep(600)\n"
    spec = scripts.spec(scripts.write(tmp_path / "own", text))
    outcome = run(cluster, scripts.RUNNER, spec=spec, deadlines=Deadlines(stall_s=1.5)).outcome
    assert isinstance(outcome, TimedOut), outcome
    assert (outcome.phase, outcome.evidence.node) == ("measuring", None)
    assert len(outcome.evidence.collateral) == 1
