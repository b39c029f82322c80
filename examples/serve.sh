#!/usr/bin/env bash
# Serve a model with decodes held under a TBT SLO:  examples/serve.sh [MODEL] [vllm serve options...]
# Without MODEL it serves a small random Llama, which it makes first. PORT and TBT_SLO_MS can be set.
set -euo pipefail

if [ "$#" -eq 0 ]; then
    [ -e build/tiny-llama/config.json ] || vllm-penalty make-model build/tiny-llama
    # A CPU without AVX-512 emulates bfloat16, 20 times slower; 2 GiB instead of most of the memory.
    export VLLM_CPU_KVCACHE_SPACE=2
    set -- build/tiny-llama --dtype float32
fi

# A file, because vLLM puts the content of --additional-config into its compile cache's key: with a
# path there, a changed SLO recompiles nothing.
mkdir -p build
printf '{"tbt_slo_ms": %s}\n' "${TBT_SLO_MS:-60}" >build/penalty_sched.json
vllm-penalty check build/penalty_sched.json

exec vllm serve "$@" --port "${PORT:-8000}" \
    --scheduler-cls vllm_penalty_sched.Scheduler \
    --additional-config '{"penalty_sched": "build/penalty_sched.json"}'
