"""The environment of the user's program: what of the node's it may see, torchrun's variables, where compilers cache.

Programs get an allow-list, not everything: keys, tokens and the addresses of our own services stay out unless the sweep
file names them (``env_pass``). Values of the sweep file's ``env`` go over all else.
"""

from __future__ import annotations

import getpass
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trials.script.command import ScriptCommand
from trials.script.hook_path import MEMORY_LIMIT_VARIABLE, REPORT_VARIABLE, with_hook
from trials.secrets import is_secret_name

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
"""Variables of the node that programs see."""
PREFIXES = (
    *("LC_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NVTE_", "NCCL_", "RCCL_", "HCCL_", "GLOO_", "UCX_", "UCC_"),
    *("FI_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "MALLOC_", "TORCH_", "TORCHINDUCTOR_"),
    *("TORCHDYNAMO_", "PYTORCH_", "TRITON_", "HIP_", "HSA_", "ROCM_", "ROCR_", "MIOPEN_", "GPU_", "ASCEND_"),
    *("ONEAPI_", "ZE_", "SYCL_", "HABANA_", "TRANSFORMERS_", "TOKENIZERS_", "ACCELERATE_", "DS_", "FLAGS_", "MS_"),
)
"""Beginnings of further names that they see: libraries of devices, of communication, of mathematics, frameworks."""
DEFAULTS = {"WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
"""What holds where neither node nor sweep file say otherwise."""
CACHES = {
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
}
"""Variables of compilers' caches, and the folder of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRank:
    """Who this rank is, as the cluster or torchrun told it."""

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
        """Read the variables that the cluster and torchrun set; a process by itself is the only rank."""
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
    """Where this command's compilers keep what they made, on the node with this environment."""
    if folder := command.cache_dir or node.get("TUNE_CLUSTER_CACHE_DIR"):
        return Path(folder)
    return Path(tempfile.gettempdir()) / f"tune-cluster-{getpass.getuser()}" / "caches"


def child_environment(
    command: ScriptCommand,
    rank: ScriptRank,
    node: Mapping[str, str],
    *,
    report: Path,
    error_file: Path,
) -> dict[str, str]:
    """All variables of the program.

    Args:
        node: the environment that the rank itself runs in.
        report: folder of its report files.
        error_file: where torch's ``record`` writes an error.
    """
    passed = frozenset(command.env_pass)
    environment = {name: value for name, value in node.items() if name in passed or _is_allowed(name)}
    environment = {**DEFAULTS, **environment}
    for name, folder in CACHES.items():
        if name in passed and name in node:
            continue
        environment[name] = str(cache_folder(command, node) / folder)
    environment |= _torchrun(rank) if command.launcher == "env" else _nodes(rank)
    environment["TORCHELASTIC_ERROR_FILE"] = str(error_file)
    environment |= {pair[0]: pair[1] for pair in command.env if len(pair) == 2}
    environment[REPORT_VARIABLE] = str(report)
    if command.memory_limit_bytes is not None and command.device != "cpu":
        environment[MEMORY_LIMIT_VARIABLE] = str(command.memory_limit_bytes)
    environment["PYTHONPATH"] = with_hook(environment.get("PYTHONPATH"), hook=command.hook)
    return environment


def remember_secrets(pairs: Iterable[Sequence[str]]) -> None:
    """Have what the sweep file tells the program in confidence redacted from all that this process writes."""
    for pair in pairs:
        if len(pair) == 2 and is_secret_name(pair[0]):
            os.environ[pair[0]] = pair[1]


def _is_allowed(name: str) -> bool:
    return (name in NAMES or name.startswith(PREFIXES)) and not is_secret_name(name)


def _torchrun(rank: ScriptRank) -> dict[str, str]:
    """What torchrun tells each of its processes."""
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
    """What a command that starts its own ranks may want to know; names that LLaMA-Factory and ms-swift read."""
    return {
        **_meeting(rank),
        "NNODES": str(rank.num_slots),
        "NODE_RANK": str(rank.rank),
        "NPROC_PER_NODE": str(rank.num_devices),
    }


def _meeting(rank: ScriptRank) -> dict[str, str]:
    return {"MASTER_ADDR": rank.master_addr, "MASTER_PORT": rank.master_port}
