"""Vendors' tools as programs on the PATH that print recorded or documented output."""

NVIDIA = r"""#!/bin/sh
case "$*" in
--query-gpu=index,*) cat <<'ROWS'
{rows}
ROWS
;;
-L) cat <<'LIST'
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0000)
{first_slices}
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1111)
{second_slices}
LIST
;;
"-q -x") cat <<'XML'
<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
  <gpu id="00000000:17:00.0">
    <fb_memory_usage><total>81559 MiB</total><used>N/A</used></fb_memory_usage>
    <mig_devices>
      <mig_device>
        <index>0</index>
        <fb_memory_usage><total>40448 MiB</total><reserved>0 MiB</reserved><used>298 MiB</used></fb_memory_usage>
      </mig_device>
      <mig_device>
        <index>1</index>
        <fb_memory_usage><total>40448 MiB</total><reserved>0 MiB</reserved><used>38000 MiB</used></fb_memory_usage>
      </mig_device>
    </mig_devices>
  </gpu>
</nvidia_smi_log>
XML
;;
--query-gpu=persistence_mode*) echo Disabled ;;
esac
"""

ROCM = r"""#!/bin/sh
cat <<'JSON'
WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

{{"card1": {{"Card Series": "AMD Instinct MI300X OAM", "Card Model": "0x74a1", "Unique ID": "0x9f1b",
 "PCI Bus": "0000:26:00.0", "VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "297693184"}},
 "card0": {{"Card series": "Instinct MI300X", "Card model": "0x74a1", "Unique ID": "0x3a1c", "PCI Bus": "0000:0C:00.0",
 "VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "297693184"}},
 "system": {{"Driver version": "6.10.5"}}}}
JSON
"""

AMD = r"""#!/bin/sh
case "$1" in
metric) cat <<'JSON'
{{"gpu_data": [{{"gpu": 0, "mem_usage": {{"total_vram": {{"value": 196592, "unit": "MB"}},
  "used_vram": {{"value": 283, "unit": "MB"}}}}}}]}}
JSON
;;
static) cat <<'JSON'
{{"gpu_data": [{{"gpu": 0, "asic": {{"market_name": "AMD Instinct MI300X", "asic_serial": "0x3A1C"}},
  "bus": {{"bdf": "0000:0c:00.0"}}, "vram": {{"type": "HBM", "size": {{"value": 196592, "unit": "MB"}}}}}}]}}
JSON
;;
esac
"""

NVIDIA_ROWS = """\
0, GPU-0000, NVIDIA H100 80GB HBM3, 81559, 4, 00000000:17:00.0, {mode}
1, GPU-1111, NVIDIA H100 80GB HBM3, 81559, 1, 00000000:9A:00.0, {other}"""
RESET = "1" + ", [GPU requires reset]" * 6
"""What nvidia-smi prints of a GPU that has fallen out of use."""
UNIFIED = "0, GPU-2222, NVIDIA GB10, [N/A], [N/A], 0000000F:01:00.0, [N/A]"
"""What it prints of one without memory of its own."""

INTEL = r"""#!/bin/sh
case "$*" in
"discovery -j") cat <<'JSON'
{{"device_list": [{{"device_id": 0, "device_name": "Intel(R) Data Center GPU Max 1550",
  "pci_bdf_address": "0000:29:00.0", "uuid": "00000000-0000-0029-0000-002f0bd58086"}},
 {{"device_id": 1, "device_name": "Intel(R) Data Center GPU Max 1550",
  "pci_bdf_address": "0000:3a:00.0", "uuid": "00000000-0000-003a-0000-002f0bd58086"}}]}}
JSON
;;
"discovery -d "*) cat <<'JSON'
{{"device_name": "Intel(R) Data Center GPU Max 1550", "memory_physical_size_byte": "137438953472",
  "memory_free_size_byte": "137195683840", "number_of_tiles": "{tiles}"}}
JSON
;;
esac
"""

ASCEND = r"""#!/bin/sh
cat <<'TABLE'
+------------------------------------------------------------------------------------------------+
| npu-smi 25.2.0                   Version: 25.2.0                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 2     910B2               | OK            | 101.4       38                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3412 / 65536         |
+===========================+===============+====================================================+
| 5     910B2               | OK            | 96.4        37                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          46455/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 5       0                 | 4711          | python3                  | 43100                   |
+===========================+===============+====================================================+
TABLE
"""

ASCEND_TWO_CHIPS = r"""#!/bin/sh
cat <<'TABLE'
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 160.7       45                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3103 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           45                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2886 / 65536         |
+===========================+===============+====================================================+
TABLE
"""

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "ZE_FLAT_DEVICE_HIERARCHY",
    "ASCEND_RT_VISIBLE_DEVICES",
)


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


def plain(text):
    return text.format()
