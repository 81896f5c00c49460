#!/usr/bin/env bash
# cuda-python 12.6.2.post1 next to cuda-bindings 13.5.0, as uv resolves vllm==0.33.0.
# Guess: cuda-python 12 is a package of its own, or requires a matching cuda-bindings.
# Seen: both own the same files in cuda/bindings: whichever is installed
# last decides.
. "$(dirname "$0")/common.sh"
environment first-alone cuda-python==12.6.2.post1
environment second-alone cuda-bindings==13.5.0
cat > "$work/program.sh" << 'SH'
files() {
  cut -d, -f1 "$1"/lib/python3*/site-packages/"$2".dist-info/RECORD | sort
}
comm -12 <(files first-alone cuda_python-12.6.2.post1) \
  <(files second-alone cuda_bindings-13.5.0) |
  grep -cxF -e cuda/bindings/__init__.py -e cuda/bindings/_lib/__init__.py
SH
expect '2' bash program.sh
