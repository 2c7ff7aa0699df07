"""Launches gangs in tests, waits for their ends and looks at the processes that are left of them."""

import itertools
import time
from pathlib import Path

from cluster.base import Deadlines, GangEnded, GangLaunch
from cluster.hardware.topology import Placement, Pool
from cluster.processes import process_info

PRELOAD = ("torch", "torch.distributed", "tests.cluster.runners")
LIMIT_S = 120.0
_numbers = itertools.count()


def launch(cluster, runner, *, spec=None, deadlines=None, on=None, options=None, **place):
    """Launch ``runner`` on the devices ``on``, or on those that :func:`placed` finds, and return the launch."""
    number = next(_numbers)
    gang = GangLaunch(
        attempt_id=f"a{number:03d}-{runner.replace('_', '-').replace(':', '-')}",
        token=f"token{number}",
        runner=runner if ":" in runner else f"tests.cluster.runners:{runner}",
        spec=spec or {},
        placement=Placement(ranks=on, reserved=on) if on else placed(cluster, **place),
        deadlines=deadlines or Deadlines(),
        **(options or {}),
    )
    cluster.launch(gang)
    return gang


def placed(cluster, *, world_size=2, devices=None, isolation="device"):
    """Free devices for a gang, those of ``devices`` or any."""
    pool = Pool(cluster.topology)
    if devices is not None:
        pool.take(set(cluster.topology.devices) - set(devices))
    return pool.place(world_size=world_size, tp=1, isolation=isolation)


def events_until_end(cluster, *gangs):
    """All events until each of ``gangs`` has ended."""
    waiting, events = {gang.attempt_id for gang in gangs}, []
    give_up_s = time.monotonic() + LIMIT_S
    while waiting:
        assert time.monotonic() < give_up_s, f"no end of {waiting}; seen: {events}"
        got = cluster.poll(5.0)
        events += got
        waiting -= {event.attempt_id for event in got if isinstance(event, GangEnded)}
    return events


def end_of(cluster, gang):
    """The gang's end, the last of its events."""
    *_, last = [event for event in events_until_end(cluster, gang) if event.attempt_id == gang.attempt_id]
    assert isinstance(last, GangEnded)
    return last


def run(cluster, runner, **options):
    return end_of(cluster, launch(cluster, runner, **options))


def wait_for_pids(folder, count):
    """Wait until ``count`` processes have signed in."""
    wait_until(lambda: len(list(Path(folder).iterdir())) >= count, f"{count} processes in {folder}")


def wait_until(condition, what):
    give_up_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < give_up_s, f"gave up waiting for {what}"
        time.sleep(0.02)


def living(folder):
    """Pids of the processes that signed in and still exist; zombies count until they are reaped."""
    pids = [int(path.name) for path in Path(folder).iterdir()]
    assert pids, "no process signed in"
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def parent(pid):
    return process_info(pid).parent_pid
