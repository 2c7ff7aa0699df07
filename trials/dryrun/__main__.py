"""Simulation of a batch of ranks, each in a forked child: JSON requests on stdin, one JSON reply per line on stdout.

stdin is ``{"requests": [...], "timeout_s": s, "max_children": n}``. When a simulation ends, it writes the line
``{"index": i, "reply": {...}}`` on stdout. torch is imported only once. Each child patches its own copy, and an abort
ends only that child.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trials.dryrun.estimate import DryRunRequest, RankRun, Reply, RunFailure
from trials.failure import classify
from trials.files import from_json, to_json

Work = Callable[[DryRunRequest], RankRun]


def main() -> None:
    """Read the requests and answer all of them."""
    gc.disable()  # imported modules stay alive
    body = json.load(sys.stdin)
    requests: list[DryRunRequest] = [from_json(DryRunRequest, item) for item in body["requests"]]
    # Output that torch prints while being patched must not mix with replies.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Raised as an exception, so that the children end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    import torch

    from trials.dryrun import graphs
    from trials.dryrun.simulate import simulate

    if any(graphs.is_simulated(request.spec) for request in requests):
        graphs.prepare()
    torch.set_num_threads(1)
    gc.freeze()  # torch has many objects, which collections in children can skip
    gc.enable()
    replies = run_children(requests, simulate, timeout_s=body["timeout_s"], max_children=body["max_children"])
    for index, reply in replies:
        out.write(json.dumps({"index": index, "reply": to_json(reply)}) + "\n")
        out.flush()


def run_children(
    requests: Sequence[DryRunRequest], work: Work, *, timeout_s: float, max_children: int
) -> Iterator[tuple[int, Reply]]:
    """Run every request in a separate child, ``max_children`` at a time; yield index and reply as they end.

    A child that runs longer than ``timeout_s`` is killed, as are all when the iterator is closed.
    """
    waiting = list(enumerate(requests))[::-1]
    children: list[_Child] = []
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or children:
                while waiting and len(children) < max_children:
                    index, request = waiting.pop()
                    child = _start(index, request, work, timeout_s)
                    children.append(child)
                    selector.register(child.pipe, selectors.EVENT_READ, child)
                for child in _ended(selector, children):
                    selector.unregister(child.pipe)
                    children.remove(child)
                    yield child.index, child.finish()
        finally:
            for child in children:
                child.kill()


@dataclass(slots=True, kw_only=True)
class _Child:
    index: int
    pid: int
    pipe: int
    deadline_s: float
    timeout_s: float
    text: bytes = b""
    timed_out: bool = False

    def read(self) -> bool:
        """Read what the child has written; return False at its end."""
        piece = os.read(self.pipe, 1 << 16)
        self.text += piece
        return bool(piece)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.pipe)
        os.waitpid(self.pid, 0)

    def finish(self) -> Reply:
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        if self.timed_out:
            return _failed("timeout", f"the simulation took longer than {self.timeout_s:.0f} s")
        if os.WIFSIGNALED(status):
            name = signal.Signals(os.WTERMSIG(status)).name
            hint = "; the machine may be short of memory" if name == "SIGKILL" else ""
            return _failed("died", f"the simulation was killed by {name}{hint}")
        if not self.text:
            return _failed("died", f"the simulation ended without a result, exit status {os.WEXITSTATUS(status)}")
        return from_json(Reply, json.loads(self.text))


def _start(index: int, request: DryRunRequest, work: Work, timeout_s: float) -> _Child:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _run(request, work, theirs)
    os.close(theirs)
    return _Child(index=index, pid=pid, pipe=ours, deadline_s=time.monotonic() + timeout_s, timeout_s=timeout_s)


def _run(request: DryRunRequest, work: Work, pipe: int) -> None:
    """Run the simulation in the child; exit without the parent's exit handlers."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    warnings.simplefilter("ignore")  # they concern things that a simulation does not do
    try:
        reply = Reply(run=work(request))
    except BaseException as error:
        is_infeasible = classify(error) == "infeasible"
        words = str(error) if is_infeasible else f"{type(error).__name__}: {error}"
        reply = _failed("infeasible" if is_infeasible else "error", words)
    try:
        with os.fdopen(pipe, "wb") as file:
            file.write(json.dumps(to_json(reply)).encode())
    finally:
        os._exit(0)


def _ended(selector: selectors.BaseSelector, children: list[_Child]) -> list[_Child]:
    """Wait until a child writes or is late; return the children that are finished."""
    now_s = time.monotonic()
    ended = []
    for key, _ in selector.select(max(0.0, min(child.deadline_s for child in children) - now_s)):
        if not key.data.read():
            ended.append(key.data)
    for child in children:
        if child not in ended and time.monotonic() > child.deadline_s:
            child.timed_out = True
            os.kill(child.pid, signal.SIGKILL)
            ended.append(child)
    return ended


def _failed(reason: str, message: str) -> Reply:
    return Reply(failure=RunFailure(reason=reason, message=message))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
