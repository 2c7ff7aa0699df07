"""Shared by all tests."""

import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).parents[1]
# Forked ranks and child interpreters import runners from tests/ and benchmarks/.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run: a machine's load or a rare example must not decide whether the suite passes.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile(
    "explore", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers: what shares fixtures stays together, and groups with many slow tests begin first."""
    if not hasattr(config, "workerinput"):
        return
    num_slow: Counter[str] = Counter()
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.relative_to(ROOT / "tests").with_suffix("").as_posix()))
        num_slow[_group(item)] += item.get_closest_marker("slow") is not None
    items.sort(key=lambda item: -num_slow[_group(item)])


def _group(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    assert marker is not None
    return str(marker.args[0])


@pytest.fixture(autouse=True)
def no_process_group_stays() -> Iterator[None]:
    """The next test of this process, whichever it is, must be able to make its own."""
    yield
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left torch's default process group behind")
