#!/bin/sh
case "$1" in
metric) cat <<'JSON'
{"gpu_data": [{"gpu": 0, "mem_usage": {"total_vram": {"value": 196592, "unit": "MB"},
  "used_vram": {"value": 283, "unit": "MB"}}}]}
JSON
;;
static) cat <<'JSON'
{"gpu_data": [{"gpu": 0, "asic": {"market_name": "AMD Instinct MI300X", "asic_serial": "0x3A1C"},
  "bus": {"bdf": "0000:0c:00.0"}, "vram": {"type": "HBM", "size": {"value": 196592, "unit": "MB"}}}]}
JSON
;;
esac
