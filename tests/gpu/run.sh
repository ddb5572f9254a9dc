#!/usr/bin/env bash
# All that needs a GPU, in at most eight minutes: probe, build for the card, tests, sanitizer, benchmark. Each stage has
# a timeout of its own and writes its log at once; a stage that fails does not stop the next ones.
#
#   bash tests/gpu/run.sh [FOLDER]        PYTHON=python: which Python, with torch and the test tools installed
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
PYTHON=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python)}
out=${1:-runs/gpu/$(date +%Y-%m-%d-%H%M%S)}
mkdir -p "$out"
echo "stage,status,seconds" >"$out/stages.csv"
failed=0

stage() {
  local name=$1 limit=$2 status started=$SECONDS
  shift 2
  echo "== $name (at most $limit s)"
  timeout --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  echo "$name,$status,$((SECONDS - started))" >>"$out/stages.csv"
  tail -n 3 "$out/$name.log"
  if [ "$status" -ne 0 ]; then
    echo "   failed with status $status: $out/$name.log"
    failed=1
  fi
  return "$status"
}

probe='
import sys, torch
print("torch", torch.__version__, "CUDA", torch.version.cuda)
if not torch.cuda.is_available():
    sys.exit("no GPU that this torch can use: nothing can be tested here")
print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), torch.cuda.get_device_properties(0))
'
if ! stage probe 40 "$PYTHON" -c "$probe"; then
  echo "no GPU: the other stages are left out; see $out/probe.log" >&2
  exit 2
fi
stage driver 10 nvidia-smi
stage build 120 "$PYTHON" cuda_ext/build.py cuda
stage doctor 20 "$PYTHON" -m lightning_async.doctor doctor
stage tests 100 "$PYTHON" -m pytest -m gpu tests/ops -p no:cacheprovider
if command -v cuobjdump >/dev/null; then
  stage sass 15 bash -c "cuobjdump -sass lightning_async/ops/lib/liblightning_async_cuda.so | grep -c 'LDG.E.128'"
fi
if command -v compute-sanitizer >/dev/null; then
  stage sanitizer 80 compute-sanitizer --error-exitcode 9 "$PYTHON" -m pytest -m gpu -q -p no:cacheprovider \
    tests/ops/test_gpu.py -k "2049-1-"
else
  echo "no compute-sanitizer on the path: this stage cannot run" | tee "$out/sanitizer.log"
  echo "sanitizer,not there,0" >>"$out/stages.csv"
fi
stage benchmark 80 "$PYTHON" -m tests.benchmarks.ops_gpu --out "$out"
cat "$out/stages.csv"
exit "$failed"
