"""What docs/security.md promises: secrets stay out of everything, names and files are harmless, doors are shut."""

import base64
import json
import logging
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from cluster.base import ClusterRequest
from cluster.connect import connect
from cluster.hardware.topology import CatalogueError, load_cluster
from orchestrator.cli.main import main
from orchestrator.config.sweep import load_sweep
from orchestrator.config.training_program import ScriptSection
from orchestrator.errors import ConfigError
from orchestrator.mlflow_urls import check_tracking_uri
from orchestrator.sweep.ledger import Ledger
from orchestrator.sweep.snapshot import Home, check_name
from orchestrator.tracking import mlflow_server
from tests.support import sweeps, user_runners
from tests.support.mlflow_store import new_store
from trials.files import make_private_folder, to_json, write_atomically
from trials.secrets import (
    MASK,
    VARIABLES,
    RedactingFormatter,
    for_ranks,
    is_secret_name,
    literal_secret,
    redact,
    redact_all,
    redact_file,
    variable_in,
)

PLANTED = "pl4nted"
SECRETS = {
    "MLFLOW_TRACKING_PASSWORD": f"{PLANTED}-mlflow-password",
    "MLFLOW_TRACKING_TOKEN": f"{PLANTED}-mlflow-token",
    "RAY_AUTH_TOKEN": f"{PLANTED}-ray-token",
    "TUNE_CLUSTER_WEBHOOK_URL": f"https://hooks.example.org/{PLANTED}-webhook",
    "TEAM_WEBHOOK": f"https://hooks.example.org/{PLANTED}-team",
    user_runners.KEY: f'{PLANTED}/key+with "quotes"',
}


@pytest.fixture
def planted(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


# ---- redaction ----


def spellings(secret):
    encoded = base64.b64encode(secret.encode()).decode()
    return [
        secret,
        quote(secret),
        quote(secret, safe=""),
        json.dumps(secret),
        repr(secret),
        str(escape(secret)),
        encoded,
    ]


@pytest.mark.parametrize("name", SECRETS)
def test_secret_values_are_redacted_in_every_spelling(planted, name):
    for text in spellings(SECRETS[name]):
        shown = redact(f"before {text} after")
        assert MASK in shown and PLANTED not in shown and text.strip("\"'") not in shown
        assert shown.startswith("before ") and shown.endswith(" after")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("at https://me:hunter2@host:80/x", "at https://***@host:80/x"),
        ("GET /x?a=1&access_token=abcdefgh&b=2", "GET /x?a=1&access_token=***&b=2"),
        ("{'password': 'hunter2', 'user': 'me'}", "{'password': '***', 'user': 'me'}"),
        ("Authorization: Bearer abcdefghijkl", "Authorization: Bearer ***"),
        ("sent bearer " + "a" * 40, "sent bearer ***"),
        ("key ghp_" + "a" * 36, "key ***"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabcd\n-----END RSA PRIVATE KEY-----\nend", "***\nend"),
        ("to https://hooks.slack.com/services/T0/B0/xyz!", "to ***!"),
    ],
)
def test_credentials_are_recognised_by_their_form(text, shown):
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "loss 3.2 at step 100, 2048 tokens, eos_token=</s>",
        "cluster.api_key: sweep files must not contain secrets. Keep secrets in the environment, not in files.",
        "git@github.com:a/b, sqlite:////srv/a@b/mlflow.db, http://host:5000/#/experiments/1?x=2",
        "Basic usage of bearer authentication",
        "true disabled 123456",
    ],
)
def test_other_text_is_unchanged(monkeypatch, text):
    for i, value in enumerate(("true", "disabled", "123456", "")):
        monkeypatch.setenv(f"OTHER_{i}_TOKEN", value)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "tokens")
    assert redact(text) == text


def test_the_content_of_token_files_is_secret(monkeypatch, tmp_path):
    (tmp_path / "token").write_text(f"{PLANTED}-from-a-file\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert redact(f"{tmp_path}/token holds {PLANTED}-from-a-file") == f"{tmp_path}/token holds ***"
    (tmp_path / "token").write_text(f"{PLANTED}-another")
    assert PLANTED not in redact(f"now {PLANTED}-another")


def test_user_and_password_make_a_header(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", SECRETS["MLFLOW_TRACKING_PASSWORD"])
    header = base64.b64encode(f"me:{SECRETS['MLFLOW_TRACKING_PASSWORD']}".encode()).decode()
    assert header not in redact(f"{{'x': '{header}'}}")


@given(st.text(min_size=12, alphabet=st.characters(exclude_categories=("Cs", "Cc"))), st.text(), st.text())
def test_secrets_are_found_in_any_context(secret, before, after):
    secret = secret.strip()
    if len(secret) < 12 or secret.isdigit() or secret in before + after:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ANY_SECRET", secret)
        body = {"message": [f"{before}{secret}{after}"], "n": 1}
        assert secret not in json.dumps(redact_all(body), ensure_ascii=False).replace(MASK, "\0")
        assert redact_all(body)["n"] == 1


def test_log_lines_and_their_tracebacks_are_redacted(planted):
    try:
        raise ValueError(SECRETS["RAY_AUTH_TOKEN"])
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "x", 1, "%s", (SECRETS["RAY_AUTH_TOKEN"],), sys.exc_info())
    shown = RedactingFormatter("%(message)s").format(record)
    assert PLANTED not in shown and "ValueError: ***" in shown


def test_a_log_file_is_redacted_in_place_and_links_are_left_alone(planted, tmp_path):
    log, link, other = tmp_path / "rank0.log", tmp_path / "rank1.log", tmp_path / "other"
    text = b"\xff step 1\n" * 50_000
    log.write_bytes(text + SECRETS["RAY_AUTH_TOKEN"].encode() + b"\nlast\n")
    other.write_text(SECRETS["RAY_AUTH_TOKEN"])
    link.symlink_to(other)
    assert redact_file(log) and not redact_file(log)
    assert log.read_bytes() == text + b"***\nlast\n"
    assert not redact_file(link) and not redact_file(tmp_path) and not redact_file(tmp_path / "none")
    assert PLANTED in other.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "rank0.log", "rank1.log"]


def test_ranks_get_no_credentials_of_the_store_or_ray():
    kept = for_ranks({**SECRETS, "PATH": "/bin", "RAY_AUTH_MODE": "token", "AWS_SECRET_ACCESS_KEY": "x"})
    assert sorted(kept) == ["AWS_SECRET_ACCESS_KEY", "PATH", user_runners.KEY]


# ---- a sweep whose trials let secrets slip ----


def everything_below(folder):
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}


def leaks(texts):
    """Where a secret stands, in any spelling."""
    forms = {form.encode() for secret in SECRETS.values() for form in spellings(secret)} | {PLANTED.encode()}
    return [name for name, text in texts.items() if any(form in text for form in forms)]


@pytest.mark.slow
@pytest.mark.exhaustive
def test_planted_secrets_are_nowhere(planted, tmp_path, monkeypatch):
    temporary, home = tmp_path / "tmp", tmp_path / "home"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    file = sweeps.write(
        tmp_path,
        runner="tests.support.user_runners:leaky",
        space={"dp_replicate": [2]},
        budget={"max_trials": 3, "consecutive_failures": 6},
    )
    commented = file.read_text() + f"# it needs https://me:{SECRETS['MLFLOW_TRACKING_PASSWORD']}@host\n"
    file.write_text(commented)
    make_private_folder(home)
    new_store(home)
    program = [Path(sys.executable).with_name("tune-cluster"), "-v"]
    command = [*program, "submit", file, "--home", home, "--json"]
    done = subprocess.run([*map(str, command)], capture_output=True, timeout=170)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    reported = {"stdout": done.stdout, "stderr": done.stderr}
    shows = (["report", "tiny"], ["status", "tiny"], ["ps"], ["explain", "tiny", "1"], ["logs", "tiny", "1"])
    for words in [*shows, *([*words, "--json"] for words in shows)]:
        shown = CliRunner().invoke(main, [*words, "--home", str(home)])
        assert shown.exit_code == 0, (words, shown.output)
        reported[" ".join(words)] = shown.stdout_bytes + shown.stderr_bytes
    file.unlink()  # as it was submitted it may stay; what was kept of it is in the ledger
    assert leaks(reported | everything_below(tmp_path)) == []
    _check_what_ranks_saw(home)


PASSED = """
DB_PASS MYSQL_PWD OPENAI_KEY SSH_KEY GH_PAT COMET_KEY AUTH BASIC_AUTH SENTRY_DSN DSN HF_TOKEN WANDB_API_KEY STORE_SECRET
AWS_SECRET_ACCESS_KEY SIGNING_PASSPHRASE PGPASSWORD AZURE_CREDENTIALS PLAIN_NAME LICENCE ACCOUNT
""".split()  # noqa: SIM905
"""Twenty variables that a program needs; the last three are secret only because env_pass names them."""
STEP_LINE = r"iter (?P<step>\d+): loss (?P<loss>\S+), time (?P<step_ms>[\d.]+)ms"
TALKATIVE = """
import json, os, sys, time
names = json.loads(sys.argv[1])
print("environment:", {name: os.environ[name] for name in names}, flush=True)
print(json.dumps({name: os.environ[name] for name in names}), file=sys.stderr, flush=True)
for name in names:
    print(f"using {os.environ[name]}!", flush=True)
if sys.argv[2] == "2":
    raise PermissionError("no access with " + " ".join(os.environ[name] for name in names))
for step in range(1, 7):
    time.sleep(0.02)
    print(f"iter {step}: loss 1.0, time 20.0ms", flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_twenty_secrets_of_a_program_are_nowhere(tmp_path, monkeypatch):
    temporary, home, out = tmp_path / "tmp", tmp_path / "home", tmp_path / "out"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    for i, name in enumerate(PASSED):
        monkeypatch.setenv(name, f"{PLANTED}-{i}/v&lue")
    assert len(PASSED) == 20
    (tmp_path / "train.py").write_text(TALKATIVE)
    file = tmp_path / "sweep.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "name": "script",
                "workload": {
                    "recipe": "custom",
                    "run": [sys.executable, "-u", "train.py", json.dumps(PASSED), "{w}"],
                    "env_pass": list(PASSED),
                    "global_batch_size": 8,
                    "metrics": {"log": STEP_LINE, "hook": False},
                },
                "cluster": {"kind": "local", "device": "cpu", "devices_per_node": 1},
                "baseline": {"own": {"w": 1}},
                "space": {"own": {"w": [1, 2, 3]}},
                "measure": {"num_steps": 3, "max_steps": 3, "min_warmup_steps": 1},
                "budget": {"max_trials": 3},
                "search": {"sampler": "grid", "early_stop": "off"},
                "confirm": "off",
                "gate": "off",
            }
        )
    )
    make_private_folder(home)
    new_store(home)
    program = [Path(sys.executable).with_name("tune-cluster"), "-v"]
    done = subprocess.run([*map(str, [*program, "submit", file, "--home", home])], capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    reported = {"stdout": done.stdout, "stderr": done.stderr}
    page = ["report", "script", "--html", str(out / "page.html")]
    out.mkdir()
    for words in (page, ["explain", "script"], ["logs", "script", "0"], ["status", "script", "--json"]):
        shown = CliRunner().invoke(main, [*words, "--home", str(home)])
        assert shown.exit_code == 0, (words, shown.output)
        reported[" ".join(words)] = shown.stdout_bytes + shown.stderr_bytes
    assert leaks(reported | everything_below(tmp_path)) == []
    logs = "".join(path.read_text() for path in home.rglob("rank0.log"))
    assert logs.count("using ***!") >= 20 * 3
    with Ledger.open_existing(home / "sweeps" / "script") as ledger:
        kept = json.dumps([to_json(event) for event in ledger.events()])
    assert "no access with ***" in kept


@pytest.mark.parametrize("name", PASSED[:-3])
def test_variables_named_like_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    (
        *("tokens_per_step", "TOKENIZER", "MAX_TOKENS", "KEY_DIM", "AUTHOR", "KEYBOARD", "PWD", "OLDPWD", "COMPASS"),
        *("PATH", "PATTERN", "SSH_AUTH_SOCK", "PUBLIC_KEY", "MONKEY", "RAY_AUTH_MODE", "TOKENIZERS_PARALLELISM"),
    ),
)
def test_variables_that_only_look_like_it(name):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "hunter2hunter2key"],
        ["--api_key=hunter2"],
        ["-password", "correcthorse"],
        ["--hub_token", "abcdefgh"],
        ["--wandb.api_key", "hunter2x"],
        ["--db-pass", "hunter2xx"],
    ],
)
def test_a_secret_written_into_a_command_is_refused_and_not_repeated(words, tmp_path):
    for i, run in enumerate(([sys.executable, "train.py", *words], " ".join(["python train.py", *words]))):
        file = tmp_path / f"{i}.yaml"
        file.write_text(yaml.safe_dump({"name": "x", "workload": {"recipe": "custom", "run": run}}))
        with pytest.raises(ConfigError, match=r"workload\.run.*env") as refused:
            load_sweep(file)
        assert words[-1].rpartition("=")[2] not in str(refused.value)
    shown = redact(f"argv: {' '.join(words)} {words} --lr 0.1")
    assert words[-1].rpartition("=")[2] not in shown or words[0] == "--db-pass" or not words[0].startswith("--")
    assert shown.endswith("--lr 0.1")


@pytest.mark.parametrize(
    "words",
    [
        ["--tokenizer", "meta-llama/Llama-2"],
        ["--pad-token", "<|endoftext|>"],
        ["--eos_token", "endoftext"],
        ["--max-token", "123456"],
        ["--sort-key", "length"],
        ["--text-key", "content"],
        ["--api-key", "{key}"],
        ["--api-key", "$API_KEY"],
        ["--secret", "/etc/hostname"],
        ["--key_dim", "1234567"],
        ["--token"],
    ],
)
def test_options_that_only_look_like_secrets(words):
    assert literal_secret(["python", "train.py", *words, "--lr", "1e-4"]) is None


def test_env_pass_values_are_secret_except_paths_and_public_ones(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLES, "")
    monkeypatch.setenv("LICENCE", "some-licence")
    monkeypatch.setenv("CUDA_HOME", "/opt/some-cuda")
    monkeypatch.setenv("DATA_ROOT", str(tmp_path))
    workload = {"recipe": "custom", "env_pass": ["LICENCE", "CUDA_HOME", "DATA_ROOT"]}
    ScriptSection.model_validate(
        {**workload, "run": ["python", "train.py"], "cwd": str(tmp_path)}, context={"check_files": False}
    )
    text = f"some-licence /opt/some-cuda {tmp_path}"
    assert redact(text) == f"*** /opt/some-cuda {tmp_path}"
    assert variable_in(text) == "LICENCE"


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: Path(path).symlink_to("/dev/zero"), Path.mkdir])
def test_only_regular_files_are_read(make, tmp_path):
    make(tmp_path / "file.yaml")
    with pytest.raises(ConfigError, match=r"not a regular file|is a directory"):
        load_sweep(tmp_path / "file.yaml")
    file = sweeps.write(tmp_path, workload={"model": "file.yaml"})
    with pytest.raises(ConfigError, match=r"not a regular file|does not exist"):
        load_sweep(file)
    with pytest.raises(CatalogueError, match=r"not a regular file|directory|unknown cluster file"):
        load_cluster(str(tmp_path / "file.yaml"))


def _check_what_ranks_saw(home):
    """The secrets did pass: without that, the absence above would mean nothing."""
    logs = "".join(path.read_text() for path in home.rglob("rank0.log"))
    assert f"'{user_runners.KEY}': '***" in logs
    assert f"sig={MASK}&n=1" in logs and "last words: '***'" in logs
    assert "MLFLOW_TRACKING_PASSWORD" not in logs and "RAY_AUTH_TOKEN" not in logs and "WEBHOOK" not in logs
    with Ledger.open_existing(home / "sweeps" / "tiny") as ledger:
        kept = json.dumps([to_json(event) for event in ledger.events()])
        assert f"https://{MASK}@host" in ledger.document("sweep_yaml")["text"]
    assert f"cannot log in with {MASK}" in kept and f"https://{MASK}@store/data" in kept
    for log in home.rglob("rank0.log"):
        assert stat.S_IMODE(log.stat().st_mode) == 0o600


# ---- credentials come from the environment alone ----


@pytest.mark.parametrize("uri", ["https://me:hunter2@host/mlflow", "https://hunter2@host", "http://host?token=hunter2"])
def test_a_tracking_uri_with_credentials_is_refused_and_not_repeated(uri, tmp_path):
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_PASSWORD") as refused:
        check_tracking_uri(uri)
    assert "hunter2" not in str(refused.value)
    shown = CliRunner().invoke(main, ["show", "a@production", "--tracking-uri", uri, "--home", str(tmp_path / "home")])
    assert shown.exit_code == 2 and "hunter2" not in shown.output + shown.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"tracking": {"experiment": f"for {SECRETS['MLFLOW_TRACKING_PASSWORD']}"}},
        {"tracking": {SECRETS["RAY_AUTH_TOKEN"]: 1}},
        {"tracking": {"token": {"inner": "hunter2"}}},
        {"tracking": {"experiment": "https://hooks.slack.com/services/T0/B0/pl4nted"}},
    ],
)
def test_a_file_with_a_secret_of_this_process_is_refused_and_not_repeated(planted, tmp_path, changes):
    with pytest.raises(ConfigError, match="environment") as refused:
        load_sweep(sweeps.write(tmp_path, **changes))
    assert PLANTED not in str(refused.value) and "hunter2" not in str(refused.value)


# ---- names and paths ----

NASTY = st.text(alphabet="aZ0._-/\\ \n\0~$:*?'\"<>|;&`%é", max_size=70)


@given(NASTY | st.text(max_size=70))
def test_names_that_are_taken_stay_inside_their_folder(name):
    try:
        check_name(name, "sweep name")
    except ConfigError:
        with pytest.raises(ConfigError):
            Home(Path("/home")).sweep_folder(name)
        return
    folder = Home(Path("/home")).sweep_folder(name)
    assert Path(os.path.normpath(folder)).parent == Path("/home/sweeps")
    assert name.isascii() and not set(name) & set("/\\ \n\0~$:*?'\"<>|;&`%") and name[0].isalnum()


@pytest.mark.parametrize("name", ["..", "../x", "a/../../x", "/etc", "a\n", "-rf", ".hidden", "a" * 64])
def test_traversal_is_refused_everywhere_a_name_is_taken(name, tmp_path):
    for words in (
        ["status", "--", name],
        ["report", "--", name],
        ["promote", "x", "--name", name],
        ["show", "--", name],
    ):
        shown = CliRunner().invoke(main, [words[0], "--home", str(tmp_path / "home"), *words[1:]])
        assert shown.exit_code == 2, (words, shown.output)
        assert shown.exception is None or isinstance(shown.exception, SystemExit)
    with pytest.raises(ConfigError):
        load_sweep(sweeps.write(tmp_path, name=name))


def test_a_file_is_written_whole_or_not_at_all_and_links_are_not_followed(tmp_path):
    target, victim = tmp_path / "report.json", tmp_path / "victim"
    victim.write_text("mine")
    target.symlink_to(victim)
    write_atomically(target, [b"a", b"b"])
    assert (target.read_text(), victim.read_text(), target.is_symlink()) == ("ab", "mine", False)

    def breaks():
        yield b"half"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, breaks())
    assert target.read_text() == "ab"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "victim"]


def test_folders_are_created_private_and_existing_ones_unchanged(tmp_path):
    (tmp_path / "shared").mkdir(mode=0o755)
    make_private_folder(tmp_path / "shared" / "home" / "sweeps")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("shared", "shared/home", "shared/home/sweeps")]
    assert modes == [0o755, 0o700, 0o700]


def test_a_new_home_is_closed_to_others(tmp_path):
    Ledger(tmp_path / "home" / "sweeps" / "x").close()
    assert stat.S_IMODE((tmp_path / "home").stat().st_mode) == 0o700


# ---- doors ----


@pytest.mark.parametrize(("host", "warns"), [("127.0.0.1", False), ("0.0.0.0", True), ("localhost", False)])
def test_a_server_beyond_loopback_is_warned_about(host, warns, caplog, tmp_path, monkeypatch):
    monkeypatch.setattr(mlflow_server, "_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    with socket.socket() as probe:
        probe.bind((host, 0))
        port = probe.getsockname()[1]
    with pytest.raises(ConfigError, match="exited with status 3"):
        mlflow_server.serve(f"sqlite:///{tmp_path}/x.db", host, port)
    assert ("no password" in caplog.text) is warns


DOOR = """
import sys
from ray._raylet import GcsClient
try:
    GcsClient(address=sys.argv[1]).internal_kv_put(b"knock", b"knock", True, namespace=b"knock", timeout=5)
    print("LET IN")
except Exception as error:
    print(type(error).__name__, error)
"""


def knock(address, settings):
    """The answer of the Ray at ``address`` to a process with these settings."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", DOOR, address]
    done = subprocess.run(command, env=env | settings, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout + done.stderr


def listeners(pids):
    """Addresses on which these processes accept TCP connections, in the hexadecimal of /proc/net/tcp."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes |= set(re.findall(r"socket:\[(\d+)\]", str(entry.readlink())))
            except OSError:
                continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(300)
def test_the_private_ray_requires_its_token(tmp_path, monkeypatch):
    import ray

    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "someone"))  # without a token
    with connect(ClusterRequest(device="cpu", devices_per_node=2), workdir=tmp_path / "work"):
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        secret = token.read_text()
        assert stat.S_IMODE(token.stat().st_mode) == 0o600 and stat.S_IMODE(token.parent.stat().st_mode) == 0o700
        assert redact(secret) == MASK and len(secret) >= 32
        address = ray.get_runtime_context().gcs_address
        ours = processes_below(os.getpid())
        assert listeners(ours) <= {"0100007F", f"{'0' * 24}01000000", f"{'0' * 16}FFFF00000100007F"}
        for settings in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}):
            assert "LET IN" not in (heard := knock(address, settings))
            assert "uthentica" in heard
        assert "LET IN" in knock(address, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
    assert not token.parent.exists()
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


def processes_below(pid):
    found, parents = {pid}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}
