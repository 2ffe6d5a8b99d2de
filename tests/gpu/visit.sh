#!/usr/bin/env bash
# One visit to a GPU: ten minutes that say whether fsdp_c is right and fast there.
#
#     tests/gpu/visit.sh                       on a machine with a CUDA device
#     tests/gpu/visit.sh --device sim          on the simulated accelerator (what needs CUDA is skipped)
#     tests/gpu/visit.sh --only "facts races"  some of the steps
#
# Each step is a process with a time limit of its own. It leaves one line PASS, FAIL or SKIP in
# $OUT/summary.txt and its numbers in $OUT/results.json; what it printed is in $OUT/log.txt. A step
# that fails or hangs does not keep the next one from running, and the whole ends within
# VISIT_SECONDS (580). Truth comes first, speed after. The exit status is 1 where a step failed.
#
# VISIT_BREAK="STEP=fail" or "STEP=hang" breaks a step on purpose, VISIT_LIMIT=n limits each to n
# seconds: what tests/gpu/test_visit.py uses to see that a failure is reported.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

ALL="facts build kernels jit memcheck initcheck races parity graphs bandwidth host gpt traces"
device=cuda
only=$ALL
while [ $# -gt 0 ]; do
    case $1 in
    --device) device=$2 && shift 2 ;;
    --only) only=$2 && shift 2 ;;
    *) echo "usage: $0 [--device cuda|sim|cpu] [--only \"STEP ...\"]" >&2 && exit 2 ;;
    esac
done

export VISIT_DEVICE=$device
export OUT=${OUT:-$PWD/build/gpu/out}
VISIT_WORK=$(mktemp -d) # results and logs of the single steps
export VISIT_WORK
trap 'rm -rf "$VISIT_WORK"' EXIT
mkdir -p "$OUT" build/gpu
rm -f "$OUT"/{summary.txt,results.json,log.txt}

workers=tests/gpu/workers
for folder in benchmarks examples tests/accelerator/workers tests/parity/workers tests/harness \
    $workers .; do
    PYTHONPATH=$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}
done
export PYTHONPATH PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
command -v nvcc > /dev/null || PATH=$PATH:/usr/local/cuda/bin
python=${PYTHON:-python3}
seconds=${VISIT_SECONDS:-580}

wanted() {
    [[ " $only " == *" $1 "* ]]
}

# step NAME LIMIT COMMAND...
step() {
    local name=$1 limit=${VISIT_LIMIT:-$2} left=$((seconds - SECONDS)) begin code
    shift 2
    wanted "$name" || return 0
    [ "$limit" -le "$left" ] || limit=$left
    case ${VISIT_BREAK:-} in
    "$name=fail") set -- bash -c 'echo "broken on purpose" && exit 3' ;;
    "$name=hang") set -- sleep 1000 ;;
    esac
    begin=$(date +%s.%N)
    if [ "$limit" -lt 3 ]; then
        code=late
    else
        VISIT_STEP=$name timeout -k 3 "$limit" "$@" > "$VISIT_WORK/$name.log" 2>&1 < /dev/null
        code=$?
    fi
    "$python" $workers/summary.py "$name" "$code" "$limit" "$begin"
}

# The same, for what no other device has.
cuda_step() {
    if [ "$device" = cuda ]; then
        step "$@"
    else
        step "$1" "$2" "$python" $workers/outcome.py "needs CUDA"
    fi
}

step facts 40 "$python" $workers/facts.py
step build 180 "$python" $workers/build.py
step kernels 60 "$python" $workers/check_kernels.py
cuda_step jit 60 "$python" $workers/check_jit.py
cuda_step memcheck 60 "$python" $workers/check_kernels.py --under memcheck
cuda_step initcheck 60 "$python" $workers/check_kernels.py --under initcheck
step races 130 "$python" $workers/races.py
step parity 130 "$python" $workers/parity.py
cuda_step graphs 45 "$python" $workers/graphs.py
step bandwidth 45 "$python" $workers/bandwidth.py
step host 60 "$python" $workers/host_cost.py
step gpt 75 "$python" $workers/gpt_step.py
step traces 45 "$python" $workers/traces.py

"$python" $workers/summary.py --end "$SECONDS"
