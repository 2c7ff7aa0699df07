"""Whatever is wrong with a file's keys and values: one clear error with file, line and key."""

import copy
import re

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
from tests.support.sweep_files import FULL, changed


@pytest.mark.parametrize("path", MAPPINGS, ids=dotted)
def test_an_unknown_key_is_refused_at_every_level(tmp_path, path):
    error = refusal(tmp_path, changed(around(path), (*path, MARK), 1))
    assert [error.line] == marked_lines(tmp_path)
    assert error.key == dotted((*path, MARK))
    assert error.message == "unknown key"
    assert "Valid keys: " in error.remedy


@pytest.mark.parametrize("path", MAPPINGS[1:], ids=dotted)
def test_a_misspelt_key_suggests_the_nearest_valid_one(tmp_path, path):
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
        ("search", "learn_from", "experiment"),
        ("search", "learn_from", "metric"),
        ("notify", "command", 0),
        ("notify", "command", 1),
        ("gate", "command", 0),
        ("gate", "command", 1),
        ("profile", "output"),
        ("space", "precision", 2, "keep_fp32", 0),
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
        ("workload", "data", "lengths"),
        ("workload", "optimizer", "clip_norm"),
        ("cluster", "devices_per_node"),
        ("cluster", "device_memory"),
        ("space", "world_size"),
        ("space", "stage_layers", 2, "offset"),
        ("workload", "seq_length"),
        ("baseline", "precision", "loss_scale"),
        ("space", "precision", 1, "loss_scale"),
        ("budget", "device_hours"),
        ("budget", "wall_time"),
        ("tracking", "uri"),
        ("search", "patience"),
        ("search", "learn_from"),
        ("search", "learn_from", "uri"),
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
        or (isinstance(bad, dict) and path[-1] in FREE_KEYS)
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
    assert all(one.line for one in everything), str(error)
    assert all(one.remedy or re.search("expected (one of |')|; only", one.message) for one in everything), str(error)
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
    assert (error.key, error.message) == (dotted(path), "required key is missing")
    text = (tmp_path / "sweep.yaml").read_text().splitlines()
    assert error.line == (text.index(f"{path[-2]}:") + 1 if len(path) > 1 else 1)
