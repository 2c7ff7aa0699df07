"""Run by tests in a separate process, with this folder on the path: one rank of a trial of ours.

python train.py SPEC ANSWER        reads a TrialSpec as JSON, writes the report and the calls to the device
"""

import json
import os
import sys
from pathlib import Path

from trials.worker import run_rank


def main(spec, answer):
    report = run_rank(json.loads(Path(spec).read_text()), lambda *_, **__: None)
    package = sys.modules.get("torch_npu")
    calls = [] if package is None else package.CALLS
    Path(answer).write_text(json.dumps({"report": report, "calls": calls}))
    os._exit(0)  # as ranks do: nothing of the interpreter is to be taken down


if __name__ == "__main__":
    main(*sys.argv[1:])
