"""Communication that need not be: what is flagged, and what is not."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.trials.ranks import run_ranks
from trials.profiling.collectives import CollectiveCounter, Flow, StartedCollective
from trials.spec import Layout


def started(kind: str, group: str = "tp", size: int = 2) -> StartedCollective:
    return StartedCollective(module="m", phase="forward", kind=kind, group=group, group_size=size, num_bytes=8)


def collective(flow: Flow, kind: str, sent: str, received: str, group: str = "tp", elements: int = 4) -> None:
    flow.communicate(started(kind, group), (sent, elements), (received, elements))


def problems(flow: Flow) -> list[str]:
    return [found.problem for found in flow.redundancies()]


def test_the_same_tensor_gathered_twice_is_known_through_copies_and_views() -> None:
    flow = Flow()
    for copy in ("first", "second"):
        flow.move("transpose", (0, 1), [("x", 4)], [("t", 4)])
        flow.move("clone", (), [("t", 4)], [(copy, 4)])
        collective(flow, "all_gather", copy, f"all of {copy}")
        flow.compute([(f"all of {copy}", 8)])
    (found,) = flow.redundancies()
    assert "starts the same all_gather" in found.problem
    assert (found.num_calls, found.num_bytes) == (1, 8)


def test_different_tensors_and_different_passes_are_no_repetition() -> None:
    flow = Flow()
    collective(flow, "all_gather", "x", "all x")
    flow.move("slice", (0, 2), [("x", 4)], [("part", 2)])
    collective(flow, "all_gather", "part", "all part")
    flow.communicate(
        StartedCollective(module="m", phase="recompute", kind="all_gather", group="tp", group_size=2, num_bytes=8),
        ("x", 4),
        ("again", 8),
    )
    assert problems(flow) == []


def test_there_and_back_again_is_flagged_only_without_computation_between_and_on_one_group() -> None:
    flow = Flow()
    collective(flow, "reduce_scatter", "x", "shard")
    flow.move("wait_tensor", (), [("shard", 4)], [("shard", 4)])
    collective(flow, "all_gather", "shard", "whole")
    assert len(problems(flow)) == 1 and "one all_reduce" in problems(flow)[0]
    flow = Flow()
    collective(flow, "reduce_scatter", "x", "shard")
    flow.compute([("shard", 4)])
    collective(flow, "all_gather", "normed", "whole")
    collective(flow, "all_to_all", "y", "exchanged")
    collective(flow, "all_to_all", "exchanged", "elsewhere", group="cp")
    assert problems(flow) == []


def test_using_one_share_of_a_sum_is_flagged_and_using_several_is_not() -> None:
    for parts, expected in ((("a",), 1), (("a", "b"), 0)):
        flow = Flow()
        flow.communicate(started("all_reduce", size=4), ("x", 16), ("sum", 16))
        for i, part in enumerate(parts):
            flow.move("narrow", i, [("sum", 16)], [(part, 4)])
            flow.compute([(part, 4)])
        assert len(problems(flow)) == expected, parts


def test_sums_that_are_only_added_need_one_reduction() -> None:
    for others, expected in (((), 2), (("ab",), 1), (("a",), 1)):
        flow = Flow()
        for name in "abc":
            collective(flow, "all_reduce", f"partial {name}", name)
        for extra in set(others) & {"a"}:
            flow.compute([(extra, 4)])
        flow.add([("a", 4), ("b", 4)], ("ab", 4))
        for extra in set(others) & {"ab"}:
            flow.compute([(extra, 4)])
        flow.add([("ab", 4), ("c", 4)], ("abc", 4))
        assert len(flow._only_added()) == expected, others


class _FeedForward(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3, self.w2 = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Any) -> Any:
        return self.w2(torch.relu(self.w1(x)) * self.w3(x))


def _planted() -> list[tuple[str, str, str]]:
    """A plan without the one gathering that w1 and w3 should share, and a tensor sent back and forth."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    columns = ColwiseParallel(input_layouts=Shard(0))
    plan = {"w1": columns, "w3": columns, "w2": RowwiseParallel(output_layouts=Shard(0))}
    model = parallelize_module(_FeedForward(), mesh, plan)
    x = distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)])
    counter = CollectiveCounter([model], Layout(tp=2))
    with counter.counting(), torch.no_grad():
        model(x.to_local())
        whole = x.redistribute(placements=[Replicate()])
        whole.redistribute(placements=[Shard(0)]).redistribute(placements=[Replicate()]).to_local().sum()
    return [(found.module, found.phase, found.problem) for found in counter.redundancies()]


def test_planted_redistributions_of_real_dtensors_are_found(tmp_path: Any) -> None:
    repeated = ("w3", "forward", "starts the same all_gather of the same tensor again")
    round_trip = ("step", "step", "gathers again what had been gathered and cut before, with nothing computed between")
    for found in run_ranks(_planted, 2, tmp_path):
        assert set(found) == {repeated, round_trip}
