"""Kernel settings, what is compiled, tuned and counted, memory formats, and signs of life while torch compiles."""

from __future__ import annotations

import time
import types
import warnings

import pytest
import torch
from torch import nn

from tests.trials.tiny import tiny_spec
from trials import kernels
from trials.failure import InfeasibleSpec
from trials.kernels import (
    ATTENTION_BACKENDS,
    Compilation,
    CompileBeats,
    KernelTuner,
    compilations,
    forget_compilations,
    graph_report,
    kernel_settings,
)
from trials.models.built_in import Layer
from trials.spec import Kernels, Layout, Precision
from trials.training.memory_format import choose_format, convert_weights, format_by_rule

CPU = torch.device("cpu")


def spec_with(**kernels):
    return tiny_spec(kernels=Kernels(**kernels))


def enabled_backends():
    cuda = torch.backends.cuda
    flags = {
        "flash": cuda.flash_sdp_enabled(),
        "efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "math": cuda.math_sdp_enabled(),
    }
    return {name for name, enabled in flags.items() if enabled}


@pytest.mark.parametrize("backend", ["flash", "math"])
def test_an_attention_backend_is_forced_for_the_run_only(backend):
    before = enabled_backends()
    with kernel_settings(spec_with(attention=backend), CPU):
        assert enabled_backends() == {backend}
    assert enabled_backends() == before == set(ATTENTION_BACKENDS)


@pytest.mark.parametrize("backend", ["efficient", "cudnn"])
def test_a_missing_attention_backend_names_those_available(backend):
    wanted = rf"attention '{backend}' is not available on this cpu device .*use one of: auto, flash, math"
    with pytest.raises(InfeasibleSpec, match=wanted), kernel_settings(spec_with(attention=backend), CPU):
        pass
    assert enabled_backends() == set(ATTENTION_BACKENDS)


def test_matmul_precision_is_restored_even_after_an_error():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError), kernel_settings(spec_with(matmul_precision="medium"), CPU):
        assert torch.get_float32_matmul_precision() == "medium"
        raise ZeroDivisionError
    assert torch.get_float32_matmul_precision() == before


def test_convolutions_compute_in_the_precision_of_matmuls():
    """Torch leaves convolutions on TF32 by default; the settings agree, or reading them is an error."""
    convolutions = torch.backends.cudnn
    assert convolutions.allow_tf32
    for precision, is_short in (("highest", False), ("high", True), ("medium", True)):
        with kernel_settings(spec_with(matmul_precision=precision), CPU):
            assert convolutions.allow_tf32 == is_short
            assert (convolutions.conv.fp32_precision == "tf32") == is_short
    assert convolutions.allow_tf32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return self.second(self.first(x))


def test_convolutions_are_counted_by_configuration():
    net = Net()
    with KernelTuner([net], Kernels(cudnn_tuning_range=(2, 3)), CPU) as tuner:
        assert tuner.last_step == 3
        sizes = {1: 9, 2: 8, 3: 8, 4: 8, 5: 9}
        for step, size in sizes.items():
            tuner.before_step(step)
            net(torch.zeros(1, 3, size, size))
    net(torch.zeros(1, 3, 8, 8))
    report = tuner.report()
    assert report is not None
    assert (report.num_configurations, report.num_lookups, report.num_hits) == (2, 4, 2)
    assert report.hit_rate == 0.5 and "no cuDNN" in report.note


def test_configurations_met_before_the_range_are_not_tuned():
    net, x = Net(), torch.zeros(1, 3, 8, 8)
    for measured_before, expected in ((False, (0, 2, 0)), (True, (2, 2, 2))):
        with KernelTuner([net], Kernels(cudnn_tuning_range=(2, 2)), CPU) as tuner:
            if measured_before:
                with tuner.before_training():
                    net(x)
            for step in (1, 2, 3):
                tuner.before_step(step)
                net(x)
        report = tuner.report()
        assert report is not None
        assert (report.num_configurations, report.num_lookups, report.num_hits) == expected
        assert ("2 configurations occurred before step 2" in report.note) != measured_before


def test_an_explicit_attention_backend_must_attend_to_parts_of_the_keys(monkeypatch):
    """Split sequences call the kernel itself, which may lack what torch does around it."""

    def no_kernel(*_, **__):
        raise RuntimeError("no kernel")

    kernels = Kernels(attention="flash")
    for method in ("all_gather", "ring", "ulysses"):
        with kernel_settings(tiny_spec(Layout(cp=2, cp_method=method), kernels=kernels), CPU):
            pass
    monkeypatch.setattr("trials.attention.attend", no_kernel)
    with kernel_settings(tiny_spec(Layout(cp=2, cp_method="ulysses"), kernels=kernels), CPU):
        pass
    with (
        pytest.raises(InfeasibleSpec, match=r"with head size 8; use one of: auto, $"),
        kernel_settings(tiny_spec(Layout(cp=2), kernels=kernels), CPU),
    ):
        pass


@pytest.mark.parametrize("change", ["dtype", "format", "autocast", "none"])
def test_changes_that_make_another_configuration(change):
    net, x = Net(), torch.zeros(2, 3, 8, 8)
    with KernelTuner([net], Kernels(cudnn_tuning_range=(1, 1)), CPU) as tuner:
        tuner.before_step(1)
        net(x)
        tuner.before_step(2)
        if change == "dtype":
            net.double()(x.double())
        elif change == "format":
            net(x.contiguous(memory_format=torch.channels_last))
        elif change == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                net(x)
        else:
            net(x)
    report = tuner.report()
    assert report is not None and report.hit_rate == (1.0 if change == "none" else 0.0)


def test_without_a_range_nothing_is_counted():
    net = Net()
    with KernelTuner([net], Kernels(), CPU) as tuner:
        assert not net.first._forward_pre_hooks and tuner.last_step == 0
    assert tuner.report() is None


def test_a_recompilation_is_counted_and_explained():
    """Reads torch's own log, so it fails when a torch release changes that."""
    forget_compilations()
    linear = Layer(4, 4)
    with warnings.catch_warnings(action="ignore"):
        linear.compile(backend="aot_eager", dynamic=False)
        for rows in (2, 3, 2):
            linear(torch.zeros(rows, 4)).sum().backward()
    report = graph_report(compilations())
    forget_compilations()
    assert (report.num_graphs, report.num_recompilations) == (2, 1)
    (reason,) = report.reasons
    assert "size mismatch at index 0. expected 2, actual 3" in reason
    assert report.compile_s > 0.0
    assert graph_report(compilations()).num_graphs == 0


@pytest.mark.exhaustive
def test_earlier_compilations_are_distinguished(tmp_path, monkeypatch):
    """Reads torch's own counters, so it fails when a torch release changes those."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compiled(*sizes):
        forget_compilations()
        with warnings.catch_warnings(action="ignore"):
            for size in sizes:
                layer = Layer(size, size)
                layer.compile(dynamic=False)
                layer(torch.zeros(2, size)).sum().backward()
        return graph_report(compilations())

    cold, warm, mixed = compiled(4), compiled(4), compiled(4, 8)
    assert [report.cache for report in (cold, warm, mixed)] == ["cold", "warm", "mixed"]
    assert cold.compile_s > warm.compile_s > 0.0 and cold.num_graphs == warm.num_graphs == 1


def test_a_graph_report_sums_up_and_shortens():
    log = [
        Compilation(True, 1.0, None),
        Compilation(False, 0.5, None),
        *(Compilation(True, 0.25, f"guard {i % 10} {'x' * 500}\nanother") for i in range(20)),
    ]
    report = graph_report(log)
    assert (report.num_graphs, report.num_recompilations, report.compile_s) == (21, 20, 6.5)
    assert len(report.reasons) == 8 and {len(reason) for reason in report.reasons} == {200}


@pytest.mark.parametrize(
    ("rule", "nchw_s", "nhwc_s", "chosen"),
    [("nhwc", 1.0, 1.04, "nhwc"), ("nhwc", 1.0, 2.0, "nchw"), ("nchw", 1.0, 0.97, "nchw"), ("nchw", 1.0, 0.5, "nhwc")],
)
def test_the_rule_stands_unless_the_other_format_is_clearly_faster(rule, nchw_s, nhwc_s, chosen):
    assert choose_format(rule, {"nchw": nchw_s, "nhwc": nhwc_s}) == chosen


def test_the_rule_goes_by_number_format():
    assert format_by_rule(Precision()) == "nchw"
    assert format_by_rule(Precision(level="O1", dtype="bfloat16")) == "nhwc"
    assert format_by_rule(Precision(level="O2", dtype="float16")) == "nhwc"


def test_converting_keeps_parameters_and_changes_strides_only():
    net = Net()
    before = {name: (parameter, parameter.detach().clone()) for name, parameter in net.named_parameters()}
    convert_weights([net], "nhwc")
    for name, parameter in net.named_parameters():
        assert parameter is before[name][0] and torch.equal(parameter, before[name][1])
    assert net.second.weight.is_contiguous(memory_format=torch.channels_last)
    convert_weights([net], "nchw")
    assert net.second.weight.is_contiguous()


@pytest.fixture
def beats_seen(monkeypatch):
    monkeypatch.setattr(kernels, "BEAT_S", 0.05)
    return []


@pytest.fixture
def beats(beats_seen):
    return CompileBeats(lambda phase, **more: beats_seen.append((phase, more["step"], more.get("is_compiling", False))))


def slowly(graph, inputs):
    time.sleep(0.5)
    return graph.forward


def test_a_slow_compilation_reports_progress_until_it_ends(beats_seen, beats):
    with beats.listening(), warnings.catch_warnings(action="ignore"):
        forget_compilations()
        beats("warmup", step=1)
        torch.compile(torch.sin, backend=slowly)(torch.ones(2))
        assert beats_seen[0] == ("warmup", 1, False)
        assert beats_seen[-1] == ("warmup", 1, False), "it is over"
        assert len(beats_seen) >= 5
        assert set(beats_seen[1:-1]) == {("warmup", 1, True)}
        num_beats = len(beats_seen)
        time.sleep(0.3)
        assert len(beats_seen) == num_beats, "without compilation it is silent, so that a hang is found"


def test_kernels_that_triton_tunes_when_they_first_run_count_as_compiling(beats_seen, beats, monkeypatch):
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
        beats_seen.clear()
        assert CachingAutotuner().autotune_to_one_config(0.3) == "best"
    assert [is_compiling for _, _, is_compiling in beats_seen][:3] == [True, True, True]
    assert not beats_seen[-1][2]
    assert CachingAutotuner.autotune_to_one_config is own


def test_the_wrapped_triton_methods_exist():
    """Both methods, by the names of the installed torch."""
    heuristics = pytest.importorskip(kernels._TRITON)
    assert all(hasattr(heuristics.CachingAutotuner, name) for name in kernels._TUNINGS)
