"""Runners for gangs of the tests: small, with real gloo where ranks must meet.

Every process leaves a file named by its pid in ``spec["pids"]``, for the tests to see that it is gone.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from trials.files import to_json
from trials.outcome import RankReport, StepBreakdown

FOREVER_S = 600


def report(step_times_s=(0.1, 0.2), **changes):
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    values = {
        "rank": rank,
        "world_size": world_size,
        "tokens_per_step": 64,
        "step_times_s": tuple(step_times_s),
        "breakdown": StepBreakdown(forward_s=0.1 * (rank + 1)),
        "peak_allocated_bytes": 100 + rank,
        "peak_reserved_bytes": 200 + rank,
        "num_warmup_steps": 1,
        "losses": (3.0, 2.0 + rank),
        "grad_norms": (1.0, 1.0),
        "model_flops_per_token": 6.0,
    }
    return to_json(RankReport(**{**values, **changes}))


def join(spec):
    sign_in(spec)
    dist.init_process_group(
        "gloo",
        init_method=os.environ["TUNE_CLUSTER_RENDEZVOUS"],
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return dist.get_rank()


def sign_in(spec):
    if "pids" in spec:
        Path(spec["pids"], str(os.getpid())).touch()


def all_reduce():
    total = torch.ones(4)
    dist.all_reduce(total)
    return total[0].item()


def noop(spec, progress):
    return report()


def ok(spec, progress):
    progress("starting")
    rank = join(spec)
    total = all_reduce()
    progress("warmup", step=1)
    for step in (1, 2):
        progress("measuring", step=step, step_time_s=0.1 * step)
        all_reduce()
    times = spec.get("step_times_s", [[0.1, 0.2]] * dist.get_world_size())[rank]
    return report(times, model_flops_per_token=total)


def environment(spec, progress):
    """Fails with the rank's environment as its message, for the test to read."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    seen = {name: os.environ.get(name) for name in (*names, "MASTER_ADDR", "OMP_NUM_THREADS", "EXTRA")}
    seen |= {"threads": torch.get_num_threads(), "ray": "ray" in sys.modules}
    if os.environ["RANK"] == "0":
        raise ValueError(repr(seen))
    time.sleep(FOREVER_S)


def joins_by_address(spec, progress):
    """Meets its peers like programs that use only torchrun's variables."""
    dist.init_process_group("gloo", init_method="env://")
    return report(model_flops_per_token=all_reduce())


def reports_for_its_node(spec, progress):
    sign_in(spec)
    num_devices = int(os.environ["TUNE_CLUSTER_NUM_DEVICES"])
    assert Path(os.environ["TUNE_CLUSTER_ATTEMPT_DIR"], f"rank{os.environ['RANK']}.log").exists()
    Path(os.environ["TUNE_CLUSTER_CACHE_DIR"]).mkdir(exist_ok=True)
    return report(num_ranks=num_devices)


def raises(spec, progress):
    """One rank raises while the others wait for it."""
    rank = join(spec)
    all_reduce()
    if rank == spec["rank"]:
        print("about to fail")
        raise ValueError("no good")
    all_reduce()
    return report()


def out_of_memory(spec, progress):
    rank = join(spec)
    all_reduce()
    if rank == spec["rank"]:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
    all_reduce()
    return report()


def hangs(spec, progress):
    """One rank stops making progress in its second measured step; its peers wait in the collective."""
    rank = join(spec)
    all_reduce()
    progress("measuring", step=1)
    if rank != spec["rank"]:
        progress("measuring", step=2)
        all_reduce()
    time.sleep(FOREVER_S)


def hangs_at_start(spec, progress):
    sign_in(spec)
    time.sleep(FOREVER_S)


def dies(spec, progress):
    rank = join(spec)
    all_reduce()
    if rank == spec["rank"]:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce()
    return report()


def leaves(spec, progress):
    """Exits without running any handler."""
    if os.environ["RANK"] == "0":
        os._exit(7)
    time.sleep(FOREVER_S)


def spawns(spec, progress):
    """Leaves two orphans in separate sessions: one without our environment, one forked without exec."""
    sign_in(spec)
    script = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close()\n"
        f"    time.sleep({FOREVER_S})\n"
    )
    subprocess.run([sys.executable, "-S", "-c", script, spec["pids"]], check=True, env={})
    if os.fork() == 0:
        if os.fork() == 0:
            os.setsid()
            sign_in(spec)
            time.sleep(FOREVER_S)
        os._exit(0)
    while len(list(Path(spec["pids"]).iterdir())) < 3 * int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
    progress("warmup", step=1)
    if spec["then"] == "hang":
        time.sleep(FOREVER_S)
    return report()


def hangs_in_step(spec, progress):
    """All have reported the same step; then one rank hangs in its own way while its peers wait in the collective."""
    rank = join(spec)
    all_reduce()
    progress("measuring", step=1)
    if rank == spec["rank"]:
        HANGS[spec["how"]]()
    all_reduce()
    return report()


def hangs_behind(spec, progress):
    """All have reported the same step; rank 1 then sleeps, rank 0 sleeps as well while its collective goes on."""
    rank = join(spec)
    all_reduce()
    progress("measuring", step=1)
    if rank == 1:
        sleep_in_python()
    work = dist.all_reduce(torch.ones(4), async_op=True)
    while rank == 0 and not work.is_completed():
        time.sleep(0.01)
    work.wait()
    return report()


def disagrees(spec, progress):
    """Two ranks call the same two collectives in different orders."""
    rank = join(spec)
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    progress("measuring", step=1)
    for group in groups if rank == 0 else reversed(groups):
        dist.all_reduce(torch.ones(4), group=group)
    return report()


def sleep_in_python(*_):
    time.sleep(FOREVER_S)


def stop_oneself():
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_interpreter():
    """Sleep in C without letting go of the interpreter's lock."""
    while True:
        ctypes.PyDLL(None).sleep(FOREVER_S)


HANGS = {"sleep": sleep_in_python, "stop": stop_oneself, "c": hold_the_interpreter}


def aborts_as_the_watchdog_does(spec, progress):
    """One rank is aborted by a thread that is no Python thread, after it wrote why to the log."""
    if os.environ["RANK"] == spec["rank"]:
        sys.stderr.write(
            f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {spec['why']}\n"
        )
        sys.stderr.write(
            "".join(
                f"frame #{n}: <unknown function> + 0xdc253 (0x7fe76a6b0253 in libtorch_cuda.so)\n" for n in range(30)
            )
        )
        sys.stderr.flush()
        os.abort()
    time.sleep(FOREVER_S)


def raises_one_after_the_other(spec, progress):
    """Each rank raises its error in the specification, half a second after the one before; a rank without one waits."""
    rank = int(os.environ["RANK"])
    time.sleep(0.5 * rank if spec["words"][rank] else FOREVER_S)
    raise RuntimeError(spec["words"][rank])


def compiles_slowly(spec, progress):
    """A trial of compiled blocks, on whose rank 1 the compiler takes its time, or makes code that never ends."""
    from trials import kernels
    from trials.worker import run_rank

    kernels.BEAT_S = 0.5
    own_time_s = spec["compile_s"] if os.environ["RANK"] == "1" else 0.0

    def slow(graph, inputs):
        time.sleep(own_time_s)
        return sleep_in_python if spec["hangs"] and own_time_s else graph.forward

    torch._dynamo.register_backend(slow, name="slow")
    return run_rank(spec["trial"], progress)


def cannot_leave(spec, progress):
    """A trial whose last rank can never leave its process group: destroying it hangs, as NCCL's sometimes does."""
    from trials.worker import run_rank

    if os.environ["RANK"] == "1":
        dist.destroy_process_group = sleep_in_python
    return run_rank(spec, progress)


def ends_by_sigterm(spec, progress):
    sign_in(spec)
    if os.environ["RANK"] == spec["rank"]:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(FOREVER_S)


def eats_memory(spec, progress):
    """One rank, or a child process that loads its data, takes memory without end."""
    sign_in(spec)
    if os.environ["RANK"] != "0":
        time.sleep(FOREVER_S)
    if spec["where"] == "loader":
        for _ in DataLoader(Glutton(), num_workers=1):
            pass
    Glutton()[0]


class Glutton(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        taken = []
        while True:
            taken.append(bytearray(b"x" * (4 << 20)))
