"""Hundreds of wrong files through ``submit``: exit 2, one message that names file, line and key, and no side effect."""

import copy
import re

import pytest
from click.testing import CliRunner

from orchestrator.cli.main import main
from tests.orchestrator.config.bad_files import ALL_PATHS, MAPPINGS, MARK, at, dotted
from tests.orchestrator.config.test_bad_input import LEAVES, WRONG, is_meant
from tests.support.sweep_files import FULL, RESNET, SIMULATED, SMALL, changed, write


def unknown_keys():
    for path in MAPPINGS:
        yield changed(FULL, (*path, MARK), 1), dotted((*path, MARK))


def wrong_values():
    for number, path in enumerate(ALL_PATHS[::2]):
        bad = WRONG[number % len(WRONG)]
        if not is_meant(path, bad):
            yield changed(FULL, path, bad), dotted(path)


def wrong_kinds_of_scalars():
    for path in LEAVES[1::2]:
        value = at(FULL, path)
        wrong = "true" if isinstance(value, bool) else "8" if isinstance(value, int | float) else 8
        yield changed(FULL, path, wrong), dotted(path)


def missing_keys():
    for path in (("name",), ("workload",), ("workload", "model"), ("workload", "seq_length"), ("space",)):
        content = copy.deepcopy(FULL)
        del at(content, path[:-1])[path[-1]]
        yield content, dotted(path)


LOCAL = {**SMALL, "cluster": {"kind": "local", "devices_per_node": 2}}
BY_HAND = [
    # text that is no sweep
    ("", None),
    ("- name: x\n", None),
    ("name: x\nname: y\n", "name"),
    ("name: [x\n", None),
    ("name: &a [*a]\n", None),
    ("name: !!python/object/apply:os.system [touch pwned]\n", None),
    (b"name: \xff\n", None),
    # one for every section
    (changed(FULL, ("name",), "../../etc/passwd"), "name"),
    (changed(FULL, ("workload", "model"), "../../etc/no.yaml"), "workload.model"),
    (changed(LOCAL, ("workload", "data"), {"kind": "text", "path": "../missing"}), "workload.data.path"),
    (changed(FULL, ("workload", "global_batch_size"), 0), "workload.global_batch_size"),
    (changed(FULL, ("cluster", "min_nodes"), 3), "cluster.min_nodes"),
    (changed(FULL, ("cluster", "max_wait"), 60), "cluster.max_wait"),
    (changed(FULL, ("cluster", "queue"), "a b"), "cluster.queue"),
    (changed(FULL, ("cluster", "priority"), "high"), "cluster.priority"),
    (changed(FULL, ("cluster", "kind"), "slurm"), "cluster.kind"),
    (changed(FULL, ("cluster", "simulation"), {"accelerator": "a100-80"}), "cluster.simulation"),
    (changed(FULL, ("space", "tp"), [0, -1]), "space.tp"),
    (changed(FULL, ("space", "recompute"), {"select": {"(a+)+$": 1}}), "space.recompute.select"),
    (changed(FULL, ("baseline", "dp_replicate"), 10**6), "baseline"),
    (changed(FULL, ("search", "sampler"), "bayes"), "search.sampler"),
    (changed(FULL, ("search", "max_concurrent"), 0), "search.max_concurrent"),
    (changed(FULL, ("measure", "num_steps"), 5), "measure.max_steps"),
    (changed(FULL, ("budget", "device_hours"), -1), "budget.device_hours"),
    (changed(FULL, ("budget", "strikes_per_node"), 0), "budget.strikes_per_node"),
    (changed(FULL, ("deadlines", "placing_s"), 0), "deadlines.placing_s"),
    (changed(FULL, ("runner",), "os:system; rm"), "runner"),
    (changed(FULL, ("tracking", "uri"), "sqlite://relative.db"), "tracking.uri"),
    (changed(FULL, ("notify",), {"on": ["finished"]}), "notify"),
    (changed(FULL, ("notify", "command"), "mail root"), "notify.command"),
    (changed(FULL, ("notify", "on"), []), "notify.on"),
    (changed(FULL, ("notify", "webhook_env"), "hooks.example.org/T0/secret"), "notify.webhook_env"),
    (changed(SIMULATED, ("cluster", "simulation", "accelerator"), "abacus"), "cluster.simulation.accelerator"),
    (changed(RESNET, ("workload", "seq_length"), 8), "workload.seq_length"),
    # right as a file, and impossible all the same
    (changed(LOCAL, ("space",), {"tp": [3, 5]}), "space"),
    ({**LOCAL, "baseline": {"dp_replicate": 8}}, "baseline"),
]

GENERATED = [*unknown_keys(), *wrong_values(), *wrong_kinds_of_scalars(), *missing_keys()]


def test_there_are_enough():
    assert len({repr(content) for content, _ in [*GENERATED, *BY_HAND]}) >= 200


def submit(folder, content):
    """Exit code and message; nothing else is to be seen or left."""
    file, home = write(folder, content), folder / "home"
    before = snapshot(folder)
    result = CliRunner().invoke(main, ["submit", str(file), "--home", str(home)])
    assert snapshot(folder) == before
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.stderr
    assert result.stderr.count("error: ") == 1 and result.stderr.startswith("error: ")
    return result.exit_code, result.stderr.removeprefix("error: ")


def snapshot(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def check(folder, content, key):
    exit_code, message = submit(folder, content)
    assert exit_code == 2
    named = {m["key"]: m["line"] for m in re.finditer(r"sweep\.yaml(:(?P<line>\d+))?: (?P<key>\S+): ", message)}
    assert re.match(rf"{re.escape(str(folder / 'sweep.yaml'))}(:\d+)?: ", message), message
    if key is not None:
        assert any(name.startswith(key) and line for name, line in named.items()), f"{key} is not in {message}"


@pytest.mark.parametrize("kind", [unknown_keys, wrong_values, wrong_kinds_of_scalars, missing_keys])
def test_generated_files(kind, tmp_path):
    for content, key in kind():
        check(tmp_path, content, key)


def test_files_written_by_hand(tmp_path):
    for content, key in BY_HAND:
        check(tmp_path, content, key)


def test_what_is_wrong_decides_the_message(tmp_path):
    """The messages above come from what is wrong, not from everything."""
    exit_code, message = submit(tmp_path, changed(FULL, ("baseline",), {"dp_replicate": 10**6}))
    assert (exit_code, "baseline" in message) == (2, True)
