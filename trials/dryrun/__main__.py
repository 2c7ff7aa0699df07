"""Batch of simulations: requests as JSON on stdin, one line of JSON per reply on stdout, as they end.

Imports torch once, then forks for each. stdin holds ``{"requests": [...], "timeout_s": s, "max_children": n}``; a line
of stdout is ``{"index": i, "reply": {...}}``.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys

from trials.codec import from_json, to_json
from trials.dryrun.child import run_children
from trials.dryrun.records import DryRunRequest


def main() -> None:
    gc.disable()  # what is imported stays
    body = json.load(sys.stdin)
    requests: list[DryRunRequest] = [from_json(DryRunRequest, item) for item in body["requests"]]
    # What torch prints while it is patched is no reply.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # As an exception it ends the children too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    import torch

    from trials.dryrun.simulate import simulate

    torch.set_num_threads(1)
    gc.freeze()  # torch's own objects are many; no collection in a child need look at them
    gc.enable()
    replies = run_children(requests, simulate, timeout_s=body["timeout_s"], max_children=body["max_children"])
    for index, reply in replies:
        out.write(json.dumps({"index": index, "reply": to_json(reply)}) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
