"""A training program as a rank sees it: its command, and how it is observed. Standard library only."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from trials.failure import of_host
from trials.files import canonical_json, from_json, make_private_folder, write_atomically
from trials.outcome import Phase
from trials.reports import FOLDER, FOLDER_VARIABLE
from trials.secrets import is_secret_name
from trials.spec import ProfileSpec, Protocol

OUT = "{out}"
"""Placeholder for the attempt's folder, which the rank fills in."""
ALL_OPTIONS = "*"
"""Placeholder for all options of a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFile:
    """A configuration file of one trial. ``{name}`` in arguments and environment becomes its path."""

    name: str
    """Name of the placeholder."""
    file_name: str
    """File name in the attempt's folder; frameworks recognise the format by its suffix."""
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFormat:
    """Where and how the program logs its measurements, in addition to reports and hooks."""

    name: str = "none"
    """A parser of :mod:`trials.script.logs`: ``megatron``, ``torchtitan``, ..., ``pattern``, ``none``."""
    pattern: str | None = None
    """For ``pattern``: a regular expression with groups ``step`` and any of ``loss``, ``step_s``, ``step_ms``,
    ``tokens_per_s``, ``samples_per_s``, ``grad_norm``, ``allocated_gib``, ``reserved_gib``."""
    files: tuple[str, ...] = ()
    """Glob patterns of its log files, read in addition to its output; ``{out}`` is filled in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Effects of the candidate that can be observed inside the program; None: unknown."""

    world_size: int | None = None
    micro_batch_size: int | None = None
    """Samples per forward pass on a rank."""
    num_microbatches: int | None = None
    """Forward passes per optimiser step on a rank; unknown for pipelines."""
    dtype: str | None = None
    """Number format of the first linear layer's output: ``float32``, ``bfloat16``, ``float16``."""
    recomputes: bool | None = None
    """Whether layers run again in the backward pass."""
    parameter_shards: int | None = None
    """Number of ranks over which every parameter is split: by ZeRO-3, tensor and pipeline parallelism."""
    expert_parallel: int | None = None
    """Number of ranks that share the experts of a layer."""
    num_workers: int | None = None
    """Worker processes of the loader that feeds training."""


MOST_MOVED = 4
"""The measured steps move on by at most so many times their number, see :meth:`trials.script.judge.Judge.settle`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand:
    """Everything a rank needs to run a training program for one trial; passed as JSON."""

    argv: tuple[str, ...]
    """The command; only ``{out}`` and the names of ``files`` are still to be filled in."""
    cwd: str
    env: tuple[tuple[str, ...], ...] = ()
    """Pairs of name and value."""
    env_pass: tuple[str, ...] = ()
    """Names of further node variables that the program may see."""
    files: tuple[CommandFile, ...] = ()
    launcher: Literal["env", "own"] = "env"
    log: LogFormat = LogFormat()
    hook: bool = True
    """Whether the reporting hook is loaded into its Python."""
    protocol: Protocol
    fewest_steps: int | None = None
    """Measured steps that suffice if the program ends by itself with exit code 0; None: all of the protocol."""
    num_devices: int
    """Devices of the whole trial."""
    tokens_per_step: int
    samples_per_step: int
    expected: Expected = Expected()
    options: tuple[str, ...] = ()
    """Custom options that the candidate sets and the program must read: ``--flag``, ``dotted.key`` or ``$NAME``. With
    :data:`ALL_OPTIONS` among them, the report has all options of the program."""
    device: str = "cpu"
    memory_limit_bytes: int | None = None
    model_flops_per_token: float = 0.0
    """0: unknown."""
    profile: ProfileSpec | None = None
    """If set, the hook records these steps and ranks, and the run's times are not a measurement."""
    cache_dir: str | None = None
    """Folder for compiler caches, shared by the trials of a sweep on a node; None: the node's temporary folder."""

    @property
    def is_detection(self) -> bool:
        """Whether the run only observes the program, so that its times are not a measurement."""
        return ALL_OPTIONS in self.options

    @property
    def num_warmup_steps(self) -> int:
        """Steps before measuring; a fixed number, because ranks of a training program cannot agree on one."""
        return self.protocol.min_warmup_steps

    @property
    def num_required_steps(self) -> int:
        """Steps after which it may end in any way."""
        return self.protocol.min_warmup_steps + self.protocol.num_steps

    @property
    def num_latest_steps(self) -> int:
        """Steps after which it may end if workers load its data: the measured ones may move on."""
        return self.num_required_steps + MOST_MOVED * self.protocol.num_steps


# The first entries of a training program's PYTHONPATH, with which it can report.
#
# ``api/`` holds one file, ``tune_cluster_report.py``, for programs that import it; in every virtual environment,
# nothing else of this project becomes visible to them. ``hook/`` makes unchanged programs report: Python imports its
# ``sitecustomize`` at start, which does nothing unless ``TUNE_CLUSTER_REPORT`` names a folder.


API_FOLDER = Path(__file__).parent / "api"
HOOK_FOLDER = Path(__file__).parent / "hook"

REPORT_VARIABLE = "TUNE_CLUSTER_REPORT"
"""Variable with the folder of the report lines and of the file ``stop``."""
PROFILE_VARIABLE = "TUNE_CLUSTER_PROFILE"
"""Variable with the steps for the hook to record, as JSON."""
KNOBS_VARIABLE = "TUNE_CLUSTER_KNOBS"
"""Variable with the file of the knobs that the hook sets inside the program."""
VARIABLES_VARIABLE = "TUNE_CLUSTER_VARIABLES"
"""Variable with the names of the candidate's environment variables, which the hook watches."""
MEMORY_LIMIT_VARIABLE = "TUNE_CLUSTER_MEMORY_LIMIT_BYTES"
"""Variable with the limit on a process's memory on a CUDA device."""
HOST_MEMORY_LIMIT_VARIABLE = "TUNE_CLUSTER_HOST_MEMORY_LIMIT_BYTES"
"""Variable with the limit on the host memory of a process that computes on CPUs."""


def hook_path(*, hook: bool = True) -> tuple[str, ...]:
    """Return the entries for the front of PYTHONPATH.

    Args:
        hook: Whether unchanged programs report; otherwise only those that import the report API.
    """
    return (str(HOOK_FOLDER), str(API_FOLDER)) if hook else (str(API_FOLDER),)


def hook_files() -> dict[str, str]:
    """Return the hook's files by path with their text, to store next to a promoted command; the folder ``hook`` goes
    first on PYTHONPATH."""
    paths = sorted(path for folder in (HOOK_FOLDER, API_FOLDER) for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(HOOK_FOLDER.parent)): path.read_text(encoding="utf-8")
        for path in paths
        if "__pycache__" not in path.parts
    }


def with_hook(python_path: str | None, *, hook: bool = True) -> str:
    """Return PYTHONPATH for a training program.

    Args:
        python_path: Its value otherwise, appended to the new entries.
        hook: See :func:`hook_path`.
    """
    return os.pathsep.join([*hook_path(hook=hook), *filter(None, [python_path])])


def inside_knobs(command: ScriptCommand) -> tuple[str, ...]:
    """Return the names of the knobs for the hook to set inside the program, from the command's knob file."""
    paths = [pair[1] for pair in command.env if len(pair) == 2 and pair[0] == KNOBS_VARIABLE]
    texts = (file.text for file in command.files if f"{{{file.name}}}" in paths)
    return tuple(name for text in texts for name in json.loads(text)["knobs"])


# The environment of a training program: the node's variables that it may see, torchrun's variables, compiler caches.
#
# Programs get an allow-list: keys, tokens and addresses of this project's services stay out unless the sweep file names
# them (``env_pass``). Values in the sweep file's ``env`` take precedence.


NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TMP", "TEMP", "HOSTNAME"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONNOUSERSITE"),
        *("PYTHONWARNINGS", "PYTHONHASHSEED", "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "CPATH", "CUDACXX"),
        *("C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "CC", "CXX", "CFLAGS", "CXXFLAGS", "LDFLAGS", "MAX_JOBS"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "SSL_CERT_FILE", "SSL_CERT_DIR"),
        *("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ENDPOINT"),
        *("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "MODELSCOPE_CACHE", "WANDB_MODE", "NO_COLOR"),
    )
)
"""Node variables that programs see."""
PREFIXES = (
    *("LC_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NVTE_", "NCCL_", "RCCL_", "HCCL_", "GLOO_", "UCX_", "UCC_"),
    *("FI_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_", "TORCH_", "TORCHINDUCTOR_"),
    *("TORCHDYNAMO_", "PYTORCH_", "TRITON_", "HIP_", "HSA_", "ROCM_", "ROCR_", "MIOPEN_", "GPU_", "ASCEND_"),
    *("ONEAPI_", "ZE_", "SYCL_", "HABANA_", "TRANSFORMERS_", "TOKENIZERS_", "ACCELERATE_", "DS_", "FLAGS_", "MS_"),
)
"""Prefixes of further ones: libraries of devices, communication and mathematics, and frameworks."""
DEFAULTS = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
"""Defaults if neither the node nor the sweep file sets them."""
EXTENSIONS_VARIABLE = "TORCH_EXTENSIONS_DIR"
CACHES = {
    EXTENSIONS_VARIABLE: "torch_extensions",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""Variables of compiler caches, and the folder of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRank:
    """Identity of this rank, from the cluster or torchrun."""

    rank: int
    """Number of its slot; with ``launcher: own`` slots are nodes."""
    num_slots: int
    local_rank: int
    local_slots: int
    node_rank: int
    num_nodes: int
    num_devices: int
    """Devices of this slot."""
    master_addr: str
    master_port: str

    @classmethod
    def from_env(cls, environment: Mapping[str, str]) -> ScriptRank:
        """Read the variables of the cluster and torchrun; a single process is the only rank."""
        rank, local_rank = int(environment.get("RANK", "0")), int(environment.get("LOCAL_RANK", "0"))
        num_slots = int(environment.get("WORLD_SIZE", "1"))
        return cls(
            rank=rank,
            num_slots=num_slots,
            local_rank=local_rank,
            local_slots=int(environment.get("LOCAL_WORLD_SIZE", num_slots)),
            node_rank=int(environment.get("GROUP_RANK", "0")),
            num_nodes=int(environment.get("GROUP_WORLD_SIZE", "1")),
            num_devices=int(environment.get("TUNE_CLUSTER_NUM_DEVICES", "1")),
            master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
            master_port=environment.get("MASTER_PORT", "29500"),
        )


def cache_folder(command: ScriptCommand, node: Mapping[str, str]) -> Path:
    """Return the folder for this command's compiler caches on the node with this environment."""
    if folder := command.cache_dir or node.get("TUNE_CLUSTER_CACHE_DIR"):
        return Path(folder)
    return Path(tempfile.gettempdir()) / f"tune-cluster-{getpass.getuser()}" / "caches"


def extensions_folder(command: ScriptCommand, node: Mapping[str, str]) -> Path:
    """Return the folder in which PyTorch builds C++ extensions for this command. It persists between sweeps, because
    building DeepSpeed's takes a minute.

    One folder per host, so that locks of dead processes can be recognised; in :func:`cache_folder` if the home
    directory is not writable.
    """
    base = node.get("XDG_CACHE_HOME") or (f"{node['HOME']}/.cache" if node.get("HOME") else "")
    if command.cache_dir is None and base:
        folder = Path(base) / "tune-cluster" / socket.gethostname() / CACHES[EXTENSIONS_VARIABLE]
        if os.access(next(found for found in folder.parents if found.exists()), os.W_OK | os.X_OK):
            return folder
    return cache_folder(command, node) / CACHES[EXTENSIONS_VARIABLE]


def child_environment(
    command: ScriptCommand,
    rank: ScriptRank,
    node: Mapping[str, str],
    *,
    report: Path,
    error_file: Path,
) -> dict[str, str]:
    """Return all variables of the program.

    Args:
        node: environment of the rank itself.
        report: folder of its report files.
        error_file: file for errors from torch's ``record``.
    """
    passed = frozenset(command.env_pass)
    environment = {name: value for name, value in node.items() if name in passed or is_seen_anyway(name)}
    environment = {**DEFAULTS, **environment}
    for name, folder in CACHES.items():
        if name in passed and name in node:
            continue
        is_kept = name == EXTENSIONS_VARIABLE
        environment[name] = str(extensions_folder(command, node) if is_kept else cache_folder(command, node) / folder)
    environment |= _torchrun(rank) if command.launcher == "env" else _nodes(rank)
    environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
    environment |= {pair[0]: pair[1] for pair in command.env if len(pair) == 2}
    environment[REPORT_VARIABLE] = str(report)
    if command.memory_limit_bytes is not None:
        on_host = command.device == "cpu"
        limit = HOST_MEMORY_LIMIT_VARIABLE if on_host else MEMORY_LIMIT_VARIABLE
        if not (on_host and command.profile is not None):  # the profiler itself takes much of it
            environment[limit] = str(command.memory_limit_bytes)
    if command.profile is not None:
        environment[PROFILE_VARIABLE] = json.dumps(_window(command.profile))
    if variables := [name[1:] for name in command.options if name.startswith("$")]:
        environment[VARIABLES_VARIABLE] = ",".join(variables)
    environment["PYTHONPATH"] = with_hook(environment.get("PYTHONPATH"), hook=command.hook)
    return environment


def _window(profile: ProfileSpec) -> dict[str, Any]:
    """Return the settings for the hook's recording."""
    return {
        "first": profile.start_step,
        "last": profile.stop_step,
        "ranks": list(profile.ranks) or None,
        "modules": profile.communication,
        "memory": profile.memory,
        "stack": profile.stack,
    }


def remember_secrets(pairs: Iterable[Sequence[str]]) -> None:
    """Redact secrets that the sweep file passes to the program from everything this process writes."""
    for pair in pairs:
        if len(pair) == 2 and is_secret_name(pair[0]):
            os.environ[pair[0]] = pair[1]


def is_seen_anyway(name: str) -> bool:
    """Whether programs see this node variable without ``env_pass``."""
    return (name in NAMES or name.startswith(PREFIXES)) and not is_secret_name(name)


def _torchrun(rank: ScriptRank) -> dict[str, str]:
    """Return the variables that torchrun sets in each process."""
    return {
        **_meeting(rank),
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(rank.num_slots),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(rank.local_slots),
        "GROUP_RANK": str(rank.node_rank),
        "GROUP_WORLD_SIZE": str(rank.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank.rank),
        "ROLE_WORLD_SIZE": str(rank.num_slots),
        "TORCHELASTIC_RUN_ID": "tune-cluster",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _nodes(rank: ScriptRank) -> dict[str, str]:
    """Return variables for a command that starts its own ranks; LLaMA-Factory and ms-swift read these names."""
    return {
        **_meeting(rank),
        "NNODES": str(rank.num_slots),
        "NODE_RANK": str(rank.rank),
        "NPROC_PER_NODE": str(rank.num_devices),
    }


def _meeting(rank: ScriptRank) -> dict[str, str]:
    return {"MASTER_ADDR": rank.master_addr, "MASTER_PORT": rank.master_port}


# Files of an attempt on a node: the program's files, messages between its ranks, and their removal.
#
# ::
#
#     ATTEMPT/script/out         {out}: everything the program writes; shared by the node's ranks
#     ATTEMPT/script/files       copies of configuration files
#     ATTEMPT/script/report/N    $TUNE_CLUSTER_REPORT of rank N, with the file ``stop``
#     ATTEMPT/script/ranks       state of each rank of the node, for the others


ATTEMPT_VARIABLE = "TUNE_CLUSTER_ATTEMPT_DIR"
"""Environment variable by which the cluster passes the attempt's folder to ranks."""
SCRATCH = "script"
"""Folder inside an attempt's folder that is deleted when the attempt ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerState:
    """State that a rank publishes to the others of its node."""

    state: Literal["training", "measured", "silent"] = "training"
    """``measured``: it has its steps; ``silent``: another rank reports for it."""
    is_gone: bool = False
    """Whether all processes of its program have ended."""
    phase: Phase | None = None
    step: int = 0
    step_time_s: float | None = None
    number: int = 0
    """Sequence number, so that a repeated state counts as a new message."""


class Places:
    """Paths of one rank's program."""

    def __init__(self, attempt: Path, rank: ScriptRank, *, is_own_folder: bool) -> None:
        self.has_own_log = not is_own_folder
        """Whether standard output is a file of this rank alone."""
        self.scratch = attempt / SCRATCH
        self.out = self.scratch / "out"
        self.files = self.scratch / "files"
        self.report = report_folder(attempt, rank.rank)
        self.profile = attempt / FOLDER
        self.error_file = self.scratch / f"error{rank.rank}.json"
        self._ranks = self.scratch / "ranks"
        self._rank = rank
        self._last_state = PeerState()
        self._attempt = attempt if is_own_folder else None

    @classmethod
    def from_env(cls, environment: Mapping[str, str], rank: ScriptRank) -> Places:
        """Return the paths in the attempt's folder, or in a temporary one shared by the local ranks of a launch."""
        if folder := environment.get(ATTEMPT_VARIABLE):
            return cls(Path(folder), rank, is_own_folder=False)
        if profile := environment.get(FOLDER_VARIABLE):
            return cls(Path(profile).parent, rank, is_own_folder=False)
        name = f"tune-cluster-{os.getuid()}-{os.getppid()}-{rank.master_port}"
        return cls(Path(tempfile.gettempdir()) / name, rank, is_own_folder=True)

    def make(self, command: ScriptCommand) -> None:
        """Create the folders, the copies of configuration files, and the file with the last step to train."""
        for folder in (self.out, self.files, self.report, self._ranks):
            make_private_folder(folder)
        for file in command.files:
            write_atomically(self.files / file.file_name, [self.fill(file.text, command).encode()])
        write_atomically(self.report / "stop", [f"{command.num_required_steps}\n".encode()])
        write_atomically(self.report / "stop_late", [f"{command.num_latest_steps}\n".encode()])

    def fill(self, text: str, command: ScriptCommand) -> str:
        """Fill in the placeholders in ``text`` that only the node can fill in."""
        rank = self._rank
        known = {
            OUT: str(self.out),
            **{f"{{{file.name}}}": str(self.files / file.file_name) for file in command.files},
            "{node_rank}": str(rank.node_rank),
            "{num_nodes}": str(rank.num_nodes),
            "{local_devices}": str(rank.num_devices if command.launcher == "own" else rank.local_slots),
            "{master_addr}": rank.master_addr,
            "{master_port}": rank.master_port,
        }
        for placeholder, value in known.items():
            text = text.replace(placeholder, value)
        return text

    def publish(self, word: PeerState) -> None:
        """Publish a state to the other ranks of this node.

        Raises:
            OSError: the host's disk is full or broken; peers would wait in vain.
        """
        self._last_state = word = replace(word, number=self._last_state.number + 1)
        if self._rank.local_slots > 1:
            try:
                write_atomically(self._ranks / str(self._rank.rank), [canonical_json(word).encode()])
            except OSError as error:
                if of_host(error) is not None:
                    raise

    def peer_states(self) -> list[PeerState]:
        """Return the latest states of the ranks of this node that have published one."""
        found: list[PeerState] = []
        with contextlib.suppress(OSError):
            for path in self._ranks.iterdir():
                if not path.name.startswith("."):
                    with contextlib.suppress(OSError, ValueError):
                        found.append(from_json(PeerState, json.loads(path.read_bytes())))
        return found

    def leave(self) -> None:
        """Delete the scratch folder if this is the last rank of the node to leave it."""
        with contextlib.suppress(OSError):  # the disk is full: the warden removes the folder
            self.publish(replace(self._last_state, is_gone=True))
        if self._rank.local_slots == 1 or all_gone(self.peer_states(), self._rank.local_slots):
            shutil.rmtree(self.scratch, ignore_errors=True)
            if self._attempt is not None:
                with contextlib.suppress(OSError):
                    self._attempt.rmdir()


def all_gone(words: Sequence[PeerState], num_ranks: int) -> bool:
    """Whether all ranks of the node have reported that they are gone."""
    return sum(word.is_gone for word in words) >= num_ranks


def report_folder(attempt: Path, rank: int) -> Path:
    """Return ``$TUNE_CLUSTER_REPORT`` of a rank, given the attempt's folder on its node."""
    return attempt / SCRATCH / "report" / str(rank)


def remove_scratch(attempt: Path) -> None:
    """Delete what killed ranks left in an attempt's folder, after all their processes have ended."""
    shutil.rmtree(attempt / SCRATCH, ignore_errors=True)


def remove_stale_locks(extensions: Path) -> list[Path]:
    """Delete lock files of builds that no process holds, because the next build would wait for them for ever. A live
    compiler holds its lock file open."""
    found = [path for path in extensions.glob("**/lock") if path.is_file()]
    if not found:
        return []
    held = _open_files()
    stale = [path for path in found if str(path.resolve()) not in held]
    for path in stale:
        path.unlink(missing_ok=True)
    return stale


def _open_files() -> set[str]:
    """Return the paths of all files that processes of this user hold open."""
    held: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for entry in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(str(entry.readlink()))
    return held
