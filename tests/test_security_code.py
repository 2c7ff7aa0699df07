"""What the code never does according to docs/security.md, checked in every source file."""

import ast
import functools
import pickle
from pathlib import Path

import pytest

from cluster.node.hang import unpickled
from tests.support import ROOT

SOURCES = sorted(
    path for name in ("orchestrator", "cluster", "trials", "benchmarks") for path in (ROOT / name).rglob("*.py")
)
NEVER_CALLED = {
    *("eval", "exec", "__import__", "os.system", "os.popen", "tempfile.mktemp", "yaml.load", "yaml.load_all"),
    *("yaml.unsafe_load", "yaml.full_load", "marshal.loads", "pickle.load", "pickle.loads", "subprocess.getoutput"),
}
NEVER_IMPORTED = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "commands", "telnetlib"}
MAY_IMPORT = {
    "cluster/node/hang.py": "pickle, for an unpickler that refuses every class: NCCL dumps in no other format"
}
WRITES = {"write_text", "write_bytes"}
MAY_WRITE = {
    "cluster/processes.py": "/proc",
    "trials/training/measure.py": "/proc",
    "cluster/node/load_watch.py": "what nvidia-smi prints, read after its end",
    "cluster/ray/connection.py": "a token without readers yet",
    "orchestrator/config/schema.py": "generated documents of the repository",
    "orchestrator/report/result_schema.py": "generated documents of the repository",
    "trials/script/hook/tune_cluster_hook/window.py": "renamed when complete; the hook has no code of ours but its own",
}


@functools.cache
def nodes(source):
    return list(ast.walk(ast.parse(source)))


def sins(source):
    """What ``source`` does that it must not, as ``line: what``."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [f"{node.lineno}: imports {name}" for name in names if name.partition(".")[0] in NEVER_IMPORTED]
        elif isinstance(node, ast.Call):
            called, options = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            is_sin = called in NEVER_CALLED or options.get("shell", "False") != "False"
            is_sin |= called == "torch.load" and options.get("weights_only") != "True"
            is_sin |= called.endswith(".load") and options.get("allow_pickle", "False") != "False"
            found += [f"{node.lineno}: calls {called}"] if is_sin else []
        elif isinstance(node, ast.Constant) and node.value == "0.0.0.0":
            found.append(f"{node.lineno}: listens to everybody")
    return found


def plain_writes(source):
    """Lines that write a file in place, where a reader may see half of it."""
    found = []
    for node in nodes(source):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            modes = [a.value for a in [*node.args, *[w.value for w in node.keywords]] if isinstance(a, ast.Constant)]
            is_open = name == "open" and any(isinstance(mode, str) and mode in ("w", "wb", "w+") for mode in modes)
            found += [node.lineno] if name in WRITES or is_open else []
    return found


def test_no_shell_no_pickle_no_unsafe_loading():
    found = {str(path.relative_to(ROOT)): sins(path.read_text(encoding="utf-8")) for path in SOURCES}
    reported = {name: [sin.partition(": ")[2] for sin in some] for name, some in found.items() if some}
    assert reported == {name: ["imports pickle"] for name in MAY_IMPORT}


def test_the_one_unpickler_refuses_every_class():
    """Also those of the standard library, by every operation that names or makes one."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for value in (len, Path("x"), ValueError("x"), complex(1, 2)):
            content = pickle.dumps({"entries": value}, protocol=protocol)
            with pytest.raises(pickle.UnpicklingError, match="names the class"):
                unpickled(content)


def test_files_are_written_with_write_atomically():
    found = {str(path.relative_to(ROOT)): plain_writes(path.read_text(encoding="utf-8")) for path in SOURCES}
    written = {name: lines for name, lines in found.items() if lines and not name.startswith("benchmarks/")}
    assert {name: lines for name, lines in written.items() if name not in MAY_WRITE} == {}


@pytest.mark.parametrize(
    "line",
    [
        *(
            "eval('1')",
            "os.system('ls')",
            "subprocess.run('ls', shell=True)",
            "import pickle",
            "from joblib import load",
        ),
        *("yaml.load(text)", "torch.load(path)", "torch.load(path, weights_only=False)", "serve('0.0.0.0')"),
        *("np.load(path, allow_pickle=True)", "import a, dill.x", "subprocess.run(words, shell=flag)"),
    ],
)
def test_the_scan_finds_planted_violations(line):
    assert sins(f"x = 1\n{line}\n") != []
    assert plain_writes("path.write_text('x')\nopen(p, 'w')\npath.open(mode='wb')\npath.open('rb')\n") == [1, 2, 3]
