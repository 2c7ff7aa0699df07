"""User programs for gangs of the tests: no torch where none is needed, measured by what they print."""

from __future__ import annotations

import sys

from cluster.node.agent import SCRIPT_PRELOAD
from trials.files import to_json
from trials.script.command import LogFormat, ScriptCommand
from trials.spec import Protocol

RUNNER = "trials.script.runner:run_rank"
PRELOAD = SCRIPT_PRELOAD
LINE = r"step (?P<step>\d+) loss (?P<loss>\S+) took (?P<step_ms>\d+) ms"
NUM_STEPS = 3

MEETS = """
import os, socket, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    with socket.create_server(place) as server:
        peers = [server.accept()[0] for _ in range(size - 1)]
else:
    while True:
        try:
            peer = socket.create_connection(place)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
"""
"""All ranks meet at the given address, like torch's store."""

STEPS = f"""
import time
def train(num_steps={NUM_STEPS} + 1):
    for step in range(1, num_steps + 1):
        time.sleep(0.02)
        print(f"step {{step}} loss {{3 - 0.1 * step}} took 20 ms", flush=True)
"""

DDP = """
import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(dist.get_rank())
for step in range(1, 5):
    before = time.perf_counter()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        took = round(1000 * (time.perf_counter() - before)) + 1
        print(f"step {step} loss {total.item() / dist.get_world_size():.4f} took {took} ms", flush=True)
dist.barrier()
os._exit(0)  # gloo's threads abort the process now and then while it ends
"""
"""A typical user program: it does not use our API, and only rank 0 prints."""


def write(folder, text):
    """The program as a file in a separate folder."""
    folder.mkdir(exist_ok=True)
    path = folder / "train.py"
    path.write_text(text)
    return path


def spec(path, *, argv=(), num_devices=2, **changes):
    """The specification that ranks get for the program at ``path``."""
    values = {
        "argv": (sys.executable, *argv, str(path)),
        "cwd": str(path.parent),
        "log": LogFormat(name="pattern", pattern=LINE),
        "hook": False,
        "protocol": Protocol(min_warmup_steps=1, max_warmup_steps=1, num_steps=NUM_STEPS, max_steps=NUM_STEPS),
        "num_devices": num_devices,
        "tokens_per_step": 64,
        "samples_per_step": 8,
        **changes,
    }
    return to_json(ScriptCommand(**values))
