"""The real runtime, ledger and outbox on a virtual cluster, through deaths, requests and lost nodes in any order."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.controller import step
from orchestrator.sweep import checkpoint
from orchestrator.sweep.events import AttemptEnded, AttemptLaunched
from orchestrator.sweep.fold import fold
from orchestrator.sweep.ledger import Ledger
from tests.orchestrator.controller.crashing import TOPOLOGY, Fuse, KilledError, Scenario, World
from tests.orchestrator.controller.test_crash_points import check

requests = st.sampled_from(
    [
        *map(checkpoint.action, ("pause", "drain", "pause", "cancel")),
        checkpoint.retry(checkpoint.FAULTS),
        checkpoint.note(trial=0, text="a note", tags={}, removed_tags=()),
    ]
)


class Lives(RuleBasedStateMachine):
    """Controllers of one sweep, one after another."""

    def __init__(self):
        super().__init__()
        self.folder = TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.world = World(node_losses={})
        self.requests = ()

    @initialize(max_concurrent=st.integers(1, 3), sampler=st.sampled_from(["grid", "random"]))
    def submit(self, max_concurrent, sampler):
        self.knobs = {"max_concurrent": max_concurrent, "sampler": sampler}

    def scenario(self):
        return Scenario(requests=self.requests, **self.knobs)

    def state(self):
        with Ledger(self.path) as ledger:
            return fold(ledger.events())

    def is_begun(self):
        return self.state().created is not None

    def lives(self, num_steps):
        try:
            self.scenario().live(self.path, self.world, Fuse(num_steps))
        except KilledError:
            return

    a_controller_dies_soon = rule(num_steps=st.integers(0, 30))(lives)
    a_controller_dies_later = rule(num_steps=st.integers(20, 70))(lives)

    @rule(body=requests, num_more_ended=st.integers(0, 4))
    def a_user_will_request(self, body, num_more_ended):
        self.requests = (*self.requests, (len(self.state().end_order) + num_more_ended, body))

    @precondition(is_begun)
    @rule(body=requests)
    def a_user_requests_without_a_controller(self, body):
        with Ledger(self.path) as ledger, ledger.hold(), patch.object(step, "recovered", self._recovered):
            ledger.add_request(body, by="user", at_s=0.0)
            state = step.apply_requests(ledger, self.path)
        if body == checkpoint.action("cancel"):
            assert state.is_over

    def _recovered(self, attempts, trial):
        return self.world.recover(trial)

    @rule(node=st.sampled_from(TOPOLOGY.nodes[:2]), in_s=st.floats(0.0, 10.0))
    def a_node_goes_away(self, node, in_s):
        self.world.node_losses.setdefault(node.name, self.world.now_s + in_s)

    @invariant()
    def nothing_exists_twice(self):
        with Ledger(self.path) as ledger:
            events = list(ledger.events())
        launched = Counter(event.token for event in events if isinstance(event, AttemptLaunched))
        ended = Counter(event.token for event in events if isinstance(event, AttemptEnded))
        assert launched.keys() >= ended.keys() | self.world.gangs.keys()
        assert set(launched.values()) | set(ended.values()) <= {1}
        state = fold(events)
        searched = state.searched()  # checks run a candidate again
        assert len({trial.candidate for trial in searched}) == len(searched)
        assert len(state.running) <= self.knobs["max_concurrent"]

    def teardown(self):
        with self.folder:
            if hasattr(self, "knobs"):
                state = self.scenario().go_on(self.path, self.world, Fuse())
                check(self.path, state, self.world)
                assert not state.running
                assert state.status == "cancelled" or state.best.status == "measured"


TestLives = pytest.mark.fault(Lives.TestCase)
TestLives.settings = settings(max_examples=20, stateful_step_count=14)
