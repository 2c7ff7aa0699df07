"""JSON and back: nothing is lost, and errors name their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials import files
from trials.files import CodecError, canonical_json, digest, from_json, to_json
from trials.spec import AdamW


@dataclass(frozen=True)
class Wheel:
    kind: ClassVar[str] = "wheel"
    size: float


@dataclass(frozen=True)
class Engine:
    kind: ClassVar[str] = "engine"
    fuel: Literal["petrol", "diesel"]
    cylinders: int = 4


class Gearbox(StrEnum):
    MANUAL = "manual"
    FOUR_SPEED = "four_speed"


@dataclass(frozen=True)
class Car:
    name: str
    gearbox: Gearbox = Gearbox.MANUAL
    ordered: Gearbox | None = None
    parts: tuple[Wheel | Engine, ...] = ()
    notes: Mapping[str, int | None] = field(default_factory=dict)
    spare: Wheel | None = None
    more: Any = None


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PARTS = st.builds(Wheel, FLOATS) | st.builds(Engine, st.sampled_from(["petrol", "diesel"]), st.integers())
CARS = st.builds(
    Car,
    name=st.text(),
    gearbox=st.sampled_from(Gearbox),
    ordered=st.none() | st.sampled_from(Gearbox),
    parts=st.lists(PARTS, max_size=4).map(tuple),
    notes=st.dictionaries(st.text(), st.none() | st.integers(), max_size=4),
    spare=st.none() | st.builds(Wheel, FLOATS),
    more=st.none() | st.lists(st.integers(), max_size=2),
)


@given(CARS)
def test_written_values_are_read_back(car):
    again = from_json(Car, to_json(car))
    assert again == car
    assert canonical_json(again) == canonical_json(car) and digest(again) == digest(car)


def test_enums_are_written_as_their_values_and_read_as_members():
    body = to_json(Car(name="x", gearbox=Gearbox.FOUR_SPEED))
    assert type(body["gearbox"]) is str and body["gearbox"] == "four_speed"
    car = from_json(Car, body)
    assert car.gearbox is Gearbox.FOUR_SPEED


def test_whole_numbers_are_read_as_the_floats_they_stand_for():
    wheel = from_json(Wheel, {"size": 2})
    assert isinstance(wheel.size, float)


CAR = {"name": "a", "parts": [{"kind": "wheel", "size": 1.0}, {"kind": "engine", "fuel": "petrol"}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 3}, "$.name: expected str, got 3"),
        ({"name": None}, "$.name: expected str, got None"),
        (
            {"colour": "red"},
            "$: unknown key 'colour' for Car; known: gearbox, more, name, notes, ordered, parts, spare",
        ),
        ({"gearbox": "odd"}, "$.gearbox: expected Gearbox, got 'odd'"),
        ({"gearbox": 1}, "$.gearbox: expected Gearbox, got 1"),
        ({"parts": {}}, "$.parts: expected tuple, got {}"),
        ({"parts": [{"kind": "wheel", "size": True}]}, "$.parts[0].size: expected float, got True"),
        ({"parts": [*CAR["parts"], {"kind": "wing"}]}, "$.parts[2]: unknown kind 'wing'"),
        ({"parts": [{"kind": ["wheel"], "size": 1.0}]}, "$.parts[0]: unknown kind ['wheel']"),
        ({"parts": [{"kind": "engine", "fuel": "coal"}]}, "$.parts[0].fuel: expected Literal, got 'coal'"),
        (
            {"parts": [{"kind": "engine", "fuel": "diesel", "cylinders": True}]},
            "$.parts[0].cylinders: expected int, got True",
        ),
        ({"notes": {"seats": "x"}}, "$.notes.seats: expected int, got 'x'; $.notes.seats: expected NoneType, got 'x'"),
        ({"parts": [{"kind": "wheel"}]}, "$.parts[0]: Wheel.__init__() missing 1 required positional argument: 'size'"),
    ],
)
def test_errors_name_their_place(changes, message):
    with pytest.raises(CodecError) as caught:
        from_json(Car, {**CAR, **changes})
    assert str(caught.value) == message


SCALARS = st.sampled_from([None, True, 1, 1.5, "wheel", "petrol", [], {}])
EDITS = st.tuples(st.sampled_from(["name", "gearbox", "parts", "notes", "spare", "kind", "size", "fuel", "x"]), SCALARS)


@given(CARS, st.data())
def test_fast_and_checked_reading_agree(car, data):
    """Whatever is missing, unknown or of a wrong type."""
    body = to_json(car)
    for part in [body, *body["parts"], *filter(None, [body["spare"]])]:
        for key, value in data.draw(st.lists(EDITS, max_size=2)):
            part[key] = value
        for key in data.draw(st.lists(st.sampled_from(sorted(part)), max_size=1)):
            del part[key]
    assert read(lambda: from_json(Car, body)) == read(lambda: files._decoder(Car)(body))


def read(decode):
    """Either the value's text, which shows the types of its parts, or that there is none."""
    try:
        return repr(decode())
    except (CodecError, files._MismatchError):
        return None


def test_the_place_starts_at_the_path_of_the_caller():
    with pytest.raises(CodecError, match=r"^recipe\.json\.size: expected float"):
        from_json(Wheel, {"size": "x"}, "recipe.json")


def test_without_a_kind_every_member_is_tried():
    part = from_json(Wheel | Engine, {"fuel": "petrol"})
    assert part == Engine("petrol")
    with pytest.raises(CodecError, match=r"for Wheel.*; .*for Engine"):
        from_json(Wheel | Engine, {"doors": 4})


def test_values_without_a_json_form_are_refused():
    with pytest.raises(TypeError, match="cannot encode set"):
        to_json({1, 2})


def test_a_field_that_was_added_later_is_left_out_at_its_default():
    """So digests of what was written before stay the same."""
    assert "clip_norm" not in to_json(AdamW())
    assert to_json(AdamW(clip_norm=1.0))["clip_norm"] == 1.0
    for optimizer in (AdamW(), AdamW(clip_norm=1.0)):
        assert from_json(AdamW, to_json(optimizer)) == optimizer


@dataclass(frozen=True)
class Place:
    node: str
    index: int


def test_equal_objects_are_decoded_once_but_not_mixed_with_other_types():
    place = {"node": "n0", "index": 1}
    assert from_json(Place, place) is from_json(Place, dict(place))
    for wrong in (True, 1.0, "1", None, [1]):
        with pytest.raises(CodecError, match="index"):
            from_json(Place, {**place, "index": wrong})
    with pytest.raises(CodecError, match="rank"):
        from_json(Place, {**place, "rank": 1})


@dataclass(frozen=True)
class Numbers:
    either: float | int
    whole_first: int | float
    maybe: float | None
    word: Word | str


class Word(StrEnum):
    ONE = "one"


def test_unions_of_scalars_decode_to_their_first_member():
    found = from_json(Numbers, {"either": 1, "whole_first": 1, "maybe": 2, "word": "one"})
    values = (found.either, found.whole_first, found.maybe, found.word)
    assert [type(value) for value in values] == [float, int, float, Word]
    assert from_json(Numbers, {"either": 1, "whole_first": 1, "maybe": None, "word": "two"}).maybe is None
