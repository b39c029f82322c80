#!/usr/bin/env bash
# A prefill and a decode instance with NIXL between them:  examples/disaggregated.sh [MODEL] [vllm serve options...]
# Send every request to the decode instance, on PORT (default 8000): where that is cheaper, it has the
# other one, on PREFILL_PORT (default 8100), prefill the prompt. TBT_SLO_MS sets the decodes' SLO.
# Without MODEL both serve a small random Llama on CPUs, half of the cores each.
set -euo pipefail

port=${PORT:-8000} prefill_port=${PREFILL_PORT:-8100} cores=$(nproc)
prefill_env=("CUDA_VISIBLE_DEVICES=${PREFILL_GPU:-0}") decode_env=("CUDA_VISIBLE_DEVICES=${DECODE_GPU:-1}")
if [ "$#" -eq 0 ]; then
    [ -e build/tiny-llama/config.json ] || vllm-penalty make-model build/tiny-llama
    export VLLM_CPU_KVCACHE_SPACE=1 # GiB, for each of the two
    if [ "$cores" -gt 1 ]; then
        prefill_env+=("VLLM_CPU_OMP_THREADS_BIND=0-$((cores / 2 - 1))")
        decode_env+=("VLLM_CPU_OMP_THREADS_BIND=$((cores / 2))-$((cores - 1))")
    fi
    # Both must have the same block size.
    set -- build/tiny-llama --dtype float32 --enforce-eager --block-size 32
fi

mkdir -p build
printf '{"tbt_slo_ms": %s}\n' "${TBT_SLO_MS:-60}" >build/penalty_sched.json
vllm-penalty check build/penalty_sched.json

# $1: role, $2: what happens to requests whose KV cache is lost, $3: extra configuration
kv_transfer() {
    printf '{"kv_connector": "PenaltyConnector", "kv_connector_module_path": "vllm_penalty_sched", '
    printf '"kv_role": "%s", "kv_load_failure_policy": "%s", "kv_connector_extra_config": {%s}}' "$@"
}

# $1: port, $2: side channel's port, $3: KV transfer, $4...: vllm serve's own arguments
serve() {
    local port=$1 side_port=$2 transfer=$3
    shift 3
    # The side channel stays on this machine: nobody else can read a KV cache.
    VLLM_NIXL_SIDE_CHANNEL_HOST=127.0.0.1 VLLM_NIXL_SIDE_CHANNEL_PORT=$side_port \
        exec vllm serve "$@" --host 127.0.0.1 --port "$port" --kv-transfer-config "$transfer" \
        --scheduler-cls vllm_penalty_sched.Scheduler \
        --additional-config '{"penalty_sched": "build/penalty_sched.json"}'
}

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
(export "${prefill_env[@]}" && serve "$prefill_port" 5600 "$(kv_transfer kv_producer fail '')" "$@") &
(export "${decode_env[@]}" && serve "$port" 5601 \
    "$(kv_transfer kv_consumer recompute "\"prefill_url\": \"http://127.0.0.1:$prefill_port\"")" "$@") &
wait -n # until one of them ends
