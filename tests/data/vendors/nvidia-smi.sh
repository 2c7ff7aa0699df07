#!/bin/sh
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
