"""Programs that behave as badly as programs do, each in a real gang: the right outcome, and nothing left behind."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster.base import Deadlines, GangEnded, GangLaunch
from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import Pool
from cluster.local import LocalCluster
from cluster.node.agent import SCRIPT_PRELOAD
from tests.support import ROOT
from trials.files import to_json
from trials.script.command import API_FOLDER, Expected, LogFormat, ScriptCommand, ScriptRank, child_environment
from trials.spec import Protocol

LIMIT_S = 60.0
MAX_PEAK_MIB = 64
"""What a rank that follows a program may take: most of it is Python with our modules."""

PRELUDE = """
import json, os, signal, sys, time
rank = os.environ.get("RANK", "0")
path = os.environ["TUNE_CLUSTER_REPORT"] + f"/rank{rank}.jsonl"
def tell(**values):
    with open(path, "a") as file:
        file.write(json.dumps({"v": 1, "source": "report", "t": time.time(), **values}) + "\\n")
def steps(count=6, first=1, sleep_s=None, **values):
    began = time.perf_counter()
    for step in range(first, first + count):
        time.sleep(sleep_s or values.get("step_time_s", 0.005))
        now = time.perf_counter()
        tell(step=step, **{"step_time_s": now - began, "loss": 5 - step / 10, **values})
        began = now
"""


@dataclass
class Case:
    program: str
    kind: str = "measured"
    expected_message: str = ""
    """Part of the failure's message."""
    world_size: int = 1
    log: LogFormat = field(default_factory=LogFormat)
    expected: Expected = field(default_factory=Expected)
    starting_s: float = 40.0
    num_steps: int = 4


LINES = LogFormat(name="pattern", pattern=r"step (?P<step>\d+) loss (?P<loss>\S+) (?P<step_ms>[\d.]+) ms")
MEGATRON = LogFormat(name="megatron")
NO_PORT = (
    "torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE, address already in use"
)
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.10 GiB"

SLOW_CLOCK = """
sleep, real = time.sleep, {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter")}
begin = {name: clock() for name, clock in real.items()}
for name in real:
    setattr(time, name, lambda name=name: begin[name] + (real[name]() - begin[name]) / 10)
"""

CASES = {
    "good": Case("steps()"),
    "ignores SIGTERM": Case("signal.signal(signal.SIGTERM, signal.SIG_IGN); steps(); time.sleep(600)"),
    "hangs after success": Case("steps(); time.sleep(600)"),
    "leaves detached processes": Case(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
    time.sleep(600)
steps()
"""
    ),
    "detached processes go on printing": Case(
        """
if os.fork() == 0:
    os.setsid()
    while True:
        print("x" * 1000, flush=True)
steps()
"""
    ),
    "prints megabytes without an end of line": Case(
        "for _ in range(100): sys.stdout.buffer.write(b'x' * 1_000_000)\nsteps()"
    ),
    "prints two hundred megabytes of lines": Case(
        "print('begin of the output')\nfor _ in range(2000): print('error: all is well, nothing of it\\n' * 2900)\n"
        "print('end of the output')\nsteps()"
    ),
    "prints for ever after success": Case("steps()\nwhile True: print('y' * 70_000)"),
    "is no UTF-8": Case(
        "out = sys.stdout.buffer\n"
        "for step in range(1, 7):\n"
        "    out.write(b'\\xff\\xfe\\x80\\r\\x1b[31mstep %d \\x1b[0mloss %.2f 12.5 ms\\r' % (step, 5 - step / 10))\n"
        "    out.flush()",
        log=LINES,
    ),
    "reports an error and out of memory": Case(
        "print('ERROR: RuntimeError out of memory avoided, 3 CUDA OOM errors thrown.'); steps(); sys.exit(1)"
    ),
    "fails for another reason than the memory it talks of": Case(
        "print('hint: use less to avoid out of memory'); steps(3); raise ValueError('bad data')",
        kind="crashed",
        expected_message="bad data (the command exited with code 1 after 3 of 6 steps)",
    ),
    "exits with 1 after success": Case("steps(); sys.exit(1)"),
    "is killed after success": Case("steps(); os.kill(os.getpid(), 9)"),
    "is killed before": Case(
        "steps(2); os.kill(os.getpid(), 9)", kind="gang_lost", expected_message="killed by signal 9"
    ),
    "exits with 0 and reports nothing": Case(
        "print('done')",
        kind="crashed",
        expected_message="reported no step. Steps can be reported with `from tune_cluster_report import report`",
    ),
    "trains too few steps": Case("steps(4)", kind="crashed", expected_message="exited with code 0 after 4 of 6 steps"),
    "reports everything at once": Case(
        "print('\\n'.join(f'step {n} loss 5.0' for n in range(1, 9)))",
        kind="crashed",
        expected_message="but not the time of each",
        log=LogFormat(name="pattern", pattern=r"step (?P<step>\d+) loss (?P<loss>\S+)"),
    ),
    "reports a nan loss": Case(
        "steps(3); steps(3, 4, loss=float('nan'))", kind="diverged", expected_message="loss is nan at step 4"
    ),
    "hides a loss that is no number": Case(
        "steps(2); steps(4, 3, loss=0.0, grad_norm=float('nan'))",
        kind="diverged",
        expected_message="gradient norm is nan in steps 3, 4, 5",
    ),
    "leaves the loss out": Case(
        "for n in range(1, 7):\n"
        "    print(f' iteration {n}/6 | elapsed time per iteration (ms): 12.5 | number of nan iterations: {n // 4} |')",
        kind="diverged",
        expected_message="the log counts 1 nan iterations",
        log=MEGATRON,
    ),
    "trains twice apart": Case(
        "tell(event='facts', world_size=1); steps()",
        kind="infeasible",
        expected_message="not applied: the candidate requires the world size to be 2, but the program has 1",
        world_size=2,
        expected=Expected(world_size=2),
    ),
    "closes its output": Case("sys.stdout.close(); os.close(1); os.close(2); time.sleep(0.3); steps()"),
    "reports lines without end": Case(
        "file = open(path, 'a'); file.write('{\"step\": ' + '1' * 3_000_000 + '}\\n[' + '[' * 100_000 + '\\n')\n"
        "file.close(); steps()"
    ),
    "replaces its report": Case(
        "steps(3); time.sleep(0.4); os.rename(path, path + '.old'); time.sleep(0.4)\n"
        "steps(1, 4, 0.005, step_time_s=0.8); steps(2, 5)\n"
        "os.truncate(path, 0); time.sleep(0.4); tell(step=7, loss=1.0)"
    ),
    "reports into a pipe": Case(
        "os.mkfifo(path); print('nothing'); time.sleep(0.3)", kind="crashed", expected_message="reported no step"
    ),
    "runs out of memory": Case(
        f"steps(1); print('Traceback (most recent call last):'); print({OOM!r}); sys.exit(1)",
        kind="oom",
        expected_message="20.00 GiB",
    ),
    "reports that it runs out of memory": Case(
        "tell(event='error', type='torch.cuda.OutOfMemoryError', message='no more'); sys.exit(1)", kind="oom"
    ),
    "finds its port taken": Case(f"sys.exit({NO_PORT!r})", kind="gang_lost", expected_message="address already in use"),
    "suspects its node": Case(
        "sys.exit(16)", kind="gang_lost", expected_message="Megatron-LM requests a restart", log=MEGATRON
    ),
    "is reported by its last rank only": Case(
        "for n in range(1, 7):\n    time.sleep(0.01)\n"
        "    if rank == '1': print(f'step {n} loss 5.1 12.5 ms', flush=True)\ntime.sleep(600)",
        world_size=2,
        log=LINES,
    ),
    "fails in one rank": Case(
        "steps(2)\nif rank == '1': raise KeyError('lost')\ntime.sleep(600)",
        kind="crashed",
        expected_message="lost",
        world_size=2,
    ),
    "never begins": Case(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.fork() or os.setsid()\ntime.sleep(600)",
        kind="timed_out",
        expected_message="starting",
        starting_s=1.0,
    ),
    "reports a fraction of the time": Case(
        "for n in range(1, 15):\n    time.sleep(0.05)\n    tell(step=n, step_time_s=0.002)",
        kind="not_believed",
        expected_message="2 ms per step by report, but ",
        num_steps=12,
    ),
    "reports a multiple of the time": Case(
        "for n in range(1, 15):\n    time.sleep(0.02)\n    tell(step=n, step_time_s=0.2)",
        kind="not_believed",
        expected_message="200 ms per step by report, but ",
        num_steps=12,
    ),
    "has a slow clock": Case(
        SLOW_CLOCK + "for n in range(1, 15):\n    began = time.perf_counter()\n    sleep(0.05)\n"
        "    tell(step=n, step_time_s=time.perf_counter() - began)",
        kind="not_believed",
        expected_message="per step by report, but ",
        num_steps=12,
    ),
    "has a slow clock and leaves times to us": Case(
        SLOW_CLOCK + "for n in range(1, 15):\n    sleep(0.05)\n    tell(step=n)",
        kind="not_believed",
        expected_message="per step by report, but ",
        num_steps=12,
    ),
    "prints a fraction of the time": Case(
        "for n in range(1, 15):\n    time.sleep(0.05)\n    print(f'step {n} loss 5.0 {50 / 5:.1f} ms', flush=True)",
        kind="not_believed",
        expected_message="10 ms per step by log:pattern, but ",
        log=LINES,
        num_steps=12,
    ),
    "times the launch of its kernels only": Case(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "device = ThreadPoolExecutor(1)\n"
        "for n in range(1, 15):\n    began = time.perf_counter()\n    kernel = device.submit(time.sleep, 0.05)\n"
        "    took = time.perf_counter() - began\n    kernel.result()\n    tell(step=n, step_time_s=took)",
        kind="not_believed",
        expected_message="torch.cuda.synchronize()",
        num_steps=12,
    ),
    "sends all reports in one burst": Case(
        "for n in range(1, 15): tell(step=n, step_time_s=0.2)\ntime.sleep(0.3)",
        kind="not_believed",
        expected_message="Flush the output",
        num_steps=12,
    ),
    "numbers its steps with gaps": Case(
        "for n in range(1, 15):\n    time.sleep(0.03)\n    tell(step=10 * n, step_time_s=0.03)",
        kind="not_believed",
        expected_message="30 ms per step by report, but ",
        num_steps=60,
    ),
    "buffers its output in blocks": Case(
        "out = open(1, 'w', buffering=1024, closefd=False)\n"
        "for n in range(1, 200):\n    began = time.perf_counter(); time.sleep(0.005)\n"
        "    out.write(f'step {n} loss 5.0 {1e3 * (time.perf_counter() - began):.2f} ms\\n')",
        log=LINES,
        num_steps=120,
    ),
    "logs every tenth step": Case(
        "began = time.perf_counter()\n"
        "for n in range(1, 41):\n    time.sleep(0.01)\n    if n % 10 == 0:\n"
        "        now = time.perf_counter(); print(f'step {n} loss 5.0 {100 * (now - began):.1f} ms', flush=True)\n"
        "        began = now",
        log=LINES,
        num_steps=30,
    ),
    "evaluates every fifth step": Case(
        "for n in range(1, 25):\n    began = time.perf_counter(); time.sleep(0.1)\n"
        "    tell(step=n, step_time_s=time.perf_counter() - began)\n    time.sleep(0.5 if n % 5 == 0 else 0)",
        num_steps=20,
    ),
    "prints a rate of few digits": Case(
        "for n in range(1, 15):\n    time.sleep(0.04)\n    print(f'step {n} loss 5.0 50 samples/s', flush=True)",
        log=LogFormat(name="pattern", pattern=r"step (?P<step>\d+) loss \S+ (?P<samples_per_s>\d+) samples/s"),
        num_steps=12,
    ),
    "takes a millisecond per step": Case(
        "for n in range(1, 2000):\n    began = time.perf_counter(); time.sleep(0.001)\n"
        "    tell(step=n, step_time_s=time.perf_counter() - began)",
        num_steps=300,
    ),
    "is not there": Case("", kind="crashed", expected_message="cannot start '/nowhere/python'"),
}
FAST = (
    "leaves detached processes",
    "fails for another reason than the memory it talks of",
    "is reported by its last rank only",
    "trains twice apart",
    "reports a fraction of the time",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    work = tmp_path_factory.mktemp("hostile")
    with LocalCluster(
        work, discover_node(num_devices=2), preload=(*SCRIPT_PRELOAD, "tests.trials.script.weighed")
    ) as cluster:
        yield cluster


def command(case, mark, **changes):
    argv = ("/nowhere/python",) if not case.program else (sys.executable, "-I", "-S", "-c", PRELUDE + case.program)
    return ScriptCommand(
        **{
            "argv": argv,
            "cwd": "/",
            "env": (("HOSTILE", mark),),
            "log": case.log,
            "hook": False,
            "protocol": Protocol(min_warmup_steps=2, num_steps=case.num_steps),
            "num_devices": case.world_size,
            "tokens_per_step": 128,
            "samples_per_step": 2,
            "expected": case.expected,
            **changes,
        }
    )


def run(cluster, case, mark, **changes):
    """The end of a gang of this program."""
    launch = GangLaunch(
        attempt_id=mark,
        token=mark,
        runner="tests.trials.script.weighed:run_rank",
        spec=to_json(command(case, mark, **changes)),
        placement=Pool(cluster.topology).place(world_size=case.world_size, tp=1, isolation="device"),
        deadlines=Deadlines(starting_s=case.starting_s),
        one_rank_per_node=changes.get("launcher") == "own",
    )
    cluster.launch(launch)
    give_up_s = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_s:
        for event in cluster.poll(1.0):
            if isinstance(event, GangEnded):
                return event
    raise AssertionError(f"no end of {mark}")


def living(mark):
    """Processes that have the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"HOSTILE={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(folder.name)
    return found


@pytest.mark.slow
@pytest.mark.representative(*FAST)
@pytest.mark.parametrize("name", CASES)
def test_programs_get_the_right_outcome_and_leave_nothing(cluster, name):
    case, mark = CASES[name], name.replace(" ", "-")
    end = run(cluster, case, mark)
    outcome, folder = end.outcome, Path(end.log_dir)
    assert outcome.kind == case.kind, outcome
    if case.kind == "measured":
        assert len(outcome.measurement.step_times_s) == case.num_steps
        assert outcome.measurement.findings.script.source_of("step_time_s") is not None
    else:
        assert case.expected_message in outcome.evidence.message
    assert living(mark) == []
    left = {path.name for path in folder.iterdir()} - {"peak0", "peak1"}
    assert all(
        name.endswith((".log", ".load.json", ".flight.json")) or name in ("rank0.json", "rank1.json") for name in left
    ), left
    for path in folder.glob("rank*.log"):
        assert path.stat().st_size <= 34 << 20
    for path in folder.glob("peak*"):
        assert int(path.read_text()) < MAX_PEAK_MIB << 10
    if name == "prints two hundred megabytes of lines":
        log = (folder / "rank0.log").read_bytes()
        assert log.startswith(b"begin of the output")
        assert b"bytes omitted ...]" in log
        assert b"end of the output" in log[-1000:]


def test_stale_lock_files_are_removed_before_the_start(cluster, tmp_path):
    stale, held = (tmp_path / "torch_extensions" / name / "lock" for name in ("stale", "held"))
    for lock in (stale, held):
        lock.parent.mkdir(parents=True)
        lock.touch()
    looks = Case(
        f"import os\nprint(os.environ['TORCH_EXTENSIONS_DIR'])\nif not os.path.exists({str(stale)!r}): steps()"
    )
    with held.open():
        end = run(cluster, looks, "locks", cache_dir=str(tmp_path))
        assert end.outcome.kind == "measured"
        assert held.exists()
    assert not stale.exists()
    assert str(tmp_path / "torch_extensions") in Path(end.log_dir, "rank0.log").read_text()


def test_programs_see_an_allow_list_of_the_environment():
    node = {
        "HF_HOME": "/hub",
        "NCCL_DEBUG": "INFO",
        "SOMETHING_ELSE": "x",
        "TORCH_API_KEY": "k",
        "WANTED": "yes",
        "RANK": "7",
    }
    shows = command(CASES["good"], "sees", env_pass=("WANTED",), env=(("HF_HUB_OFFLINE", "0"), ("PYTHONPATH", "/out")))
    rank = ScriptRank.from_env({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "4711"})
    folders = {"report": Path("/report"), "error_file": Path("/error")}
    seen = child_environment(shows, rank, node, **folders)
    assert seen["PYTHONPATH"] == f"{API_FOLDER}:/out"  # the program's own goes behind ours, and does not replace it
    assert {"SOMETHING_ELSE", "TORCH_API_KEY"}.isdisjoint(seen)
    wanted = {"HF_HOME": "/hub", "NCCL_DEBUG": "INFO", "WANTED": "yes", "HF_HUB_OFFLINE": "0", "WANDB_MODE": "disabled"}
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "4711", "TORCHELASTIC_RUN_ID": "tune-cluster"}
    assert {**wanted, **torchrun}.items() <= seen.items()


def test_extensions_are_kept_across_sweeps_if_the_home_directory_is_writable(tmp_path):
    shows = command(CASES["good"], "caches")
    rank = ScriptRank.from_env({})
    folders = {"report": Path("/report"), "error_file": Path("/error")}
    (tmp_path / "file").touch()

    def seen(cache, **node):
        found = child_environment(shows, rank, {"TUNE_CLUSTER_CACHE_DIR": str(tmp_path / cache), **node}, **folders)
        return found["TORCH_EXTENSIONS_DIR"], found["TRITON_CACHE_DIR"]

    first, second = seen("a", HOME=str(tmp_path)), seen("b", HOME=str(tmp_path))
    assert first[0] == second[0]
    assert first[0].startswith(str(tmp_path / ".cache/tune-cluster"))
    assert (first[1], second[1]) == (str(tmp_path / "a/triton"), str(tmp_path / "b/triton"))
    assert seen("a", XDG_CACHE_HOME=str(tmp_path / "x"), HOME="/")[0].startswith(str(tmp_path / "x"))
    for node in ({}, {"HOME": str(tmp_path / "file")}):
        assert seen("a", **node)[0] == str(tmp_path / "a/torch_extensions")


def test_a_command_that_starts_its_ranks_reports_for_all_of_them(cluster):
    """One process gets the node's two devices; its ranks report to separate files."""
    program = """
devices = int(sys.argv[1])
assert (os.environ["NNODES"], os.environ["NPROC_PER_NODE"], "RANK" in os.environ) == ("1", "2", False)
for rank in range(devices):
    path = os.environ["TUNE_CLUSTER_REPORT"] + f"/rank{rank}.jsonl"
    if os.fork() == 0:
        steps(sleep_s=0.1, step_time_s=0.1 + 0.01 * rank)
        os._exit(0)
for _ in range(devices):
    os.wait()
"""
    case = Case(program, world_size=2)
    argv = (
        sys.executable,
        "-I",
        "-S",
        "-c",
        PRELUDE + program,
        "{local_devices}",
    )
    end = run(cluster, case, "own", launcher="own", argv=argv)
    assert end.outcome.kind == "measured", end.outcome
    measurement = end.outcome.measurement
    assert measurement.world_size == 2
    assert measurement.step_times_s == (0.11,) * 4


def test_it_reports_under_plain_torchrun_too(tmp_path):
    spec, out = tmp_path / "spec.json", tmp_path / "report.json"
    spec.write_text(json.dumps(to_json(command(CASES["good"], "plain"))))
    module = [sys.executable, "-m", "trials.script.runner", "--spec", spec, "--out", out]
    environment = {name: value for name, value in os.environ.items() if name != "TUNE_CLUSTER_ATTEMPT_DIR"}
    subprocess.run(module, check=True, env={**environment, "TMPDIR": str(tmp_path)}, cwd=ROOT)
    assert len(json.loads(out.read_text())["step_times_s"]) == 4
    assert list(tmp_path.glob("tune-cluster-*/script")) == []
