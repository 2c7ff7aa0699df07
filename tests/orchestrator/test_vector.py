from hypothesis import given
from hypothesis import strategies as st

from orchestrator.sweep.state import BLOCK_SIZE, Vector

sizes = st.integers(0, 3 * BLOCK_SIZE)


@given(sizes, st.lists(st.tuples(st.sampled_from(["append", "with_item"]), st.integers(0)), max_size=5), st.data())
def test_a_vector_is_a_tuple(size, changes, data):
    vector, plain = Vector(range(size)), tuple(range(size))
    for kind, item in changes:
        if kind == "append":
            vector, plain = vector.append(item), (*plain, item)
        elif plain:
            at = data.draw(st.integers(0, len(plain) - 1))
            vector, plain = vector.with_item(at, item), (*plain[:at], item, *plain[at + 1 :])
    assert tuple(vector) == plain
    assert len(vector) == len(plain)
    assert vector == Vector(plain)
    at = data.draw(st.integers(-len(plain) - 2, len(plain) + 2))
    assert vector[at:] == plain[at:]
    assert vector[:at] == plain[:at]
    assert tuple(vector.since(max(0, at))) == plain[max(0, at) :]
    if -len(plain) <= at < len(plain):
        assert vector[at] == plain[at]


@given(sizes, sizes)
def test_one_starts_with_another_exactly_when_its_first_items_are_those(size, other):
    assert Vector(range(size)).starts_with(Vector(range(other))) == (other <= size)
    assert not Vector(range(1, size + 2)).starts_with(Vector(range(other + 1)))
