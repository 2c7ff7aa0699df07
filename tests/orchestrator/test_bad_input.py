"""Whatever is wrong with a file: one clear error with file, line and key, never another exception."""

import copy

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.errors import ConfigError
from orchestrator.plan import make_plan
from orchestrator.sweep import load_sweep
from orchestrator.yaml_source import MAX_FILE_BYTES, read_yaml
from tests.orchestrator.sweep_files import FULL, LINEAR, RESNET, SMALL, changed, topology, write

MARK = "wr0ng"


def refusal(folder, content):
    file = write(folder, content)
    with pytest.raises(ConfigError) as caught:
        load_sweep(file)
    assert caught.value.file == str(file)
    return caught.value


def marked_lines(folder):
    return [i for i, line in enumerate((folder / "sweep.yaml").read_text().splitlines(), 1) if MARK in line]


def paths(value, path=()):
    """Paths of everything below ``value``, lists included."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, list) and key > 1 and isinstance(item, int):
            continue  # as the others of the list
        yield (*path, key)
        if isinstance(item, dict | list):
            yield from paths(item, (*path, key))


def at(content, path):
    for part in path:
        content = content[part]
    return content


def dotted(path):
    return ".".join(map(str, path))


ALL_PATHS = list(paths(FULL))
FREE_KEYS = "select"
"""A mapping whose keys the user makes up."""
MAPPINGS = [
    (),
    *(path for path in ALL_PATHS if isinstance(at(FULL, path), dict) and path[-1] != FREE_KEYS),
]


@pytest.mark.parametrize("path", MAPPINGS, ids=dotted)
def test_an_unknown_key_is_refused_at_every_level(tmp_path, path):
    error = refusal(tmp_path, changed(FULL, (*path, MARK), 1))
    assert [error.line] == marked_lines(tmp_path)
    assert error.key == dotted((*path, MARK))
    assert error.message == "unknown key"
    assert "Keys here: " in error.remedy


@pytest.mark.parametrize("path", MAPPINGS[1:], ids=dotted)
def test_a_misspelt_key_gets_the_nearest_valid_one(tmp_path, path):
    right = max(at(FULL, path), key=len)
    content = copy.deepcopy(FULL)
    node = at(content, path)
    node[right[:-1] + "zz"] = node.pop(right)
    error = refusal(tmp_path, content)
    everything = [error, *error.others]
    unknown = next(one for one in everything if one.message == "unknown key")
    assert f"Did you mean {right!r}?" in unknown.remedy


def is_meant(path, bad):
    """Values of this list that some keys do accept."""
    free_text = (("tracking", "experiment"), ("cluster", "address"))
    optional = (
        *free_text,
        ("space", "precision", 1, "dtype"),
        ("baseline", "precision", "dtype"),
        ("workload", "data", "path"),
        ("cluster", "devices_per_node"),
        ("cluster", "device_memory"),
        ("space", "world_size"),
        ("workload", "seq_length"),
        ("baseline", "precision", "loss_scale"),
        ("space", "precision", 1, "loss_scale"),
        ("budget", "device_hours"),
        ("budget", "wall_time"),
        ("tracking", "uri"),
    )
    pattern = path == ("workload", "data", "pattern")  # the path is a file, so the pattern is not used
    huge_number = bad == 10**30 and isinstance(at(FULL, path), float)
    return (
        (bad is None and path in optional)
        or (isinstance(bad, str) and (path in free_text or pattern))
        or (isinstance(bad, dict) and path[-1] == FREE_KEYS)
        or (huge_number and path[-1] not in ("beta1", "beta2", "backoff_factor"))
    )


WRONG = [{MARK: 1}, f"{MARK} {MARK}", None, 10**30, -1.5]


@pytest.mark.parametrize(
    ("path", "bad"),
    [
        (path, bad)
        for i, path in enumerate(ALL_PATHS)
        for j, bad in enumerate(WRONG)
        if (i + j) % 2 == 0 and not is_meant(path, bad)
    ],
)
def test_a_value_of_the_wrong_type_is_refused_for_every_key(tmp_path, path, bad):
    error = refusal(tmp_path, changed(FULL, path, bad))
    everything = [error, *error.others]
    assert any((one.key or "").startswith(dotted(path)) for one in everything), str(error)
    assert all(one.line and one.message and one.remedy for one in everything), str(error)
    lines = marked_lines(tmp_path)
    assert not lines or any(lines[0] - 1 <= one.line <= lines[0] for one in everything), str(error)


LEAVES = [path for path in ALL_PATHS if not isinstance(at(FULL, path), dict | list)]


@pytest.mark.parametrize("path", LEAVES, ids=dotted)
def test_numbers_and_truth_values_do_not_pass_as_text_nor_text_as_numbers(tmp_path, path):
    value = at(FULL, path)
    wrong = "true" if isinstance(value, bool) else "8" if isinstance(value, int | float) else 8
    error = refusal(tmp_path, changed(FULL, path, wrong))
    assert any(one.key.startswith(dotted(path)) for one in [error, *error.others])


@pytest.mark.parametrize(
    "path", [("name",), ("workload",), ("workload", "model"), ("workload", "seq_length"), ("space",)]
)
def test_a_missing_key_is_named_at_the_line_of_its_section(tmp_path, path):
    content = copy.deepcopy(FULL)
    del at(content, path[:-1])[path[-1]]
    error = refusal(tmp_path, content)
    assert (error.key, error.message) == (dotted(path), "missing")
    text = (tmp_path / "sweep.yaml").read_text().splitlines()
    assert error.line == (text.index(f"{path[-2]}:") + 1 if len(path) > 1 else 1)


@pytest.mark.parametrize(
    ("path", "value", "key", "words"),
    [
        (("name",), "a/b", "name", "not a valid name"),
        (("name",), "../up", "name", "not a valid name"),
        (("name",), "Upper", "name", "not a valid name"),
        (("name",), "x" * 64, "name", "not a valid name"),
        (("name",), "new\nline", "name", "not a valid name"),
        (("baseline", "micro_batch_size"), 3, "baseline", "global_batch_size 16 is not divisible by"),
        (("baseline", "tp"), 3, "baseline", "not divisible by tp 3"),
        (("baseline", "dp_shard"), 2, "baseline", "zero_stage 0"),
        (("space", "tp"), 0, "space.tp", "out of range"),
        (("space", "tp"), [], "space.tp", "nothing to choose from"),
        (("space", "tp"), [2, 2], "space.tp", "listed twice"),
        (("space", "tp"), [1, "2"], "space.tp.1", "expected a whole number, got '2'"),
        (("space", "tp"), True, "space.tp", "expected a whole number, got True"),
        (("space", "zero_stage"), 4, "space.zero_stage", "out of range"),
        (("space", "compile"), "on", "space.compile", "expected 'off', 'block' or 'model'"),
        (("space", "compile"), True, "space.compile", "expected 'off', 'block' or 'model'"),
        (("space", "recompute"), "half", "space.recompute", "none, full"),
        (("space", "precision"), "O3", "space.precision", "O0, O1, O2"),
        (("space", "precision"), {"level": "O0", "dtype": "float16"}, "space.precision.dtype", "O0 is float32"),
        (("space", "precision"), {"level": "O2", "dtype": "float32"}, "space.precision.dtype", "16-bit"),
        (("space", "precision"), {"level": "O1", "loss_scale": {}}, "space.precision.loss_scale", "float16 only"),
        (
            ("space", "precision"),
            {"level": "O1", "dtype": "float16", "loss_scale": {"initial": 1e60}},
            "space.precision.loss_scale.initial",
            "out of range",
        ),
        (("space", "recompute"), [4, 0], "space.recompute.0", "expected one of none, full or a mapping, got 4"),
        (("space", "recompute"), {"full": "some"}, "space.recompute.full", "all, a number of layers"),
        (("space", "recompute"), {"full": [[1, 2], 3]}, "space.recompute.full.1", "numbers per stage"),
        (("space", "recompute"), {"select": {"(": 1}}, "space.recompute.select.(", "no regular expression"),
        (
            ("space", "recompute"),
            [{"select": {r"a\.(b*)*": 1}}],
            r"space.recompute.0.select.a\.(b*)*",
            "repeats a part",
        ),
        (
            ("space", "recompute"),
            {"select": {"x" * 300: 1}},
            f"space.recompute.select.{'x' * 300}",
            "1 to 200 characters",
        ),
        (("space", "stage_layers"), {"offset": [1, 1]}, "space.stage_layers.offset", "sum to +2"),
        (("space", "stage_layers"), {"counts": [5, -1]}, "space.stage_layers.counts.1", "from 0 to"),
        (("space", "stage_layers"), {}, "space.stage_layers", "either offset or counts"),
        (("space", "dataloader"), "tuned", "space.dataloader", "one of manual, auto or a mapping"),
        (("space", "cudnn_benchmark"), {"first": 9, "last": 3}, "space.cudnn_benchmark.last", "before first 9"),
        (("space", "cudnn_benchmark"), True, "space.cudnn_benchmark", "off or a mapping"),
        (("space", "num_copies"), 3, "space.num_copies", "expected 1 or 2"),
        (("space", "precision"), {"level": "O2", "white": ["a"]}, "space.precision.white", "O2 has no lists"),
        (("space", "precision"), {"level": "O1", "white": ["a b"]}, "space.precision.white.0", "not the name"),
        (
            ("space", "precision"),
            {"level": "O1", "white": ["a"], "black": ["a"]},
            "space.precision.black",
            "on the white list too",
        ),
        (("workload", "model", "kind"), "gpt", "workload.model.kind", "got 'gpt'"),
        (("workload", "data"), {"kind": "random"}, "workload.data.kind", "llama models cannot train on random"),
        (("workload", "data"), {"kind": "token_file", "path": "no.bin"}, "workload.data.path", "No such file"),
        (
            ("workload", "data"),
            {"kind": "token_file", "path": "text.txt", "dtype": "int64"},
            "workload.data.path",
            "whole",
        ),
        (
            ("workload", "data"),
            {"kind": "token_file", "path": "text.txt", "dtype": "int32"},
            "workload.data.path",
            "25 tokens",
        ),
        (("workload", "data", "kind"), "image_folder", "workload.data.pattern", "unknown key"),
        (("space", "forbid"), [{}], "space.forbid.0", "empty pattern"),
        (("space", "forbid"), [{"replicate_with": "auto"}], "space.forbid.0.replicate_with", "'ddp' or 'fsdp2'"),
        (("workload", "model", "num_heads"), 5, "workload.model.num_heads", "does not divide hidden_size"),
        (("workload", "model", "num_heads"), 64, "workload.model.num_heads", "odd"),
        (("workload", "model", "num_kv_heads"), 3, "workload.model.num_kv_heads", "does not divide num_heads"),
        (("workload", "model", "vocab_size"), 100, "workload.model.vocab_size", "out of range"),
        (("workload", "model"), "missing.yaml", "workload.model", "no model file"),
        (("workload", "model"), "a\0b", "workload.model", "no model file"),
        (("workload", "data", "path"), "missing.txt", "workload.data.path", "No such file"),
        (("workload", "data", "path"), "a\0b", "workload.data.path", "not a path"),
        (("workload", "data"), {"path": ".", "pattern": "*.none"}, "workload.data.path", "hold 0 bytes"),
        (("workload", "seq_length"), 100, "workload.data.path", "hold 100 bytes, fewer"),
        (("cluster",), {"kind": "local", "address": "x"}, "cluster.address", "no address"),
        (("cluster", "device_memory"), "2 parsecs", "cluster.device_memory", "size with its unit"),
        (("cluster", "device_memory"), 2048, "cluster.device_memory", "size with its unit"),
        (("budget", "wall_time"), 600, "budget.wall_time", "duration with its unit"),
        (("budget", "wall_time"), "0s", "budget.wall_time", "duration with its unit"),
        (("measure", "max_steps"), 1, "measure.max_steps", "below num_steps 3"),
        (("measure", "max_warmup_steps"), 0, "measure.max_warmup_steps", "out of range"),
        (("runner",), "no_colon", "runner", "does not name a function"),
        (("runner",), "os:system('x')", "runner", "does not name a function"),
        (("tracking", "uri"), "ftp://x", "tracking.uri", "pattern"),
    ],
)
def test_meaning_is_checked_too(tmp_path, path, value, key, words):
    error = refusal(tmp_path, changed(FULL, path, value))
    found = {one.key: one for one in [error, *error.others]}
    assert key in found, str(error)
    assert words in found[key].message, str(error)
    assert found[key].remedy and found[key].line


@pytest.mark.parametrize(
    ("content", "path", "value", "key", "words"),
    [
        (RESNET, ("workload", "seq_length"), 8, "workload.seq_length", "resnet models read no sequences"),
        (RESNET, ("workload", "model", "num_layers"), 8, "workload.model.num_layers", "unknown key"),
        (RESNET, ("workload", "model", "depth"), 34, "workload.model.depth", "18 or 50"),
        (RESNET, ("workload", "data", "path"), "missing", "workload.data.path", "No such file"),
        (RESNET, ("workload", "data", "path"), "images/cat", "workload.data.path", "no JPEG files"),
        (RESNET, ("baseline",), {"pp": 2}, "baseline", "resnet runs data-parallel only"),
        (LINEAR, ("workload", "data"), {"kind": "text"}, "workload.data.kind", "linear models cannot train on text"),
        (LINEAR, ("workload", "model"), {"size": 8}, "workload.model.kind", "missing"),
    ],
)
def test_other_workloads_are_checked_too(tmp_path, content, path, value, key, words):
    error = refusal(tmp_path, changed(content, path, value))
    found = {one.key: one for one in [error, *error.others]}
    assert words in found[key].message, str(error)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("tracking", "uri"), "https://me:hunter2@example.org/mlflow"),
        (("tracking", "uri"), "https://hunter2@example.org/mlflow"),
        (("cluster", "address"), "ray://me:hunter2@head:10001"),
        (("tracking", "token"), "hunter2"),
        (("cluster", "api_key"), "hunter2"),
        (("workload", "data", "aws_secret"), "hunter2"),
        (("tracking", "experiment"), "AKIA" + "A" * 16),
        (("tracking", "experiment"), "ghp_" + "a" * 36),
        (("tracking", "experiment"), "-----BEGIN PRIVATE KEY-----"),
    ],
)
def test_secrets_are_refused_and_not_repeated(tmp_path, path, value):
    error = refusal(tmp_path, changed(FULL, path, value))
    assert error.key == dotted(path)
    assert "secret" in str(error)
    assert "hunter2" not in str(error) and value not in str(error)


@pytest.mark.parametrize("path", [path for path in MAPPINGS if path and not any(isinstance(p, int) for p in path)])
def test_a_duplicate_key_is_refused_at_every_level(tmp_path, path):
    lines = yaml.safe_dump(FULL, sort_keys=False).splitlines()
    text, path = "\n".join(lines), list(path)
    here = next(i for i, node in enumerate(_key_paths(lines)) if node == path)
    last = here + 1
    while last < len(lines) and lines[last].startswith("  " * len(path)):
        last += 1
    text = "\n".join([*lines[:last], *lines[here:last], *lines[last:]])
    error = refusal(tmp_path, text)
    assert error.line == last + 1
    assert error.key == dotted(path)
    assert error.message == f"the key stands twice, first on line {here + 1}"


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
        ("", 1, "empty"),
        ("# only a comment\n", 1, "empty"),
        ("null\n", 1, "mapping"),
        ("- a\n", 1, "mapping"),
        ("just text\n", 1, "mapping"),
        ("name: x\nworkload:\n\tseq_length: 1\n", 3, "tab"),
        ("name: x\nspace: [1, 2\n", 3, "not valid YAML"),
        ("name: x\nspace: 'open\n", 3, "not valid YAML"),
        ("name: x\n---\nname: y\n", 2, "not valid YAML"),
        ("name: x\n1: y\n", 2, "key must be text"),
        ("name: x\n? [a]\n: y\n", 2, "key must be text"),
        ("name: x\ndate: 2024-13-45\n", 2, "month"),
        ("name: x\nspace: *nowhere\n", 2, "undefined alias"),
        ("name: x\nspace: !!python/object/apply:os.system [ls]\n", 2, "tag"),
        ("name: x\nspace: &a [*a]\n", 2, "nested deeper"),
        ("name: x\nspace: " + "[" * 5000, 1, "nested deeper"),
        ("base: &b {name: x}\n<<: *b\n", 2, "merge keys"),
        (b"name: x\nspace: \xff\xfe\n", 2, "not UTF-8"),
        (bytes(range(256)) * 50, None, ""),
        (b"\x7fELF\0\0\0\0" * 10, 1, "not valid YAML"),
        ("x: " + "y" * MAX_FILE_BYTES, None, "larger than"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_text_that_is_no_sweep_at_all(tmp_path, content, line, words):
    error = refusal(tmp_path, content)
    assert words in str(error)
    assert line is None or error.line == line


def test_an_alias_bomb_is_refused_before_it_is_expanded(tmp_path):
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    error = refusal(tmp_path, "\n".join(levels))
    assert "values once its aliases are expanded" in error.message


def test_plain_aliases_work(tmp_path):
    (tmp_path / "a.yaml").write_text("a: &x [1, 1e-3]\nb: *x\n")
    assert read_yaml(tmp_path / "a.yaml").data == {"a": [1, 1e-3], "b": [1, 1e-3]}


@pytest.mark.parametrize("name", ["missing.yaml", ".", "a\0b"])
def test_a_file_that_cannot_be_opened(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_sweep(tmp_path / name)
    assert caught.value.file == str(tmp_path / name)


def test_an_error_in_the_model_file_names_that_file(tmp_path):
    (tmp_path / "model.yaml").write_text("kind: llama\nhidden_size: 64\nnum_layer: 4\n")
    file = write(tmp_path, changed(SMALL, ("workload", "model"), "model.yaml"))
    with pytest.raises(ConfigError) as caught:
        load_sweep(file)
    unknown = next(one for one in [caught.value, *caught.value.others] if one.key == "num_layer")
    assert unknown.file == str(tmp_path / "model.yaml")
    assert unknown.line == 3
    assert "Did you mean 'num_layers'?" in unknown.remedy


def test_all_problems_are_told_at_once_in_the_order_of_the_file(tmp_path):
    error = refusal(tmp_path, "name: x/y\nspace: {tpp: 1}\nbudget:\n  max_trials: none\n")
    assert [(one.line, one.key) for one in [error, *error.others]] == [
        (1, "name"),
        (1, "workload"),
        (2, "space.tpp"),
        (4, "budget.max_trials"),
    ]
    assert str(error).count("\n") == 3


def test_impossible_degrees_are_refused_by_the_plan_with_file_and_line(tmp_path):
    spec = load_sweep(write(tmp_path, changed(SMALL, ("space",), {"tp": [3, 5]})))
    with pytest.raises(ConfigError, match="no legal candidate: rule tp-num-heads removed 2 of 2") as caught:
        make_plan(spec)
    assert (caught.value.file, caught.value.key) == (str(tmp_path / "sweep.yaml"), "space")
    assert caught.value.line == (tmp_path / "sweep.yaml").read_text().splitlines().index("space:") + 1


def test_a_baseline_too_large_for_the_lease_is_refused_by_the_plan(tmp_path):
    spec = load_sweep(write(tmp_path, {**SMALL, "baseline": {"dp_replicate": 4}}))
    with pytest.raises(ConfigError, match="baseline: cannot run here: world_size 4 does not fit the lease of 2"):
        make_plan(spec, topology(2))


def test_too_large_a_space_names_the_longest_lists(tmp_path):
    many = list(range(1, 301))
    space = {"micro_batch_size": many, "dp_replicate": many, "tp": many[:50], "num_workers": [0, 1]}
    spec = load_sweep(write(tmp_path, {**SMALL, "space": space}))
    with pytest.raises(
        ConfigError, match=r"9,000,000 combinations.*dp_replicate \(300\), micro_batch_size \(300\), tp"
    ):
        make_plan(spec)


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["O1", "full", 2])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(ALL_PATHS), value=VALUES)
def test_any_value_anywhere_loads_or_is_refused_cleanly(tmp_path, path, value):
    _load_or_refuse(tmp_path, changed(FULL, path, value))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cut=st.integers(0, 2000),
    length=st.integers(0, 5),
    insert=st.text(alphabet="[]{}:,-&*!|>'\"%@\t\n #ax1\0é", max_size=6),
)
def test_any_damage_to_the_text_loads_or_is_refused_cleanly(tmp_path, cut, length, insert):
    text = yaml.safe_dump(FULL, sort_keys=False)
    cut %= len(text)
    _load_or_refuse(tmp_path, text[:cut] + insert + text[cut + length :])


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused_cleanly(tmp_path, content):
    refusal(tmp_path, content)


def _load_or_refuse(folder, content):
    file = write(folder, content)
    try:
        load_sweep(file)
    except ConfigError as error:
        assert error.file == str(file)
        assert str(error)
