"""Shared by all tests."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Forked ranks and child interpreters import runners from tests/ and benchmarks/.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("OMP_NUM_THREADS", "1")
