#!/usr/bin/env bash
# All that needs a GPU, in at most eight minutes: probe, build for the card, tests, benchmarks, NCCL, sanitizer. Each
# stage has a timeout of its own and writes its log at once; a stage that fails does not stop the next ones. RESULTS.md
# in the folder is written anew after each stage, and can be committed as it is.
#
#   bash tests/gpu/run.sh [FOLDER]        PYTHON=python: which Python, with torch and the test tools installed
#                                         FOLDER: one that outlives the machine: each stage's log is there at once
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
out=${1:-runs/gpu/$(date +%Y-%m-%d-%H%M%S)}
mkdir -p "$out"
echo "stage,status,seconds" >"$out/stages.csv"
failed=0

results() {
  {
    echo "# What ran on a GPU machine"
    echo
    echo "- $(date -u +'%Y-%m-%d %H:%M') UTC, commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown)"
    sed 's/^/- /' "$out/probe.log"
    echo
    echo "A status of 0 is a success; 124 and 137 are a stage that ran past its limit."
    echo
    echo "| stage | status | seconds |"
    echo "|---|---|---:|"
    tail -n +2 "$out/stages.csv" | sed 's/,/ | /g; s/^/| /; s/$/ |/'
    local log
    for log in tests nccl contract sanitizer; do
      if [ -s "$out/$log.log" ]; then echo && echo "- $log: $(tail -n 1 "$out/$log.log" | tr -d '=')"; fi
    done
    for log in ops_gpu.md overlap_gpu.md sass.log; do
      if [ -s "$out/$log" ]; then echo && echo "## ${log%.*}" && echo && sed '/^# /,+1d; /^sm_/d' "$out/$log"; fi
    done
  } >"$out/RESULTS.md"
}

stage() {
  local name=$1 limit=$2 status started=$SECONDS
  shift 2
  echo "== $name (at most $limit s)"
  timeout --signal=INT --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  echo "$name,$status,$((SECONDS - started))" >>"$out/stages.csv"
  results
  tail -n 3 "$out/$name.log"
  if [ "$status" -ne 0 ]; then
    echo "   failed with status $status: $out/$name.log"
    failed=1
  fi
  return "$status"
}

missing() {
  echo "no $2 on the path, in CUDA_HOME or in a package of pip's: this stage cannot run" | tee "$out/$1.log"
  echo "$1,not there,0" >>"$out/stages.csv"
  results
}

# Where a tool of NVIDIA's is: on the path, in a toolkit, or in a package of pip's; nothing where it is in none.
tool() {
  local folder
  command -v "$1" && return
  for folder in "${CUDA_HOME:-/usr/local/cuda}" /usr/local/cuda; do
    if [ -x "$folder/bin/$1" ]; then echo "$folder/bin/$1" && return; fi
  done
  "$PYTHON" -c '
import os, sys
from pathlib import Path
places = [f"nvidia/*/bin/{sys.argv[1]}", f"triton/backends/nvidia/bin/{sys.argv[1]}"]
found = [str(p) for entry in sys.path if entry for place in places for p in sorted(Path(entry).glob(place))]
print(next((p for p in found if os.access(p, os.X_OK)), ""))
' "$1"
}

probe='
import sys, torch
from torch.cuda import nccl
from tests.benchmarks.report import machine
print(machine())
print("torch", torch.__version__, "CUDA", torch.version.cuda)
if not torch.cuda.is_available():
    sys.exit("no GPU that this torch can use: nothing can be tested here")
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.get_device_properties(0))
print("NCCL", nccl.version())
'
if ! stage probe 20 "$PYTHON" -c "$probe"; then
  echo "no GPU: the other stages are left out; see $out/probe.log" >&2
  exit 2
fi
stage driver 5 nvidia-smi
stage build 60 "$PYTHON" cuda_ext/build.py cuda
stage doctor 20 "$PYTHON" -m lightning_async.cli.main doctor
stage tests 40 "$PYTHON" -m pytest -m gpu tests/ops -p no:cacheprovider
stage benchmark 25 "$PYTHON" -m tests.benchmarks.ops_gpu --out "$out"
stage overlap 80 "$PYTHON" -m tests.benchmarks.overlap_gpu --seconds 68 --out "$out"
stage nccl 75 "$PYTHON" -m pytest -m gpu -v tests/comm -k "not test_contract" -p no:cacheprovider
stage contract 95 "$PYTHON" -m pytest -m gpu -v --tb=short tests/comm/test_nccl.py -k test_contract -p no:cacheprovider
cuobjdump=$(tool cuobjdump)
if [ -n "$cuobjdump" ]; then
  nvdisasm=$(tool nvdisasm)
  PATH=$PATH:$(dirname "${nvdisasm:-$cuobjdump}") # cuobjdump calls it
  stage sass 15 bash -o pipefail -c '"$0" -sass lightning_async/ops/lib/liblightning_async_cuda.so |
    awk -f tests/gpu/sass.awk' "$cuobjdump"
else
  missing sass cuobjdump
fi
sanitizer=$(tool compute-sanitizer)
if [ -n "$sanitizer" ]; then
  stage sanitizer 45 "$sanitizer" --error-exitcode 9 "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider \
    tests/ops/test_gpu.py -k "2049-1-"
else
  missing sanitizer compute-sanitizer
fi
cat "$out/stages.csv"
echo "results: $out/RESULTS.md"
exit "$failed"
