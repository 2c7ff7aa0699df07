"""The shipped sweep of a published tuning case: the cost model's ratios against the expert's."""

from pathlib import Path

import pytest

from cluster.connect import describe
from orchestrator.forecast import forecast
from orchestrator.hardware import cluster_options
from orchestrator.plan import make_plan
from orchestrator.sweep import load_sweep
from orchestrator.why import explain

FILE = Path(__file__).parents[2] / "configs/sweeps/llama2-13b-ascend.yaml"
SILU_MUL = r"select: {'feed_forward\.(silu|mul)': all}"
STEPS = {
    "{recompute: full}": 2136,
    "{recompute: {full: [20, 8]}}": 2210,
    f"{{recompute: {{full: [13, 5], {SILU_MUL}}}}}": 2353,
    f"{{recompute: {{full: [4, 0], {SILU_MUL}}}}}": 2562,
}
"""Published tokens/s/p on two nodes, 2 stages."""


def test_the_experts_steps_come_in_the_published_order_and_size():
    spec = load_sweep(FILE)
    where = describe(**cluster_options(spec))
    plan = make_plan(spec, where)
    found = [explain(step, plan, spec, where).prediction.tokens_per_s_per_device for step in STEPS]
    assert found == sorted(found)
    for predicted, published in zip(found, STEPS.values(), strict=True):
        assert predicted / found[0] == pytest.approx(published / 2136, rel=0.1)
    assert forecast(plan, spec, where).top[0].tokens_per_s_per_device >= 2562 / 2136 * found[0]
