"""Vendors' tools as programs on the PATH that print recorded or documented output (``tests/data/vendors``)."""

from tests.support import ROOT

NVIDIA, ROCM, AMD, INTEL, ASCEND, ASCEND_TWO_CHIPS = (
    (ROOT / "tests" / "data" / "vendors" / f"{name}.sh").read_text(encoding="utf-8")
    for name in ("nvidia-smi", "rocm-smi", "amd-smi", "xpu-smi", "npu-smi", "npu-smi-two-chips")
)


NVIDIA_ROWS = """\
0, GPU-0000, NVIDIA H100 80GB HBM3, 81559, 4, 00000000:17:00.0, {mode}
1, GPU-1111, NVIDIA H100 80GB HBM3, 81559, 1, 00000000:9A:00.0, {other}"""
RESET = "1" + ", [GPU requires reset]" * 6
"""What nvidia-smi prints of a GPU that has fallen out of use."""
UNIFIED = "0, GPU-2222, NVIDIA GB10, [N/A], [N/A], 0000000F:01:00.0, [N/A]"
"""What it prints for one without separate memory."""


VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK",
    "ZE_FLAT_DEVICE_HIERARCHY", "ASCEND_RT_VISIBLE_DEVICES",
)  # fmt: skip


def install(folder, monkeypatch, **programs):
    """Have these programs, and no other vendor's tool, on the PATH: text of each by name, ``_`` for ``-``."""
    for name, text in programs.items():
        program = folder / name.replace("_", "-")
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def nvidia(mode="Disabled", other="Disabled", profile="3g.40gb", *, rows=NVIDIA_ROWS, has_slices=True):
    """nvidia-smi of a host with two GPUs, or with these rows; whether those in MIG mode have slices."""
    return NVIDIA.format(
        rows=rows.format(mode=mode, other=other),
        first_slices=_slices("3g.40gb", "MIG-aaaa", "MIG-bbbb") if has_slices else "",
        second_slices=_slices(profile, "MIG-cccc") if has_slices else "",
    )


def _slices(profile, *uuids):
    return "\n".join(f"  MIG {profile}     Device  {i}: (UUID: {uuid})" for i, uuid in enumerate(uuids))


def intel(tiles=2):
    return INTEL.format(tiles=tiles)
