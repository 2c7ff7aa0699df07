"""Signs of life while torch compiles."""

import time
import types
import warnings

import pytest
import torch

from trials import kernels
from trials.kernels import CompileBeats, forget_compilations


@pytest.fixture
def told(monkeypatch):
    monkeypatch.setattr(kernels, "BEAT_S", 0.05)
    return []


@pytest.fixture
def beats(told):
    return CompileBeats(lambda phase, **more: told.append((phase, more["step"], more.get("is_compiling", False))))


def slowly(graph, inputs):
    time.sleep(0.5)
    return graph.forward


def test_a_slow_compilation_gives_signs_of_life_until_it_is_over(told, beats):
    with beats.listening(), warnings.catch_warnings(action="ignore"):
        forget_compilations()
        beats("warmup", step=1)
        torch.compile(torch.sin, backend=slowly)(torch.ones(2))
        assert told[0] == ("warmup", 1, False)
        assert told[-1] == ("warmup", 1, False), "it is over"
        assert len(told) >= 5
        assert set(told[1:-1]) == {("warmup", 1, True)}
        num_told = len(told)
        time.sleep(0.3)
        assert len(told) == num_told, "whoever does not compile is silent, so that a hang is found"


def test_kernels_that_triton_tunes_when_they_first_run_count_as_compiling(told, beats, monkeypatch):
    """A class of Triton's interface stands in: its kernels run on GPUs only."""

    class CachingAutotuner:
        def autotune_to_one_config(self, seconds):
            time.sleep(seconds)
            return "best"

    module = types.SimpleNamespace(CachingAutotuner=CachingAutotuner)
    monkeypatch.setitem(kernels.sys.modules, kernels._TRITON, module)
    own = CachingAutotuner.autotune_to_one_config
    torch._dynamo.reset()
    with beats.listening(), warnings.catch_warnings(action="ignore"):
        torch.compile(torch.sin, backend="eager")(torch.ones(2))
        told.clear()
        assert CachingAutotuner().autotune_to_one_config(0.3) == "best"
    assert [is_compiling for _, _, is_compiling in told][:3] == [True, True, True]
    assert not told[-1][2]
    assert CachingAutotuner.autotune_to_one_config is own


def test_what_is_wrapped_of_triton_is_there():
    """Both methods, by the names of the installed torch."""
    heuristics = pytest.importorskip(kernels._TRITON)
    assert all(hasattr(heuristics.CachingAutotuner, name) for name in kernels._TUNINGS)
