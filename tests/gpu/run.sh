#!/usr/bin/env bash
# What a GPU must show: that passes are exact there, and what they cost. Under 8 minutes, no network, python of the PATH.
#
#   tests/gpu/run.sh                  all stages
#   tests/gpu/run.sh attention model  some of: logic attention model speed
#
# Prints PASS and FAIL lines and tables; fails if anything did. With OUT set, $OUT/gpu-STAGE.json holds the same.
set -u
cd "$(dirname "$0")/../.." || exit 2
export PYTHONPATH="$PWD:$PWD/tests" PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
declare -A limit=([logic]=80 [attention]=90 [model]=110 [speed]=180) # seconds; a hang must not eat the rest

[ $# -eq 0 ] && set -- logic attention model speed
failed=()
for stage in "$@"; do
  if [ -z "${limit[$stage]:-}" ]; then
    echo "no stage '$stage'; stages: logic attention model speed" >&2
    exit 2
  fi
  echo "=== $stage (at most ${limit[$stage]} s)"
  began=$SECONDS
  if [ "$stage" = logic ]; then # without this project's pytest settings: their plugins may not be installed here
    timeout -k 5 "${limit[$stage]}" python -m pytest -q -x -c tests/gpu/pytest.ini --rootdir . tests/engine/test_cuda_logic.py
  else
    timeout -k 5 "${limit[$stage]}" python tests/gpu/stages.py "$stage"
  fi
  code=$?
  [ $code -eq 124 ] && echo "FAIL $stage ran into its limit of ${limit[$stage]} s"
  [ $code -ne 0 ] && failed+=("$stage")
  echo "=== $stage: $([ $code -eq 0 ] && echo PASS || echo "FAIL (exit status $code)") in $((SECONDS - began)) s"
done
[ ${#failed[@]} -eq 0 ] || { echo "FAIL: ${failed[*]}"; exit 1; }
echo "PASS: $*"
