#!/usr/bin/env bash
# The former path of gpu_check.sh.
exec env GPU_CHECK_COMMIT="${GPU_CHECK_COMMIT:-${VISIT_COMMIT:-}}" "$(dirname "$0")/gpu_check.sh" "$@"
