"""What offloading and 8-bit floats cost and save by the cost model's formulas."""

from __future__ import annotations

from cluster.cost.inputs import MEMORY, TIME, assumed
from cluster.cost.peak_memory import passes_bytes
from cluster.cost.step_time import HOST_LINK_SHARE, HOST_UPDATES_PER_S, step_seconds
from cluster.cost.work import work_of
from tests.cluster.cost.rows import inputs, row


def terms(*rows):
    x = inputs(*rows)
    work = work_of(x)
    return step_seconds(x, work, assumed(TIME)), passes_bytes(x, work, assumed(MEMORY))


def test_activations_on_the_host_cost_what_their_copies_stick_out() -> None:
    """Over a link without end nothing sticks out but what computation loses to the copies; over a slow one, all."""
    kept, fast, slow = row(), row(offload_activations=1, host_bytes_per_s=1e15), row(offload_activations=1)
    slow["host_bytes_per_s"] = 1e8
    seconds, memory = terms(kept, fast, slow)
    assert seconds["host_copies"][0] == 0 < seconds["host_copies"][1] < 1e-3 * seconds["forward"][1]
    held = memory["activations"][0, 0]
    both_ways = 2 * held * 8 / (1e8 * HOST_LINK_SHARE)
    computing = seconds["forward"][2] + seconds["backward"][2]
    assert both_ways - computing < seconds["host_copies"][2] < both_ways
    assert memory["activations"][1, 0] == held * 3 / 32


def test_states_on_the_host_are_not_on_the_device_and_take_its_processors_time() -> None:
    """Of 8 ranks each updates an eighth of 6.7e9 parameters, but they share the processors."""
    seconds, memory = terms(row(), row(offload_optimizer=1), row(offload_optimizer=1, dp_shard=1, micro_batch_size=8))
    assert memory["optimizer"][1, 0] == 0 < memory["optimizer"][0, 0]
    assert memory["weights"][1, 0] == memory["weights"][0, 0]
    assert seconds["optimizer"][1] >= 6.7e9 / HOST_UPDATES_PER_S > 50 * seconds["optimizer"][0]


def test_8_bit_operands_made_anew_keep_no_less_than_16_bits_and_leave_the_head_alone() -> None:
    wide, kept = row(), row(peak_flops_per_s=2 * 312e12)
    cast = {**kept, "casts_operands": 1}
    seconds, memory = terms(wide, kept, cast)
    assert memory["activations"][2, 0] == memory["activations"][0, 0] > memory["activations"][1, 0]
    assert seconds["forward"][1] < seconds["forward"][2] < seconds["forward"][0]
