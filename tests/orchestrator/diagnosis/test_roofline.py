"""Operators far from what the device can do are named, with what would help."""

from __future__ import annotations

from types import SimpleNamespace

from orchestrator.diagnosis.roofline import Roof, far_operators, roof_of
from trials.reports import MatmulRate, OperatorTime, Rate
from trials.spec import Candidate, Kernels, Precision

ROOF = Roof(flops_per_s=1e12, bytes_per_s=1e11, source="probe")
PLAIN, COMPILED = Candidate(micro_batch_size=1), Candidate(micro_batch_size=1, kernels=Kernels(compile="block"))


def operator(name, seconds, share, flops=0.0, num_bytes=0.0):
    return OperatorTime(
        name=name, num_calls=1.0, cpu_s=seconds, device_s=0.0, share=share, num_flops=flops, num_bytes=num_bytes
    )


def lines(*operators, candidate=PLAIN):
    return far_operators(SimpleNamespace(operators=operators), candidate, ROOF)


def test_only_operators_that_take_much_and_reach_little_are_named():
    near = operator("aten::mm", 1.0, 0.5, flops=0.8e12, num_bytes=1e9)
    small = operator("aten::add", 1.0, 0.01, num_bytes=1e9)
    unknown = operator("aten::convolution", 1.0, 0.3)
    assert lines(near, small, unknown) == []
    far = operator("aten::mm", 1.0, 0.5, flops=0.1e12, num_bytes=1e9)
    assert lines(far) == [
        "aten::mm takes 50% of operator time and reaches 10% of the roofline (probe): its matrices are small or oddly "
        "shaped; a larger micro_batch_size or a smaller tp makes them larger"
    ]


def test_the_remedy_depends_on_the_operator_and_on_what_is_on():
    stream = operator("aten::mul", 1.0, 0.2, num_bytes=1e10)
    assert lines(stream)[0].endswith("compile fuses it with others")
    assert "micro_batch_size" in lines(stream, candidate=COMPILED)[0]
    loss = operator("aten::_log_softmax", 1.0, 0.2, num_bytes=1e10)
    scores = operator("aten::bmm", 1.0, 0.2, flops=1e10, num_bytes=1e9)
    copies = operator("aten::copy_", 1.0, 0.2, num_bytes=1e10)
    fused = operator("aten::_scaled_dot_product_flash_attention", 1.0, 0.2, flops=1e10, num_bytes=1e9)
    for one, word in ((loss, "loss_chunks"), (scores, "fused kernel"), (copies, "casts"), (fused, "attention")):
        assert word in lines(one)[0]
    assert len(lines(loss, scores, copies, fused)) == 3


def test_the_roof_comes_from_the_probe_or_else_the_catalogue():
    def node(per_s):
        matmul, copy = MatmulRate(per_s=per_s, size=256), Rate(per_s=per_s / 10)
        return SimpleNamespace(matmul_flops_per_s={"float32": matmul}, copy_bytes_per_s={"device": copy})

    probed = SimpleNamespace(measured=(node(2e12), node(1e12)))
    gpu = SimpleNamespace(nodes=(SimpleNamespace(device_name="NVIDIA H100 80GB HBM3", device_kind="cuda"),))
    cpu = SimpleNamespace(nodes=(SimpleNamespace(device_name="Xeon", device_kind="cpu"),))
    assert roof_of(PLAIN, probed, gpu) == ROOF
    bf16 = Candidate(micro_batch_size=1, precision=Precision(level="O1", dtype="bfloat16"))
    found = roof_of(bf16, probed, gpu)  # the probe has no bfloat16
    assert found is not None and found.source == "catalogue" and found.flops_per_s > 5e14 and found.bytes_per_s > 2e12
    assert roof_of(bf16, None, cpu) is None and roof_of(bf16, None, None) is None
