"""Shared by all tests."""

import gc
import os
import signal
import sys
import tempfile
from collections import Counter, defaultdict

import pytest
from hypothesis import HealthCheck, settings

from orchestrator.cli.main import GC_THRESHOLDS
from tests.support import ROOT
from trials import secrets

# Forked ranks and child interpreters import runners from tests/ and benchmarks/.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests neither see nor change the homes that the user has submitted sweeps to.
_STATE = tempfile.TemporaryDirectory(prefix="state-")
os.environ["XDG_STATE_HOME"] = _STATE.name
# A shell has what it runs in the background ignore Ctrl-C, which the processes started here would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.set_threshold(*GC_THRESHOLDS)

# The same examples in every run: a machine's load or a rare example must not decide whether the suite passes.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile(
    "explore", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(autouse=True)
def _secrets_are_forgotten():
    """Variables that a sweep file calls secret are so for the rest of its process: here, of its test."""
    before = os.environ.get(secrets.VARIABLES)
    yield
    os.environ.pop(secrets.VARIABLES, None)
    if before is not None:
        os.environ[secrets.VARIABLES] = before


class FailuresAtOnce:
    """Shows each failure when it happens: a run that is cut off has shown what failed until then."""

    def __init__(self, config):
        self.config = config

    def pytest_runtest_logreport(self, report):
        if report.failed:
            reporter = self.config.pluginmanager.get_plugin("terminalreporter")
            reporter.write_line(f"\n{report.when} of {report.nodeid}\n{report.longreprtext[-3000:]}")


def pytest_configure(config):
    if config.getoption("numprocesses", None):
        config.pluginmanager.register(FailuresAtOnce(config))


WEIGHTS = {"slow": 5, "exhaustive": 1, "ray": 10, "fault": 5, "representative": 2}
"""About how long a test of a marker takes, relative to each other."""
PATIENT_S = 500
"""From here on a time limit catches a test that takes minutes."""


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(config, items):
    """Marks what only ``make test-exhaustive`` runs. With several workers, each takes whole files: those that take
    longest begin first."""
    _mark_exhaustive(items)
    if not hasattr(config, "workerinput"):
        return
    weights = Counter()
    for item in items:
        weights[item.path] += sum(WEIGHTS.get(marker.name, 0) for marker in item.iter_markers())
        limit = item.get_closest_marker("timeout")
        if limit is not None and limit.args and limit.args[0] >= PATIENT_S:
            weights[item.path] += int(limit.args[0] / 20)
    items.sort(key=lambda item: -weights[item.path])


def _mark_exhaustive(items):
    """All cases of a parametrised test but those that its marker ``representative`` names by id."""
    ids = defaultdict(set)
    kept = {}
    for item in items:
        marker = item.get_closest_marker("representative")
        if marker is not None and isinstance(item, pytest.Function):
            test = item.nodeid.partition("[")[0]
            ids[test].add(item.callspec.id)
            kept[test] = marker.args
            if item.callspec.id not in marker.args:
                item.add_marker(pytest.mark.exhaustive)
    for test, names in kept.items():
        if len(ids[test]) > 1 and (unknown := set(names) - ids[test]):
            known = ", ".join(sorted(ids[test]))
            raise pytest.UsageError(f"{test}: no case is called {', '.join(sorted(unknown))}, only {known}")


def pytest_collection_finish():
    """Garbage collections in tests, and in processes that they fork, skip the modules and tests loaded by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_process_group_stays():
    """The next test of this process, whichever it is, must be able to make its own."""
    yield
    dist = getattr(sys.modules.get("torch"), "distributed", None)
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left torch's default process group behind")
