"""Whatever is wrong with a file as text, or as a whole: one clear error, never another exception."""

import functools

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.config.sweep import load_sweep
from orchestrator.config.yaml_source import MAX_FILE_BYTES, read_yaml
from orchestrator.errors import ConfigError
from orchestrator.planning.planner import make_plan
from tests.orchestrator.config.bad_files import ALL_PATHS, MAPPINGS, around, dotted, refusal
from tests.support.sweep_files import FULL, RESNET, SMALL, changed, write


@pytest.mark.parametrize("path", [path for path in MAPPINGS if path and not any(isinstance(p, int) for p in path)])
def test_a_duplicate_key_is_refused_at_every_level(tmp_path, path):
    lines, path = yaml.safe_dump(around(path), sort_keys=False).splitlines(), list(path)
    here = next(i for i, node in enumerate(_key_paths(lines)) if node == path)
    last = here + 1
    while last < len(lines) and lines[last].startswith("  " * len(path)):
        last += 1
    text = "\n".join([*lines[:last], *lines[here:last], *lines[last:]])
    error = refusal(tmp_path, text)
    assert error.line == last + 1
    assert error.key == dotted(path)
    assert error.message == f"duplicate key; first set on line {here + 1}"


def _key_paths(lines):
    """Path of the key on each line of block-style YAML (list items get paths that match nothing)."""
    stack = []
    for line in lines:
        depth = (len(line) - len(line.lstrip())) // 2
        stack = [*stack[:depth], line.strip().split(":")[0]]
        yield list(stack)


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        ("name: x\nspace: " + "[" * 5000, 1, "levels deep"),
        ("name: x\nseed: 0x" + "f" * 5000, 2, "the number is too large (5002 digits)"),
        (bytes(range(256)) * 50, None, ""),
        ("x: " + "y" * MAX_FILE_BYTES, None, "larger than"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_long_text_that_is_no_sweep_at_all(tmp_path, content, line, words):
    error = refusal(tmp_path, content)
    assert words in str(error)
    assert line is None or error.line == line


def test_plain_aliases_work(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &x [1, 1e-3]\nb: *x\n")
    assert read_yaml(tmp_path / "a.yaml").data == {"a": [1, 1e-3], "b": [1, 1e-3]}


@pytest.mark.parametrize("name", ["missing.yaml", ".", "a\0b"])
def test_a_file_that_cannot_be_opened(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot read") as caught:
        load_sweep(tmp_path / name)
    assert str(tmp_path / name) in caught.value.message


def test_an_error_in_the_model_file_names_that_file(tmp_path):
    (tmp_path / "model.yaml").write_text("kind: llama\nhidden_size: 64\nnum_layer: 4\n")
    file = write(tmp_path, changed(SMALL, ("workload", "model"), "model.yaml"))
    with pytest.raises(ConfigError) as caught:
        load_sweep(file)
    unknown = next(one for one in [caught.value, *caught.value.others] if one.key == "num_layer")
    assert unknown.file == str(tmp_path / "model.yaml")
    assert unknown.line == 3
    assert "Did you mean 'num_layers'?" in unknown.remedy


def test_too_large_a_space_names_the_longest_lists(tmp_path):
    space = {"num_workers": list(range(1, 257)), "prefetch_factor": list(range(1, 257)), "pin_memory": [True, False]}
    spec = load_sweep(write(tmp_path, {**SMALL, "space": {**space, "persistent_workers": [True, False]}}))
    words = r"loader have 262,144 combinations.*num_workers \(256\), prefetch_factor \(256\), "
    with pytest.raises(ConfigError, match=words):
        make_plan(spec)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["O1", "full", 2])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


FULL_TEXT = yaml.safe_dump(FULL, sort_keys=False)


MANY_IN_ONE_FOLDER = settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


@MANY_IN_ONE_FOLDER
@given(path=st.sampled_from(ALL_PATHS), value=VALUES)
def test_any_value_anywhere_loads_or_is_refused_cleanly(tmp_path, path, value):
    _load_or_refuse(tmp_path, changed(around(path), path, value))


@MANY_IN_ONE_FOLDER
@given(
    cut=st.integers(0, 2000),
    length=st.integers(0, 5),
    insert=st.text(alphabet="[]{}:,-&*!|>'\"%@\t\n #ax1\0é", max_size=6),
)
def test_any_damage_to_the_text_loads_or_is_refused_cleanly(tmp_path, cut, length, insert):
    cut %= len(FULL_TEXT)
    _load_or_refuse(tmp_path, FULL_TEXT[:cut] + insert + FULL_TEXT[cut + length :])


@MANY_IN_ONE_FOLDER
@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused_cleanly(tmp_path, content):
    refusal(tmp_path, content)


TAGS = ("bool", "int", "float", "timestamp", "binary", "null", "str", "set", "omap", "x")
TAGGED = st.tuples(
    st.sampled_from(["", "! ", *(f"!!{tag} " for tag in TAGS)]),
    st.one_of(
        st.sampled_from(["", "''", "maybe", "abc", "1:60", "-", "0x", "0b", ".inf", ".nan", "1e999", '"\\ud800"']),
        st.sampled_from(
            ["9" * 400 + unit for unit in ("", "GB", "s", ".5", "e9")] + ["0x" + "f" * 5000, "-0x" + "f" * 300]
        ),
        st.text(alphabet="0123456789xob_:.-+eE abTZ%=\u0660", max_size=12).filter(lambda text: ": " not in text),
    ),
).map("".join)


@functools.cache
def _with_place(path):
    return yaml.safe_dump(changed(around(path), path, "PLACE"))


def _check_tagged(tmp_path, path, scalar):
    """``scalar`` as it stands, not what PyYAML would make of it when it writes the file."""
    _load_or_refuse(tmp_path, _with_place(path).replace("PLACE", scalar))


@MANY_IN_ONE_FOLDER
@given(path=st.sampled_from(ALL_PATHS), scalar=TAGGED)
def test_any_scalar_anywhere_loads_or_is_refused_cleanly(tmp_path, path, scalar):
    _check_tagged(tmp_path, path, scalar)


@pytest.mark.exhaustive
@settings(MANY_IN_ONE_FOLDER, max_examples=700)
@given(path=st.sampled_from(ALL_PATHS), scalar=TAGGED)
def test_hundreds_of_scalars_load_or_are_refused_cleanly(tmp_path, path, scalar):
    _check_tagged(tmp_path, path, scalar)


@pytest.mark.parametrize("section", sorted(FULL))
def test_the_undamaged_files_are_valid(tmp_path, section):
    load_sweep(write(tmp_path, around((section,))))


@pytest.mark.parametrize("value", ["9" * 400 + "GB", "9" * 30 + "B"])
def test_a_size_out_of_range_is_refused(tmp_path, value):
    error = refusal(tmp_path, changed(FULL, ("cluster", "device_memory"), value))
    assert (error.key, "out of range" in error.message) == ("cluster.device_memory", True)
    assert len(str(error)) < 500


def _load_or_refuse(folder, content):
    file = write(folder, content)
    try:
        load_sweep(file)
    except ConfigError as error:
        assert error.file == str(file)
        assert str(error)


def test_more_class_folders_than_classes_are_refused_at_once(tmp_path):
    for name in ("cat", "dog", "fox"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.jpg").write_bytes(b"\xff\xd8")
    data = {"kind": "image_folder", "path": "images"}
    error = refusal(
        tmp_path, changed(changed(RESNET, ("workload", "data"), data), ("workload", "model", "num_classes"), 2)
    )
    assert (error.key, error.message) == (
        "workload.model.num_classes",
        f"the model has 2 classes, but {str(tmp_path / 'images')!r} has 3 class directories",
    )
    assert error.line == (tmp_path / "sweep.yaml").read_text().splitlines().index("    num_classes: 2") + 1
    assert "num_classes: 3" in error.remedy


def test_data_and_programs_of_another_host_are_not_looked_for_on_this_one(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    content = changed(FULL, ("workload", "data", "path"), "/data/elsewhere")
    content = changed(changed(content, ("gate", "command"), ["their-program"]), ("cluster",), {"kind": "ray"})
    file = write(tmp_path, content)
    assert load_sweep(file, address="10.0.0.1:6379").workload.data.path == "/data/elsewhere"
    with pytest.raises(ConfigError, match="no such file"):
        load_sweep(file)
