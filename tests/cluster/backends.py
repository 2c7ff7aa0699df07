"""The backends under test, each with its own way to make a gang that works, never ends or runs out of memory."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.base import Cluster, ClusterRequest, Deadlines
from cluster.connect import connect
from cluster.hardware.discovery import discover_node
from cluster.hardware.topology import uniform_topology
from cluster.local import LocalCluster
from cluster.virtual import Behaviour, Cost, SimulatedCluster
from tests.cluster import gangs
from trials.files import to_json
from trials.spec import Candidate, Layout, LlamaModel, Protocol, Recompute, TextData, TrialSpec, Workload

GB = 10**9
PATIENT = Deadlines(starting_s=1e9, warmup_s=1e9, measuring_s=1e9, stall_s=1e9)
"""Deadlines that a gang without end does not miss during a test."""
RUNNERS = {"works": "ok", "endless": "hangs_at_start", "out_of_memory": "out_of_memory"}
MICRO_BATCHES = {"works": 1, "endless": 2, "out_of_memory": 8}
"""Micro-batch size of the trial of each kind on virtual clusters; see :func:`cost` and :data:`ROWS`."""
ENDLESS_S = 1e12


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A cluster with four devices per node, and the gangs that every backend supports."""

    cluster: Cluster
    gang: Callable[[str], tuple[str, dict]]
    """Runner and specification of a gang of two ranks that ``works``, is ``endless`` or runs ``out_of_memory``."""
    clock: Callable[[], float] = time.monotonic
    """The clock by which the cluster measures time, in seconds."""

    def launch(self, kind, *, deadlines=None, **options):
        runner, spec = self.gang(kind)
        deadlines = deadlines or (PATIENT if kind == "endless" else None)
        return gangs.launch(self.cluster, runner, spec=spec, deadlines=deadlines, **options)

    def run(self, kind, **options):
        """Launch a gang and return its end."""
        return gangs.end_of(self.cluster, self.launch(kind, **options))

    def wait(self, seconds):
        """Wait so many ``seconds``; return the events of that time."""
        until_s, events = self.clock() + seconds, []
        while (left_s := until_s - self.clock()) > 0:
            events += self.cluster.poll(left_s)
        return events

    @property
    def nodes(self):
        return [node.name for node in self.cluster.topology.nodes]


def local(folder):
    cluster = LocalCluster(folder, discover_node(num_devices=4), preload=gangs.PRELOAD)
    return Backend(cluster=cluster, gang=process_gang)


def ray(folder):
    cluster = connect(ClusterRequest(devices_per_node=4), workdir=folder, preload=gangs.PRELOAD)
    return Backend(cluster=cluster, gang=process_gang)


def simulated(folder):
    cluster = simulated_cluster(num_nodes=2)
    return Backend(cluster=cluster, gang=virtual_gang, clock=cluster.clock)


MAKERS = {"local": local, "ray": ray, "simulated": simulated}


def process_gang(kind):
    return RUNNERS[kind], {"rank": 1}


def virtual_gang(kind):
    return "x", trial(micro_batch_size=MICRO_BATCHES[kind])


MODEL = LlamaModel(hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=4, ffn_hidden_size=128, vocab_size=256)
WORKLOAD = Workload(model=MODEL, data=TextData(), seq_length=32, global_batch_size=16)


def trial(world_size=2, *, micro_batch_size=1, num_full=4, num_steps=5):
    candidate = Candidate(
        layout=Layout(dp_replicate=world_size),
        micro_batch_size=micro_batch_size,
        recompute=Recompute(full=((num_full,),) if num_full else ()),
    )
    spec = TrialSpec(workload=WORKLOAD, candidate=candidate, protocol=Protocol(num_steps=num_steps), device="cuda")
    return to_json(spec)


def cost(spec):
    """8 s of work over the ranks; micro-batch 2 takes for ever, 8 needs more memory than there is, 16 is refused."""
    size = spec.candidate.micro_batch_size
    if size == 16:
        raise ValueError("micro_batch_size 16 is too much")
    step_s = ENDLESS_S if size == 2 else 8.0 / spec.candidate.layout.world_size
    return Cost(step_time_s=step_s, peak_bytes=size * 10 * GB)


def simulated_cluster(num_nodes=1, seed=0, **behaviour):
    topology = uniform_topology(num_nodes, 4, device_name="NVIDIA X", memory_bytes=64 * GB)
    return SimulatedCluster(topology, cost, behaviour=Behaviour(**behaviour), seed=seed)
