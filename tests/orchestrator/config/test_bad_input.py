"""Whatever is wrong with a file's keys and values: one clear error with file, line and key."""

import copy

import pytest

from tests.orchestrator.config.bad_files import (
    ALL_PATHS,
    FREE_KEYS,
    MAPPINGS,
    MARK,
    around,
    at,
    dotted,
    marked_lines,
    refusal,
)
from tests.support.sweep_files import FULL, LINEAR, RESNET, SIMULATED, changed


@pytest.mark.parametrize("path", MAPPINGS, ids=dotted)
def test_an_unknown_key_is_refused_at_every_level(tmp_path, path):
    error = refusal(tmp_path, changed(around(path), (*path, MARK), 1))
    assert [error.line] == marked_lines(tmp_path)
    assert error.key == dotted((*path, MARK))
    assert error.message == "unknown key"
    assert "Keys here: " in error.remedy


@pytest.mark.parametrize("path", MAPPINGS[1:], ids=dotted)
def test_a_misspelt_key_gets_the_nearest_valid_one(tmp_path, path):
    right = max(at(FULL, path), key=len)
    content = copy.deepcopy(around(path))
    node = at(content, path)
    node[right[:-1] + "zz"] = node.pop(right)
    error = refusal(tmp_path, content)
    everything = [error, *error.others]
    unknown = next(one for one in everything if one.message == "unknown key")
    assert f"Did you mean {right!r}?" in unknown.remedy


def is_meant(path, bad):
    """Values of this list that some keys do accept."""
    free_text = (
        ("tracking", "experiment"),
        ("cluster", "address"),
        ("cluster", "exclude_nodes", 0),
        ("notify", "command", 0),
        ("notify", "command", 1),
        ("gate", "command", 0),
        ("gate", "command", 1),
        ("profile", "output"),
    )
    optional = (
        *free_text[:3],
        ("notify",),
        ("notify", "webhook_env"),
        ("notify", "webhook_file"),
        ("notify", "command"),
        ("cluster", "min_nodes"),
        ("cluster", "max_wait"),
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
        ("search", "patience"),
        ("profile",),
        ("profile", "output"),
        ("gate", "loss_tolerance"),
        ("gate", "grad_norm_tolerance"),
        ("cluster", "price_per_device_hour"),
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
    error = refusal(tmp_path, changed(around(path), path, bad))
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
    error = refusal(tmp_path, changed(around(path), path, wrong))
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
        (("space", "precision"), "O3", "space.precision", "O0, O1, O1-fp8, O2"),
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
        (
            ("workload", "data"),
            {"kind": "token_file", "path": "text.txt", "dtype": "uint16"},
            "workload.model.vocab_size",
            "holds token id 30840",
        ),
        (("gate", "command"), ["no-such-program"], "gate.command.0", "is not on PATH"),
        (("gate", "command"), ["./no-such-program"], "gate.command.0", "cannot be run"),
        (("workload", "data", "kind"), "image_folder", "workload.data.pattern", "unknown key"),
        (("space", "forbid"), [{}], "space.forbid.0", "empty pattern"),
        (("space", "forbid"), [{"replicate_with": "auto"}], "space.forbid.0.replicate_with", "'ddp' or 'fsdp2'"),
        (("workload", "model", "num_heads"), 5, "workload.model.num_heads", "does not divide hidden_size"),
        (("workload", "model", "num_heads"), 64, "workload.model.num_heads", "odd"),
        (("workload", "model", "num_kv_heads"), 3, "workload.model.num_kv_heads", "does not divide num_heads"),
        (("workload", "model", "vocab_size"), 100, "workload.model.vocab_size", "out of range"),
        (("workload", "model"), "missing.yaml", "workload.model", "no model file"),
        (("workload", "model"), "a\0b", "workload.model", "control character"),
        (("workload", "data", "path"), "missing.txt", "workload.data.path", "No such file"),
        (("workload", "data", "path"), "a\0b", "workload.data.path", "control character"),
        (("workload", "data"), {"path": ".", "pattern": "*.none"}, "workload.data.path", "hold 0 bytes"),
        (("workload", "seq_length"), 100, "workload.data.path", "hold 100 bytes, fewer"),
        (("cluster",), {"kind": "local", "address": "x"}, "cluster.address", "no address"),
        (("cluster", "device_memory"), "2 parsecs", "cluster.device_memory", "size with its unit"),
        (("cluster", "device_memory"), 2048, "cluster.device_memory", "size with its unit"),
        (("cluster", "min_nodes"), 3, "cluster.min_nodes", "above num_nodes 2"),
        (("cluster", "max_wait"), "soon", "cluster.max_wait", "duration with its unit"),
        (("cluster", "queue"), "../team", "cluster.queue", "not a valid name"),
        (("cluster", "priority"), 101, "cluster.priority", "out of range"),
        (("notify",), {}, "notify", "nobody is told"),
        (("notify", "webhook_env"), "https://example.org/hook", "notify.webhook_env", "name of an environment"),
        (("notify", "webhook_env"), "HOME", "notify.webhook_env", "does not look like the name of a secret"),
        (("notify", "webhook_file"), "url.txt", "notify.webhook_file", "names the URL already"),
        (("notify", "command"), [], "notify.command", "at least 1"),
        (("notify", "command"), "notify-team", "notify.command", "expected a list"),
        (("notify", "command", 1), "a\0b", "notify.command.1", "control character"),
        (("notify", "on"), ["finished", "finished"], "notify.on", "listed twice"),
        (("notify", "on"), ["done"], "notify.on.0", "expected"),
        (("budget", "strikes_per_node"), 0, "budget.strikes_per_node", "out of range"),
        (("deadlines", "placing_s"), 0, "deadlines.placing_s", "out of range"),
        (("budget", "wall_time"), 600, "budget.wall_time", "duration with its unit"),
        (("budget", "wall_time"), "0s", "budget.wall_time", "duration with its unit"),
        (("measure", "max_steps"), 1, "measure.max_steps", "below num_steps 3"),
        (("measure", "max_warmup_steps"), 0, "measure.max_warmup_steps", "out of range"),
        (("search", "early_stop"), "fast", "search.early_stop", "expected a number or off, got 'fast'"),
        (("search", "early_stop"), True, "search.early_stop", "expected a number or off, got True"),
        (("runner",), "no_colon", "runner", "does not name a function"),
        (("runner",), "os:system('x')", "runner", "does not name a function"),
        (("tracking", "uri"), "ftp://x", "tracking.uri", "pattern"),
    ],
)
def test_meaning_is_checked_too(tmp_path, monkeypatch, path, value, key, words):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    here = changed(FULL, ("cluster", "address"), "local")  # data and programs are looked at where they lie on this host
    error = refusal(tmp_path, changed(here, path, value))
    found = {one.key: one for one in [error, *error.others]}
    assert key in found, str(error)
    assert words in found[key].message, str(error)
    assert found[key].remedy and found[key].line


@pytest.mark.parametrize(
    ("path", "value", "key", "words"),
    [
        (("simulation", "slow_nodes"), {"node0009": 1.2}, "cluster.simulation.slow_nodes", "no node 'node0009'"),
        (("simulation", "node_losses"), {"x": 1.0}, "cluster.simulation.node_losses", "no node 'x'"),
        (("simulation", "faults"), {"crash": 0.6, "hang": 0.6}, "cluster.simulation.faults", "sum to 1.2"),
        (("address",), "head:6379", "cluster.address", "a simulated cluster has no address"),
        (("exclude_nodes",), "node0001", "cluster.exclude_nodes", "expected a list"),
    ],
)
def test_simulated_clusters_are_checked_too(tmp_path, path, value, key, words):
    error = refusal(tmp_path, changed(SIMULATED, ("cluster", *path), value))
    assert error.key == key and words in error.message, str(error)
    assert error.line and error.remedy


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
