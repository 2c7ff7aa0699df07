"""Dumps of NCCL's Flight Recorder in the shapes in which torch 2.4 to 2.13 write them; no NCCL ran for them.

Written after ``dump`` and ``dump_json`` of torch's recorder: ``NCCLUtils.hpp`` for version 2.3 of the format, of torch
2.4; ``FlightRecorderDetail.hpp`` for 2.10, of torch 2.13, whose gloo dumps are recorded next to this file.
"""

GROUPS = {"0": ("default_pg", (0, 1, 2, 3)), "1": ("tp", (0, 1)), "2": ("tp", (2, 3))}
SHAPES = tuple((version, is_pickle) for version in ("2.3", "2.10") for is_pickle in (False, True))
"""Version of the format, and whether it is the pickle that NCCL writes on a request through its pipe, with stacks."""
STARTED_NS = 1795374022332990000


def entry(number, group, seq, *, name="all_reduce", state="completed", sizes=(8,), p2p=False, shape=("2.10", False)):
    """An operation. ``state`` is ``started`` only where timings are kept, and never in part of a coalesced group."""
    version, is_pickle = shape
    none = None if is_pickle else 0
    label, _ = GROUPS[group]
    found = {
        "record_id": number,
        "pg_id": int(group),
        "process_group": (group, label) if is_pickle else [group, label],
        "collective_seq_id": seq,
        "p2p_seq_id": int(p2p),
        "op_id": seq,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1795374022332884082 + number,
        "input_sizes": [list(sizes)],
        "input_dtypes": ["Float"],
        "output_sizes": [list(sizes)],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": STARTED_NS if state == "started" else none,
        "time_discovered_completed_ns": STARTED_NS if state == "completed" else none,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": p2p,
    }
    if version != "2.3":
        found |= {"thread_name": "pt_main_thread", "thread_id": "139927513458496"}
    if is_pickle:
        found["frames"] = [{"name": "all_reduce", "filename": "distributed_c10d.py", "line": 2806}]
    return found


def dump(rank, *entries, shape=("2.10", False)):
    """A rank's dump: all of its groups, then its latest operations, each as arguments and options of :func:`entry`."""
    version, is_pickle = shape
    config = {
        name: {"name": name, "desc": label, "ranks": f"[{', '.join(map(str, ranks))}]"}
        for name, (label, ranks) in GROUPS.items()
        if rank in ranks
    }
    last = -1 if is_pickle else "-1"
    kinds = ("enqueued", "started", "completed")
    found = {
        "version": version,
        "pg_config": config,
        "pg_status": {str(place): {f"last_{kind}_collective": last for kind in kinds} for place in range(len(config))},
    }
    if version != "2.3":
        found["comm_lib_version"] = "2.27.7"
    if entries:
        found["entries"] = [
            entry(number, *arguments, shape=shape, **options) for number, (arguments, options) in enumerate(entries)
        ]
    return found if is_pickle else {**found, "nccl_comm_state": {}}


def done(group, seq, **options):
    return (group, seq), options


def under_way(group, seq, **options):
    return (group, seq), {"state": "scheduled", **options}


def started(group, seq, **options):
    return (group, seq), {"state": "started", **options}


def send(own, peer, state="scheduled"):
    return ("0", 0), {"name": f"send {own}->{peer}", "p2p": True, "state": state}


def recv(own, peer, state="scheduled"):
    return ("0", 0), {"name": f"recv {own}<-{peer}", "p2p": True, "state": state}
