#!/bin/sh
cat <<'JSON'
WARNING: AMD GPU device(s) is/are in a low-power state. Check power control/runtime_status

{"card1": {"Card Series": "AMD Instinct MI300X OAM", "Card Model": "0x74a1", "Unique ID": "0x9f1b",
 "PCI Bus": "0000:26:00.0", "VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "297693184"},
 "card0": {"Card series": "Instinct MI300X", "Card model": "0x74a1", "Unique ID": "0x3a1c", "PCI Bus": "0000:0C:00.0",
 "VRAM Total Memory (B)": "206141652992", "VRAM Total Used Memory (B)": "297693184"},
 "system": {"Driver version": "6.10.5"}}
JSON
