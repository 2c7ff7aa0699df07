"""A runner whose ranks leave files."""

import gzip
import os
from pathlib import Path

from tests.cluster.runners import report
from trials.reports import FOLDER_VARIABLE


def write_files(spec, progress):
    """Leave a file that comes home, and one that stays on the node and holds the inode of the first."""
    rank = os.environ["RANK"]
    folder = Path(os.environ[FOLDER_VARIABLE])
    folder.mkdir(exist_ok=True)
    trace = folder / f"rank{rank}.trace.json.gz"
    trace.write_bytes(gzip.compress(f"rank {rank}".encode()))
    (folder / f"inode-{rank}").write_text(str(trace.stat().st_ino))
    return report()
