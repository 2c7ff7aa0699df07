#!/bin/sh
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
