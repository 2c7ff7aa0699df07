"""Looking at ranks that make no progress: stacks on accelerators, and Flight Recorders of real gangs on gloo."""

import os
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from cluster.base import Deadlines
from cluster.gang.hang_verdict import FlightRecord, StackState
from cluster.node import hang
from cluster.node.hang import HangingSlot, RecordedRank, examine, judge, listening, recorder_env, records, unpickled
from cluster.node.ranks import tail_of
from tests.cluster.gangs import living, run
from trials.outcome import TimedOut

STALL = Deadlines(stall_s=1.0)


def frame(file, number, function):
    return ["Thread 0x1 (most recent call first):", f'  File "{file}", line {number} in {function}']


@pytest.mark.parametrize(
    ("line", "on_cuda"),
    [
        ("    loss = losses.tolist()", StackState.WAITING),
        ("    end.synchronize()", StackState.WAITING),
        ("    host = grads.to('cpu')", StackState.WAITING),
        ("    finite = bool(torch.isfinite(norm))", StackState.WAITING),
        ("    print(step, float(loss))", StackState.WAITING),
        ("    count = int(mask.sum())", StackState.WAITING),
        ("    places = torch.nonzero(mask)", StackState.WAITING),
        ("    kept = losses[losses > 0]", StackState.WAITING),
        ("    while not done.all():", StackState.WAITING),
        ("    losses[names['a']] = time.time()", StackState.ELSEWHERE),
        ("    checkpoint(bools(kept))", StackState.ELSEWHERE),
        ("    time.sleep(600)", StackState.ELSEWHERE),
        ("    batch = next(batches)", StackState.ELSEWHERE),
    ],
)
def test_a_rank_that_waits_for_its_gpu_waits_for_its_peers(tmp_path, line, on_cuda):
    """Methods of tensors and events have no Python frame: the calling line identifies them."""
    code = tmp_path / "step.py"
    code.write_text(f"def step():\n{line}\n")
    assert judge(frame(code, 2, "step"), "cuda")[0] is on_cuda
    assert judge(frame(code, 2, "step"), "cpu")[0] is StackState.ELSEWHERE, "nothing waits for a CPU"


@pytest.mark.parametrize(
    ("file", "function", "stack_state"),
    [
        ("torch/cuda/__init__.py", "synchronize", StackState.WAITING),
        ("torch/cuda/streams.py", "synchronize", StackState.WAITING),
        ("torch_npu/npu/utils.py", "synchronize", StackState.WAITING),
        ("torch/distributed/distributed_c10d.py", "all_reduce", StackState.WAITING),
        ("torch/nn/modules/linear.py", "forward", StackState.UNCLEAR),
        ("torch/autograd/graph.py", "_engine_run_backward", StackState.UNCLEAR),
        ("torch/utils/data/dataloader.py", "_get_data", StackState.ELSEWHERE),
        ("torch/_inductor/compile_fx.py", "compile_fx", StackState.ELSEWHERE),
    ],
)
def test_frames_of_torch_on_accelerators(file, function, stack_state):
    assert judge(frame(f"/opt/site-packages/{file}", 1, function), "cuda")[0] is stack_state


ANSWERS_LATE = """
import _signal as signal, faulthandler, json, os, sys, time
def {name}(deaf_s):
    signal.pthread_sigmask(signal.SIG_UNBLOCK if deaf_s <= 0 else signal.SIG_BLOCK, [signal.SIGUSR1])
    print("ready", flush=True)
    sys.stdin.read(1)
    time.sleep(max(0, deaf_s))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    time.sleep(600)
faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)
reported = {{"v": 1, "source": "hook:torch", "t": 0.0, "event": "loaded", "pid": os.getpid(), "stack_signal": True}}
with open(f"rank{{os.environ['RANK']}}.jsonl", "w") as file:
    file.write(json.dumps(reported) + "\\n")
{name}(float(sys.argv[1]))
"""


@pytest.fixture
def ranks_of_one_slot(tmp_path):
    """Starts processes that take the signal only so many seconds after they are let go, each in a separate function,
    and yields what is seen of them as ranks of one slot."""
    started = []

    def see(**deaf_s):
        log = tmp_path / "rank0.log"
        with log.open("ab") as file:
            for rank, (name, seconds) in enumerate(deaf_s.items()):
                command = [sys.executable, "-c", ANSWERS_LATE.format(name=name), str(seconds)]
                environment = {**os.environ, "RANK": str(rank)}
                pipe = subprocess.PIPE
                started.append(
                    subprocess.Popen(command, env=environment, cwd=tmp_path, stdin=pipe, stdout=pipe, stderr=file)
                )
        for process in started:
            assert process.stdout.readline() == b"ready\n"
        for process in started:
            process.stdin.write(b".")
            process.stdin.flush()
        slot = HangingSlot(
            rank=0,
            pid=os.getpid(),
            log=log,
            device="cpu",
            progress=None,
            folder=tmp_path,
            reports=tmp_path,
            starts=tuple(range(len(started))),
        )
        return {sight.rank: sight for sight in examine([slot])[0].sights}

    yield see
    for process in started:
        process.kill()
        process.communicate()


def test_a_late_stack_is_attributed_to_its_rank(ranks_of_one_slot):
    """As on a loaded node: the first dump is written when the request to the second rank would be due."""
    seen = ranks_of_one_slot(in_a_lock=1.0, in_a_file=0)
    assert [(rank, "in_a_lock" in one.where, "in_a_file" in one.where) for rank, one in sorted(seen.items())] == [
        (0, True, False),
        (1, False, True),
    ]


@pytest.mark.slow
def test_a_live_rank_is_not_blamed_for_not_answering(ranks_of_one_slot):
    seen = ranks_of_one_slot(in_the_kernel=60, in_a_file=0)
    assert (seen[0].stack_state, seen[0].where) == (StackState.UNCLEAR, "it did not report its stack in time")
    assert (seen[1].stack_state, "in_a_file" in seen[1].where) == (StackState.ELSEWHERE, True)


def test_a_late_stack_is_not_attributed_to_another_rank(ranks_of_one_slot, monkeypatch):
    monkeypatch.setattr(hang, "DUMP_S", 1.0)
    seen = ranks_of_one_slot(late=1.5, later=1.7)
    assert [seen[rank].where for rank in (0, 1)] == ["it did not report its stack in time"] * 2


@pytest.mark.slow
@pytest.mark.fault
def test_a_rank_that_looks_idle_but_is_in_the_collective_is_not_blamed(local_cluster, pids):
    """Rank 0 polls for the end of what it began, rank 1 never begins it: their stacks are alike, their records not."""
    end = run(local_cluster, "hangs_behind", world_size=3, spec={"pids": pids}, deadlines=STALL)
    assert living(pids) == []
    assert isinstance(end.outcome, TimedOut)
    assert end.outcome.evidence.rank == 1, end.outcome.evidence
    assert "it was in sleep_in_python" in end.outcome.evidence.message
    assert "waits for it in all_reduce number 2 of group default_pg" in end.outcome.evidence.message
    assert end.outcome.evidence.node is not None


@pytest.mark.slow
@pytest.mark.fault
def test_ranks_that_call_collectives_in_different_orders_blame_no_node(local_cluster, pids):
    end = run(local_cluster, "disagrees", world_size=2, spec={"pids": pids}, deadlines=STALL)
    assert isinstance(end.outcome, TimedOut)
    assert (end.outcome.evidence.rank, end.outcome.evidence.node) == (None, None), end.outcome.evidence
    assert "ranks wait for each other in different operations" in end.outcome.evidence.message


@pytest.fixture
def alone(tmp_path):
    """A process group of one rank, with a member group, in this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    group = dist.new_group([0], group_desc="tp")
    dist.all_reduce(torch.ones(3), group=group)
    dist.all_reduce(torch.ones(3), group=group)
    yield
    dist.destroy_process_group()


def settled():
    """The record, once gloo's thread has noted that the last collective ended: after its caller went on, often."""
    deadline_s = time.monotonic() + 10
    while (record := hang.read_record()).calls and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return record


def test_a_dump_reads_the_same_as_json_and_as_a_pickle(alone):
    record = settled()
    (place,) = [place for place in record.places if place.label == "tp"]
    assert (place.ranks, place.entered) == ((0,), 2)
    assert record.calls == ()
    pickled = unpickled(torch._C._distributed_c10d._dump_fr_trace())
    assert hang.summary(pickled, hang._members()) == record


class Evil:
    def __reduce__(self):
        return os.system, ("true",)


def test_a_dump_cannot_run_code():
    for content in (pickle.dumps({"entries": Evil()}), pickle.dumps([1]), b"\x80\x04\x95 garbage"):
        with pytest.raises((pickle.UnpicklingError, EOFError)):
            unpickled(content)


def test_a_rank_that_cannot_answer_is_dumped_through_the_nccl_pipe(tmp_path, alone):
    """A thread stands in for NCCL's: it makes the pipe that the environment names, and dumps when a byte comes."""
    environment = recorder_env(tmp_path, {})
    rank = RecordedRank(rank=3, folder=tmp_path, request_write=-1)
    assert records([rank]) == {}, "there is no pipe"
    pipe = f"{environment['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}3.pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def dump():
        while not _read(reading):
            pass
        rank.dump.write_bytes(torch._C._distributed_c10d._dump_fr_trace())

    thread = threading.Thread(target=dump)
    thread.start()
    assert listening(tmp_path) == [3]
    found = records([rank])
    thread.join()
    os.close(reading)
    assert listening(tmp_path) == [], "a pipe without a reader belongs to another host or a dead process"
    assert environment["TORCH_FR_DUMP_TEMP_FILE"] + "3" == str(rank.dump)
    assert isinstance(found[3], FlightRecord)
    assert [place.entered for place in found[3].places] == [2]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "20000"}, {"TORCH_FR_BUFFER_SIZE": "20000"}),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}),
        ({"TORCH_FR_DUMP_TEMP_FILE": "/mine"}, {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"}),
        ({"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine"}, {"TORCH_FR_DUMP_TEMP_FILE": "/mine"}),
    ],
)
def test_a_user_variable_is_kept_under_all_of_its_names(tmp_path, theirs, ours):
    found = recorder_env(tmp_path, theirs)
    assert {name: found.get(name) for name in ours} == ours
    assert found.keys().isdisjoint(theirs)
    assert found["TORCH_HCCL_TRACE_BUFFER_SIZE"] == "2000", "another recorder"


SIZE = """
import json, os, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(5):
    dist.all_reduce(torch.ones(1))
print(len(json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]), flush=True)
os._exit(0)  # gloo's threads need not outlive the interpreter
"""


@pytest.mark.slow
def test_torch_uses_the_buffer_size_set_under_its_older_name(tmp_path):
    theirs = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "3"}
    environment = {**os.environ, **theirs, **recorder_env(tmp_path, theirs)}
    ran = subprocess.run([sys.executable, "-c", SIZE], env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.strip()) == (0, "3"), ran.stderr


def test_a_rank_blocked_in_c_code_gets_one_dump_request_unless_it_lacks_a_thread(tmp_path):
    """NCCL names the Python frames in what it dumps, for which it needs the interpreter as well."""
    request_read, asking = os.pipe()
    os.mkfifo(tmp_path / "nccl-flight-rank0.pipe")
    reading = os.open(tmp_path / "nccl-flight-rank0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert records([RecordedRank(rank=0, folder=tmp_path, request_write=asking)]) == {}
    assert (os.read(request_read, 9), os.read(reading, 9)) == (b"?", b"")
    for descriptor in (request_read, asking, reading):
        os.close(descriptor)


def _read(pipe):
    try:
        return os.read(pipe, 1)
    except BlockingIOError:
        return b""


def test_the_nccl_recorder_reader_is_found_by_name(monkeypatch):
    """As in builds for CUDA, whose recorder has a separate function."""
    names = [function.__name__ for function in hang._readers()]
    assert "_dump_fr_trace_json" in names
    monkeypatch.setattr(
        sys.modules["torch._C._distributed_c10d"], "_dump_nccl_trace_json", lambda: b"{}", raising=False
    )
    assert len(hang._readers()) == len(names) + 1


def test_the_tail_of_a_log_omits_torch_warnings_about_our_variables(tmp_path):
    warning = (
        "[W1122 20:46:22.53 Utils.hpp:137] Warning: Environment variable TORCH_NCCL_TRACE_BUFFER_SIZE is deprecated;"
    )
    (tmp_path / "log").write_text(f"{warning} use TORCH_FR_BUFFER_SIZE instead (function operator())\nValueError: no\n")
    assert tail_of(tmp_path / "log") == ("ValueError: no",)
