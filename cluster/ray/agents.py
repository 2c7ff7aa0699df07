"""Starts and calls the agents of the leased nodes, and collects their answers. Nothing waits longer than it is told."""

from __future__ import annotations

import contextlib
import logging
import time
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.gang.messages import GangOrder, NodeLaunch
from cluster.ray.agent import NodeAgent, NodeOrder
from cluster.ray.connection import CALL_TIMEOUT_S, UnreachableError, within
from cluster.ray.lease import NodeSlot

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
CLOSE_TIMEOUT_S = 30.0
LONG_POLL_S = 15.0
"""How long an agent waits for events before it answers a poll."""
SILENT_S = 30.0
"""How late an answer may be before the agent counts as lost. Ray itself notices a frozen host after a minute."""
_LIMITS_S = {
    "describe": START_TIMEOUT_S,
    "close": CLOSE_TIMEOUT_S,
    "launch": 2 * SILENT_S,
    "poll": LONG_POLL_S + SILENT_S,
}
What = Literal["describe", "poll", "launch", "close"]


class SilentError(RuntimeError):
    """An agent does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    what: What
    slot: NodeSlot
    called_at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReply:
    """The answer to a call, or why there is none: then the agent may be gone."""

    what: What
    slot: NodeSlot
    value: Any = None
    error: Exception | None = None


class Agents:
    """One agent per slot of the lease, by the name of its node."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._calls: dict[Any, _Call] = {}

    def start(self, slot: NodeSlot, order: NodeOrder) -> None:
        """Start the agent and have it describe its node."""
        remote: Any = ray.remote  # its annotations lack the option
        actor = remote(concurrency_groups={"events": 1})(NodeAgent)
        resources = slot.group.bundle_specs[0]
        strategy = PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=0)
        self._actors[slot.name] = actor.options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            resources={name: count for name, count in resources.items() if name not in ("CPU", "GPU")},
            max_restarts=0,
            scheduling_strategy=strategy,
        ).remote(order)
        self._call("describe", slot, self._actors[slot.name].describe.remote())

    def listen(self, slot: NodeSlot) -> None:
        """Ask for the next events."""
        poll = self._actors[slot.name].poll.options(concurrency_group="events")
        self._call("poll", slot, poll.remote(LONG_POLL_S))

    def launch(self, slot: NodeSlot, launch: NodeLaunch) -> None:
        self._call("launch", slot, self._actors[slot.name].launch.remote(launch))

    def order(self, name: str, attempt_id: str, order: GangOrder) -> None:
        if name in self._actors:
            self._actors[name].order.remote(attempt_id, order)

    def free_port(self, name: str) -> int:
        """A TCP port of the node that nobody listens on.

        Raises:
            RayError: no answer.
        """
        port: int = ray.get(self._actors[name].free_port.remote(), timeout=CALL_TIMEOUT_S)
        return port

    def retire(self, slot: NodeSlot) -> bool:
        """Have the agent end all its processes, which its answer to ``close`` confirms. False if there is no agent."""
        self._forget_calls(slot)
        actor = self._actors.pop(slot.name, None)
        if actor is None:
            return False
        self._call("close", slot, actor.close.remote())
        return True

    def kill(self, slot: NodeSlot) -> None:
        """End the agent, in case it only cannot be heard."""
        self._forget_calls(slot)
        if (actor := self._actors.pop(slot.name, None)) is not None:
            with contextlib.suppress(UnreachableError):
                within(CALL_TIMEOUT_S, lambda: ray.kill(actor))

    @property
    def retiring(self) -> list[NodeSlot]:
        return [call.slot for call in self._calls.values() if call.what == "close"]

    def answers(self, timeout_s: float) -> list[AgentReply]:
        """Wait up to ``timeout_s`` for an answer; calls without one for too long are answered with an error."""
        if late := self._late():
            return late
        if not self._calls:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        return [self._answer(ref) for ref in ready]

    def _late(self) -> list[AgentReply]:
        """Answers to overdue calls, errors where none has come. One that has come counts, however late it is read."""
        now_s = time.monotonic()
        overdue = [ref for ref, call in self._calls.items() if now_s - call.called_at_s > _LIMITS_S[call.what]]
        if not overdue:
            return []
        ready, silent = ray.wait(overdue, num_returns=len(overdue), timeout=0)
        found = [self._answer(ref) for ref in ready]
        for call in [self._calls.pop(ref) for ref in silent]:
            error = SilentError(f"no answer to {call.what} for {_LIMITS_S[call.what]:g} s")
            found.append(AgentReply(what=call.what, slot=call.slot, error=error))
        return found

    def _answer(self, ref: Any) -> AgentReply:
        call = self._calls.pop(ref)
        try:
            return AgentReply(what=call.what, slot=call.slot, value=ray.get(ref, timeout=CALL_TIMEOUT_S))
        except RayError as error:
            return AgentReply(what=call.what, slot=call.slot, error=error)

    def _call(self, what: What, slot: NodeSlot, ref: Any) -> None:
        self._calls[ref] = _Call(what=what, slot=slot, called_at_s=time.monotonic())

    def _forget_calls(self, slot: NodeSlot) -> None:
        self._calls = {ref: call for ref, call in self._calls.items() if call.slot is not slot}
