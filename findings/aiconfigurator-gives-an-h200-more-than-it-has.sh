#!/usr/bin/env bash
# aiconfigurator-core 0.12.0: the memory of an H200 by which it sizes deployments.
# Guess: what the driver reports for the card, as the same file set does for an RTX PRO 6000.
# Seen: 141 GiB. An H200's NVML total is 150,754,820,096 bytes, cudaMemGetInfo's
# 150,109,880,320 (results/h200-2026-11-26-2-0.33.0.json): 1.2 GiB less than planned.
. "$(dirname "$0")/common.sh"
environment peer-alone aiconfigurator-core==0.12.0 PyYAML==6.0.3
cat > "$work/program.py" << 'PY'
from importlib.resources import files

import yaml

for name in "h200_sxm", "rtx_pro_6000_server":
    system = files("aiconfigurator_core") / f"systems/{name}.yaml"
    print(name, yaml.safe_load(system.read_text())["gpu"]["mem_capacity"])
PY
expect 'h200_sxm 151397597184
rtx_pro_6000_server 102641958912' peer-alone/bin/python program.py
