"""The comparison with other optimisers counts trials rightly, and sorts losses first."""

import random

import pytest

from benchmarks.against.peers import optimisers, search
from benchmarks.against.rows import Row, table
from benchmarks.search.generic.programs import MADE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # imports of Ax


@pytest.fixture(scope="module")
def program():
    return next(made for make in MADE if (made := make(7)).name == "linear")


class Oracle:
    """Proposes the configuration given."""

    def __init__(self, point):
        self.point = point
        self.results = []

    def ask(self):
        return self.point

    def tell(self, point, value):
        self.results.append((point, value))


def test_the_best_configuration_ends_the_count(program):
    costs = {one: seconds * one.layout.world_size for one, seconds in program.times_s.items()}
    best = min(costs, key=costs.get)
    index = program.candidates.index(best)
    made = []

    def make(space, seed):
        made.append(Oracle(space.points[index]))
        return made[-1]

    assert search(program, make, 0, 2).to_best == 2
    (_, seconds), _ = made[0].results
    assert seconds == pytest.approx(costs[program.baseline], rel=0.1)


def test_every_configuration_is_tried_at_most_once(program):
    class Stubborn(Oracle):
        def __init__(self, space):
            super().__init__(space.points[0])

    made = []

    def make(space, seed):
        made.append(Stubborn(space))
        return made[-1]

    search(program, make, 0, 30)
    points = [tuple(point.values()) for point, _ in made[0].results]
    assert len(points) == len(set(points))


@pytest.mark.parametrize("name", ["random", "Optuna, TPE"])
def test_peers_find_the_best_in_the_end(program, name):
    assert search(program, optimisers()[name], 1, len(program.candidates)).to_best <= len(program.candidates)


def test_losses_come_first_and_pairs_must_match():
    ahead = Row(what="fast", peer_name="x", unit="s", ours=(1.0, 2.0), peer=(4.0, 6.0))
    behind = Row(what="slow", peer_name="x", unit="s", ours=(2.0,), peer=(1.0,))
    assert ahead.ratio == 3.5
    rows = [ahead, behind]
    random.Random(0).shuffle(rows)
    lines = table(rows).splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| slow", "| fast"]
    assert "3 to 4" in lines[1]
    with pytest.raises(ValueError, match="2 measurements of ours and 1"):
        Row(what="x", peer_name="x", unit="s", ours=(1.0, 2.0), peer=(1.0,))
