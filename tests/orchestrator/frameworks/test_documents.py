"""Configuration files: a change reaches its key, and nothing else."""

import copy
import json

import pytest
import tomlkit
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.errors import ConfigError
from orchestrator.frameworks.documents import ABSENT, edited, flat, load, value_at

SCALARS = st.one_of(st.booleans(), st.integers(-9, 9), st.floats(0, 9), st.text("ab: #-[{&*", max_size=4))
NAMES = st.sampled_from(["a", "b", "stage", "on", "x-y", "1"])
TREES = st.dictionaries(
    NAMES, st.recursive(SCALARS, lambda below: st.dictionaries(NAMES, below, max_size=3)), max_size=4
)


@given(TREES, st.lists(NAMES, min_size=1, max_size=3), SCALARS, st.sampled_from(["f.json", "f.yaml", "f.toml"]))
@example({"a": "12"}, ["a"], False, "f.yaml")  # a quoted value becomes a plain one
def test_a_change_is_read_back_and_the_rest_is_unchanged(tree, keys, value, file):
    text = {"f.json": json.dumps, "f.yaml": yaml.safe_dump, "f.toml": tomlkit.dumps}[file](tree)
    wanted = copy.deepcopy(tree)
    place = wanted
    for key in keys[:-1]:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            with pytest.raises(ConfigError, match=r"f\.(json|yaml|toml): .*the parent key is a value"):
                edited(text, file, {".".join(keys): value})
            return
    place[keys[-1]] = value
    made = edited(text, file, {".".join(keys): value})
    assert load(made, file) == wanted
    assert value_at(load(made, file), ".".join(keys)) == value
    assert edited(made, file, {".".join(keys): value}) == made


YAML = """\
# a comment
base: &base
  lr: 1e-5
  flash_attn: off
  nested: {on: yes, sizes: [1, 2]}
run:
  <<: *base
  lr: 2e-5
list:
  - name: one
    every: 5
mode: 0o17
"""


def test_yaml_keeps_spelling_and_a_change_does_not_reach_what_an_anchor_shares():
    made = edited(YAML, "f.yaml", {"run.nested.sizes": [3], "list.0.every": 1, "new.key": None, "base.lr": ABSENT})
    assert load(made, "f.yaml") == {
        "base": {"flash_attn": False, "nested": {True: True, "sizes": [1, 2]}},
        "run": {"flash_attn": False, "nested": {True: True, "sizes": [3]}, "lr": "2e-5"},
        "list": [{"name": "one", "every": 1}],
        "mode": "0o17",
        "new": {"key": None},
    }
    assert "flash_attn: off" in made and "{on: yes, sizes: [1, 2]}" in made and "mode: 0o17" in made
    assert edited(YAML, "f.yaml", {"run.lr": "2e-5"}) == YAML


COMMENTED = """\
# The head.
trainer:   # of ours
    # why
    lr: 1e-5  # low
    betas: [0.9,  0.95]

    # Files are long, and indented in many ways.
    callbacks:
      - name: one  # first
        every: 5
off: off
"""


def test_yaml_keeps_comments_and_changes_one_line():
    made = edited(COMMENTED, "f.yaml", {"trainer.lr": 1e-5, "trainer.callbacks.0.every": 7})
    assert load(made, "f.yaml")["trainer"] == {
        "lr": 1e-5,
        "betas": [0.9, 0.95],
        "callbacks": [{"name": "one", "every": 7}],
    }
    old, new = COMMENTED.splitlines(), made.splitlines()
    assert [line.split() for line in new] == [
        line.replace("1e-5", "1.0e-05").replace("every: 5", "every: 7").replace("9,  0", "9, 0").split() for line in old
    ]
    assert edited("# only this\n", "f.yaml", {"a.b": True}) == "# only this\na:\n  b: true\n"
    assert load(edited("a: 1\na: 2\nb: 1\n", "f.yaml", {"b": 2}), "f.yaml") == {"a": 2, "b": 2}


TOML = """\
seed = 1  # top

[training]
steps = 10 # few
local_batch_size = 2

[metrics]
log_freq = 10
"""


def test_toml_keeps_lines_and_comments():
    changes = {
        "training.steps": 20,
        "training.dtype": "bf16",
        "new.sizes": [1, 2],
        "seed": 2,
        "metrics.log_freq": ABSENT,
    }
    made = edited(TOML, "f.toml", changes)
    assert made.splitlines()[:6] == [
        "seed = 2  # top",
        "",
        "[training]",
        "steps = 20 # few",
        "local_batch_size = 2",
        'dtype = "bf16"',
    ]
    assert dict(flat(load(made, "f.toml"))) == {
        "seed": 2,
        "training.steps": 20,
        "training.local_batch_size": 2,
        "training.dtype": "bf16",
        "metrics": {},
        "new.sizes": [1, 2],
    }
    assert load(edited("a = [\n1]\n[[b]]\nc.d = 1\n", "f.toml", {"a": 2, "b.0.c.d": 5}), "f.toml") == {
        "a": 2,
        "b": [{"c": {"d": 5}}],
    }
    with pytest.raises(ConfigError, match="not a valid TOML value"):
        edited(TOML, "f.toml", {"seed": None})


def test_json_may_have_comments_and_keys_with_dots():
    text = '{"a.b": {"c": 1}, // "no"\n "url": "http://x", # note\n "l": [1, 2,],}\n'
    assert load(text, "ds.json") == {"a.b": {"c": 1}, "url": "http://x", "l": [1, 2]}
    assert value_at(load(text, "ds.json"), "a.b.c") == 1
    assert value_at(load(text, "ds.json"), "a.x") is ABSENT
    assert load(edited(text, "ds.json", {"a.b.c": 2}), "ds.json")["a.b"] == {"c": 2}


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("a.json", '{"a": 1,\n b}', r"a\.json:2: invalid JSON"),
        ("a.yaml", "a: 1\nb: [", r"a\.yaml:\d: invalid YAML"),
        ("a.toml", "a = \n", r"a\.toml: invalid TOML"),
    ],
)
def test_syntax_errors_name_their_place(file, text, message):
    with pytest.raises(ConfigError, match=message):
        load(text, file)


def test_a_number_counts_items_of_a_list():
    data = load('{"stages": [{"layers": 3}, {"layers": 5}]}', "ds.json")
    assert value_at(data, "stages.1.layers") == 5
    assert value_at(data, "stages.2.layers") is ABSENT
