#!/usr/bin/env bash
# Runs all GPU checks in at most ten minutes, on an H100 in about five: correctness first, then speed.
#
#     tests/gpu/gpu_check.sh                       on a machine with a CUDA device
#     tests/gpu/gpu_check.sh --device sim          on the simulated accelerator (steps that need CUDA are skipped)
#     tests/gpu/gpu_check.sh --only "facts races"  some of the steps
#
# Each step is a process with its own time limit. It adds one line with PASS, FAIL or SKIP to
# $OUT/summary.txt, its numbers to $OUT/results.json and its output to $OUT/log.txt. The next step
# runs even if a step fails or hangs. All steps together end within GPU_CHECK_SECONDS (580). The exit
# status is 1 if a step failed.
#
# For tests/gpu/test_gpu_check.py: GPU_CHECK_BREAK="STEP=fail" or "STEP=hang" makes a step fail or hang, and
# GPU_CHECK_LIMIT=n limits each step to n seconds. For tests/cuda: GPU_CHECK_SMALL=1 selects small
# sizes, and times have no goals.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

ALL="facts build races parity kernels jit csan graphs scripts compiled memcheck initcheck bandwidth host gpt traces"
device=cuda
only=$ALL
while [ $# -gt 0 ]; do
    case $1 in
    --device) device=$2 && shift 2 ;;
    --only) only=$2 && shift 2 ;;
    *) echo "usage: $0 [--device cuda|sim|cpu] [--only \"STEP ...\"]" >&2 && exit 2 ;;
    esac
done

for name in $only; do
    [[ " $ALL " == *" $name "* ]] || { echo "there is no step $name" >&2 && exit 2; }
done

export GPU_CHECK_DEVICE=$device
export OUT=${OUT:-$PWD/build/gpu/out}
GPU_CHECK_WORK=$(mktemp -d) # results and logs of each step
export GPU_CHECK_WORK
trap 'rm -rf "$GPU_CHECK_WORK"' EXIT
mkdir -p "$OUT" build/gpu
rm -f "$OUT"/{summary.txt,results.json,log.txt}

export GPU_CHECK_PYTHONPATH=${PYTHONPATH:-}
workers=tests/gpu/workers
for folder in benchmarks examples tests/accelerator/workers tests/parity/workers tests/harness \
    $workers .; do
    PYTHONPATH=$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}
done
export PYTHONPATH PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
command -v nvcc > /dev/null || PATH=$PATH:/usr/local/cuda/bin
python=${PYTHON:-python3}
seconds=${GPU_CHECK_SECONDS:-580}

wanted() {
    [[ " $only " == *" $1 "* ]]
}

# step NAME LIMIT COMMAND...
step() {
    local name=$1 limit=$2 left=$((seconds - SECONDS)) begin code
    [ "$device" = cuda ] || limit=$((2 * limit)) # machines without a GPU may be loaded
    limit=${GPU_CHECK_LIMIT:-$limit}
    shift 2
    wanted "$name" || return 0
    [ "$limit" -le "$left" ] || limit=$left
    case ${GPU_CHECK_BREAK:-} in
    "$name=fail") set -- bash -c 'echo "deliberate failure" && exit 3' ;;
    "$name=hang") set -- sleep 1000 ;;
    esac
    begin=$(date +%s.%N)
    if [ "$limit" -lt 3 ]; then
        code=late
    else
        GPU_CHECK_STEP=$name timeout -k 3 "$limit" "$@" > "$GPU_CHECK_WORK/$name.log" 2>&1 < /dev/null
        code=$?
    fi
    flock "$GPU_CHECK_WORK" "$python" $workers/summary.py "$name" "$code" "$limit" "$begin"
}

# Runs a step on CUDA only; on other devices the step is skipped.
cuda_step() {
    if [ "$device" = cuda ]; then
        step "$@"
    else
        step "$1" "$2" "$python" $workers/outcome.py "needs CUDA"
    fi
}

# On CUDA the check_ functions run at the same time, because none of them uses the device all the time.
# The steps outside of functions run alone. memcheck and initcheck come after races and parity, whose
# results matter more if the time runs out. The limits of the longest function and of the steps outside
# of functions add up to at most 580 seconds. Without CUDA the functions run one after another.
start() {
    if [ "$device" = cuda ]; then
        "$@" &
    else
        "$@"
    fi
}

check_races() {
    step races 200 "$python" $workers/races.py
}
check_parity() {
    step parity 130 "$python" $workers/parity.py
}
check_results() {
    step kernels 20 "$python" $workers/check_kernels.py
    cuda_step jit 40 "$python" $workers/check_jit.py
    cuda_step csan 60 "$python" $workers/csan.py
    cuda_step graphs 60 "$python" $workers/graphs.py
}
check_scripts() {
    step scripts 120 "$python" $workers/scripts.py
    step compiled 80 "$python" $workers/compiled.py
}

step facts 20 "$python" $workers/facts.py
step build 80 "$python" $workers/build.py
start check_races
start check_parity
start check_results
start check_scripts
wait
cuda_step memcheck 20 "$python" $workers/check_kernels.py --under memcheck
cuda_step initcheck 20 "$python" $workers/check_kernels.py --under initcheck
step bandwidth 30 "$python" $workers/bandwidth.py
step host 60 "$python" $workers/host_cost.py
step gpt 110 "$python" $workers/gpt_step.py
step traces 40 "$python" $workers/traces.py

"$python" $workers/summary.py --end "$SECONDS"
