"""The runner of training programs, which also records how much memory the process of the rank took."""

import os
import re
from pathlib import Path

from trials.script import runner


def run_rank(spec, progress):
    try:
        return runner.run_rank(spec, progress)
    finally:
        status = Path("/proc/self/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)[1]
        Path(os.environ["TUNE_CLUSTER_ATTEMPT_DIR"], f"peak{os.environ['RANK']}").write_text(peak)
