"""Sets knobs of the program's DataLoader: workers, prefetch, pinned memory, persistent workers, and the hill climb.

Settings change in two cases: when a loader is first iterated before any training step, and on the loader iterated last
before the first training call. Loaders of later evaluations stay unchanged, as do data set, sampler, collate function
and order. Items are tried only in a forked process, so this process opens, draws and counts nothing.
"""

from __future__ import annotations

import collections
import fcntl
import functools
import itertools
import json
import os
import select
import signal
import stat
import sys
import time
import warnings
from typing import Any, Callable, Iterator

from .knob_file import APPLIED, KNOBS, NO_EFFECT, accelerator_missing, torch_version
from .roots import Root
from .steps import generator_states, guarded

NAMES = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
PREFETCH = 2
WORKERS = (0, 1, 2, 4, 8, 16, 32)
GAIN = 0.95
"""The climb continues while more workers take less than this fraction of the time."""
CLIMB_S = 6.0
POINT_S = 1.0
BATCHES = 24
PROBE_S = 20.0
MAX_ATTRIBUTES = 1000
PLACES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen", "<string>", "tune_cluster_hook")


class LoaderPlace:
    """Place at which a loader is created, and facts about the loader."""

    def __init__(self, site: str) -> None:
        self.site = site
        self.is_tuned = False
        self.workers = 0
        self.prefetch: int | None = None
        self.is_pinned = False
        """Setting of the last iterator. The iterator itself is not kept, because that would keep its workers alive."""
        self.items: dict[str, Any] = {}
        """Observations of an item in the forked process: ``draws``, ``error``, ``device``."""
        self.climb: dict[str, float] = {}
        self.attributes: Any = None
        self.problem: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Replace it by None in copies and pickles of a loader."""
        return type(None), ()


class Loaders:
    """All loaders of the program; the record of each is an attribute of the loader."""

    ATTRIBUTE = "_tune_cluster_place"

    def __init__(self) -> None:
        self._made: collections.Counter[str] = collections.Counter()
        self.last: Callable[[], Any] = lambda: None
        """The loader that was iterated last."""
        self.training: str | None = None
        """Place at which the training loader is created, once known."""

    def made(self, loader: Any) -> None:
        """Record a new loader, and its index among those created by this line since one of them was iterated."""
        line = _site()
        loader.__dict__[self.ATTRIBUTE] = LoaderPlace(f"{line}#{self._made[line]}")
        self._made[line] += 1

    def iterated(self, loader: Any) -> None:
        """Act before a loader's iterator is created."""
        place = loader.__dict__.get(self.ATTRIBUTE)
        if place is None:
            return
        self._made.pop(place.site.rpartition("#")[0], None)
        if self.training is not None and place.site != self.training:
            return
        if self.training is None and not sys.modules["torch"].is_grad_enabled():
            return  # an evaluation
        if not KNOBS.is_loader_expected(place.site) or not KNOBS.is_expected(torch=torch_version()):
            return
        if not place.is_tuned:
            place.is_tuned = True
            place.problem = _tuned(loader, place)
        elif loader.persistent_workers and place.attributes is not None:
            _keep_workers(loader, place)

    def feeds(self, root: Root, args: Any, kwargs: Any) -> None:
        """Record at the first training call that the loader iterated last has fed it."""
        loader = self.last()
        if self.training is not None or loader is None:
            return
        place = loader.__dict__[self.ATTRIBUTE]
        self.training = KNOBS.traits.loader = place.site
        self.last = lambda: None
        if not KNOBS.is_loader_expected(place.site):
            KNOBS.is_expected(loader=place.site)
        if place.problem:
            for name in NAMES:
                KNOBS.refuse(name, place.problem)
        elif place.is_tuned:
            for name in NAMES:
                if KNOBS.value(name) is not None:
                    KNOBS.applied(name, functools.partial(SEEN[name], loader, place))


LOADERS = Loaders()


def data_loader(module: Any) -> None:
    """Hook for ``torch.utils.data.dataloader``."""
    kind = module.DataLoader
    made, iterate = kind.__init__, kind.__iter__

    @functools.wraps(made)
    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        guarded("loader made")(LOADERS.made)(self)

    @functools.wraps(iterate)
    def iterated(self: Any) -> Any:
        guarded("loader")(LOADERS.iterated)(self)
        iterator = iterate(self)
        guarded("loader's iterator")(_begun)(self, iterator)
        return iterator

    kind.__init__, kind.__iter__ = initialise, iterated


def _begun(loader: Any, iterator: Any) -> None:
    place = loader.__dict__.get(Loaders.ATTRIBUTE)
    if place is None or not sys.modules["torch"].is_grad_enabled():
        return
    place.workers = sum(worker.is_alive() for worker in getattr(iterator, "_workers", ()))
    place.prefetch = getattr(iterator, "_prefetch_factor", None)
    place.is_pinned = bool(getattr(iterator, "_pin_memory", False))
    if LOADERS.training is not None:
        return
    LOADERS.last = lambda: loader  # until the first backward pass: a program may hold only its iterator
    if place.is_tuned and getattr(iterator, "_workers", None):
        _check_first_batch(iterator)


def _check_first_batch(iterator: Any) -> None:
    """Refuse a program that draws random numbers before its first batch: without workers, the sampler draws after it.

    For one call, the iterator has a different class.
    """
    torch = sys.modules["torch"]
    kind, state = type(iterator), torch.get_rng_state()

    class FirstBatch(kind):  # type: ignore[misc, valid-type]
        """Returns one batch, then becomes its original class again."""

        def __next__(self) -> Any:
            self.__class__ = kind
            if not torch.equal(torch.get_rng_state(), state):
                reason = "the program draws random numbers between iter(loader) and the first batch: the order of the"
                for name in NAMES:
                    KNOBS.refuse(name, f"{reason} data would change")
            return kind.__next__(self)

    iterator.__class__ = FirstBatch


def _site() -> str:
    """Return the program's file and line that create a loader."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not any(place in name for place in PLACES):
            return f"{os.path.basename(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


# ---- Applying


def _tuned(loader: Any, place: LoaderPlace) -> str | None:
    try:
        return tune(loader, place)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"


def tune(loader: Any, place: LoaderPlace) -> str | None:
    """Change the loader's settings. Return why it cannot take them."""
    torch = sys.modules["torch"]
    if KNOBS.value("pin_memory") is not None:
        reason = accelerator_missing(torch) if KNOBS.value("pin_memory") else None
        if reason:
            KNOBS.refuse("pin_memory", reason)
        else:
            loader.pin_memory = bool(KNOBS.value("pin_memory"))
    wanted = KNOBS.value("num_workers")
    reason = _workers_problem(loader, place, wanted)
    if reason:
        return reason
    if wanted is not None:
        count = _climbed(place) if wanted == "auto" else int(wanted)
        loader.num_workers = count
    if loader.num_workers:
        prefetch = KNOBS.value("prefetch_factor")
        loader.__dict__["prefetch_factor"] = prefetch or loader.prefetch_factor or PREFETCH
        if KNOBS.value("persistent_workers") is not None:
            loader.__dict__["persistent_workers"] = bool(KNOBS.value("persistent_workers"))
    else:
        loader.__dict__.update(prefetch_factor=None, persistent_workers=False)
    if loader.persistent_workers and KNOBS.value("persistent_workers"):
        place.attributes = _attributes(loader.dataset)
    return None


def _workers_problem(loader: Any, place: LoaderPlace, wanted: Any) -> str | None:
    if wanted is None or wanted == loader.num_workers:
        return None
    if wanted != "auto" and (not isinstance(wanted, int) or wanted < 0):
        return f"{wanted!r} is not a number of workers"
    if loader._dataset_kind != 0 and (wanted == "auto" or wanted > 1 or loader.num_workers > 1):
        return "iterable data set: each worker would yield all of it, or a different part of it"
    if wanted == 0 or loader._dataset_kind != 0:
        return None
    place.items = in_fork(functools.partial(_inspect, loader, climbs=wanted == "auto")) or {"error": "no answer"}
    place.climb = place.items.get("climb", {})
    if place.items.get("device"):
        return f"items are tensors on {place.items['device']}: worker processes cannot make them"
    if place.items.get("error"):
        return f"an item cannot be loaded in another process: {place.items['error']}"
    return None


def _climbed(place: LoaderPlace) -> int:
    """Return the fewest workers that are about as fast as the fastest."""
    table = {int(count): seconds for count, seconds in place.climb.items()}
    fastest = min(table.values(), default=0.0)
    return min((count for count, seconds in table.items() if seconds <= fastest / GAIN), default=0)


def _keep_workers(loader: Any, place: LoaderPlace) -> None:
    """Start new workers if the program has changed the data set, of which they hold a copy."""
    now = _attributes(loader.dataset)
    if now != place.attributes:
        loader.__dict__["persistent_workers"] = False
        loader._iterator = place.attributes = None
        KNOBS.refuse("persistent_workers", "the program changes its data set between epochs")


def _attributes(data_set: Any) -> list[Any]:
    """Return plain values of a data set and of the objects in it, to detect changes."""
    found: list[Any] = []
    seen: set[int] = set()
    todo = collections.deque([(data_set, 3)])
    while todo and len(found) < MAX_ATTRIBUTES:
        value, depth = todo.popleft()
        if value is None or isinstance(value, (bool, int, float, str, bytes)):
            found.append(value)
            continue
        found.append(id(value))
        if id(value) in seen or not depth:
            continue
        seen.add(id(value))
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        inner = inner or getattr(value, "__dict__", {}).values()
        todo.extend((one, depth - 1) for one in itertools.islice(inner, MAX_ATTRIBUTES))
    return found


# ---- Observations of workers in a forked process


def in_fork(function: Callable[[], Any]) -> Any:
    """Run ``function`` in a fork of this process, which stays unchanged. Return its result as JSON; None if none."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a process with threads forks, as torch itself does for workers
        child = os.fork()
    if not child:
        _answer(function, writing)
    os.close(writing)
    data = b""
    end = time.monotonic() + PROBE_S
    while time.monotonic() < end and select.select([reading], [], [], max(0.0, end - time.monotonic()))[0]:
        chunk = os.read(reading, 1 << 16)
        if not chunk:
            break
        data += chunk
    os.close(reading)
    try:
        os.killpg(child, signal.SIGKILL)
    except OSError:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return json.loads(data) if data else None


def _answer(function: Callable[[], Any], writing: int) -> None:
    try:
        os.setpgid(0, 0)
        signal.alarm(int(PROBE_S))
        LOADERS.training = ""  # loaders created here are not the program's
        sys.modules["torch"].set_num_threads(1)
        found = function()
    except BaseException as error:
        found = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    try:
        os.write(writing, json.dumps(found).encode())
    finally:
        os._exit(0)


def _inspect(loader: Any, *, climbs: bool) -> dict[str, Any]:
    """Return, in the forked process, an item's device, whether it draws random numbers, and the climb."""
    torch = sys.modules["torch"]
    indices = next(iter(loader._index_sampler))
    before, positions = generator_states(), _own_positions()
    indices = indices if isinstance(indices, (list, tuple)) else [indices]
    item = loader.dataset[indices[0]]
    loader.dataset[indices[-1]]  # the first one may be in a buffer
    found: dict[str, Any] = {"draws": before != generator_states()}
    moved = _moved(positions)
    if moved:
        return {"error": f"it reads {moved}, which was already open: processes share the position in an open file"}
    parts = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else [item]
    devices = [part.device.type for part in parts if torch.is_tensor(part) and part.device.type != "cpu"]
    if devices:
        found["device"] = devices[0]
    elif climbs:
        found["climb"] = dict(_climb(loader))
    return found


def _own_positions() -> dict[int, int]:
    """Reopen files that the program reads, because their positions are shared with it. Return the positions."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        try:
            number = int(name)
            mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
            if mode == os.O_WRONLY or not stat.S_ISREG(os.fstat(number).st_mode):
                continue
            own = os.open(f"/proc/self/fd/{name}", mode)
            found[number] = os.lseek(own, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(own, number, inheritable=False)
            os.close(own)
        except OSError:  # closed in the meantime, like the folder itself
            continue
    return found


def _moved(positions: dict[int, int]) -> str:
    """Return the name of a file that was read from its position; empty if none was."""
    for number, position in positions.items():
        try:
            if os.lseek(number, 0, os.SEEK_CUR) != position:
                return os.path.basename(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    return ""


def _climb(loader: Any) -> Iterator[tuple[int, float]]:
    """Yield seconds per batch by the number of workers, until more do not help."""
    began, best = time.monotonic(), float("inf")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cores = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    batches = list(itertools.islice(iter(loader._index_sampler), BATCHES))
    for count in WORKERS:
        if count > cores or time.monotonic() - began > CLIMB_S:
            return
        seconds = _time_per_batch(loader, batches, count)
        yield count, seconds
        if count and seconds > best * GAIN:
            return
        best = min(best, seconds)


def _time_per_batch(loader: Any, batches: list[Any], workers: int) -> float:
    settings = {"prefetch_factor": KNOBS.value("prefetch_factor") or PREFETCH} if workers else {}
    sampler = {"batch_sampler": batches} if loader._auto_collation else {"batch_size": None, "sampler": batches}
    trial = sys.modules["torch"].utils.data.DataLoader(
        loader.dataset,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        **sampler,
        **settings,
    )
    iterator = iter(trial)
    next(iterator)
    began, count = time.perf_counter(), 0
    for _ in iterator:
        count += 1
        if time.perf_counter() - began > POINT_S:
            break
    return (time.perf_counter() - began) / max(count, 1)


# ---- Evidence


def _workers_seen(loader: Any, place: LoaderPlace) -> tuple[str, str]:
    detail = f"{place.workers} worker processes alive, loader of {place.site}"
    if place.climb:
        detail += ", ms per batch by workers " + ", ".join(f"{n}: {1e3 * s:.3g}" for n, s in place.climb.items())
    if place.items.get("draws"):
        detail += ", items draw random numbers, which depend on the number of workers"
    return (APPLIED if place.workers == loader.num_workers else NO_EFFECT), detail


def _prefetch_seen(loader: Any, place: LoaderPlace) -> tuple[str, str]:
    now = place.prefetch
    if now is None:
        return (NO_EFFECT if KNOBS.value("prefetch_factor") else APPLIED), "no worker processes, no prefetching"
    return (APPLIED if now == (KNOBS.value("prefetch_factor") or PREFETCH) else NO_EFFECT), f"{now} batches per worker"


def _pin_seen(loader: Any, place: LoaderPlace) -> tuple[str, str]:
    now = place.is_pinned
    return (APPLIED if now == bool(KNOBS.value("pin_memory")) else NO_EFFECT), f"pinned: {str(now).lower()}"


def _persistent_seen(loader: Any, place: LoaderPlace) -> tuple[str, str]:
    now, wanted = bool(loader.persistent_workers), bool(KNOBS.value("persistent_workers"))
    if now != wanted and not loader.num_workers:
        return NO_EFFECT, "no worker processes"
    return (APPLIED if now == wanted else NO_EFFECT), "kept between epochs" if now else "restarted for each epoch"


SEEN: dict[str, Callable[[Any, LoaderPlace], Any]] = {
    "num_workers": _workers_seen,
    "prefetch_factor": _prefetch_seen,
    "pin_memory": _pin_seen,
    "persistent_workers": _persistent_seen,
}
