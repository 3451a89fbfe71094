#!/usr/bin/env bash
# Measures how long `megaburn search` takes for three models on 64, 4,096 and 16,384 GPUs, and prints the
# table of benches/results/search.md.
#
#   benches/search_time.sh [PROGRAM] [GPUS...]
#
# PROGRAM is a built `megaburn` (default: target/release/megaburn). Nothing is written and no GPU is needed.
set -euo pipefail
cd "$(dirname "$0")/.."
program=${1:-target/release/megaburn}
shift || true
gpus=("$@")
if [ ${#gpus[@]} -eq 0 ]; then
    gpus=(64 4096 16384)
fi
if [ ! -x "$program" ]; then
    echo "search_time.sh: $program is not there: run \`cargo build --release --bin megaburn\`, or name a program" >&2
    exit 2
fi

# Sizes that differ from configs/llama-3-70b.toml.
llama_405b="model.hidden=16384 model.ffn=53248 model.layers=126 model.heads=128"
moe_1t="model.family=mixtral model.hidden=7168 model.ffn=2048 model.layers=64 model.experts.num=384
    model.experts.top_k=8 train.fused_linear_cross_entropy=false"

echo "| model | GPUs | combinations | simulated steps | seconds |"
echo "|---|---:|---:|---:|---:|"
measure() {
    local title=$1 sets=() set
    for set in $2; do
        sets+=(--set "$set")
    done
    for num in "${gpus[@]}"; do
        # 16.8 million tokens a step, 4.2 million on few GPUs.
        local batch=2048
        if [ "$num" -lt 1024 ]; then
            batch=512
        fi
        local start=$EPOCHREALTIME found
        # The exit code is 1 if the model does not fit, which takes its time too.
        found=$("$program" search configs/llama-3-70b.toml --gpus "$num" --json "${sets[@]}" \
            --set "train.global_batch=$batch") || [ -n "$found" ]
        local end=$EPOCHREALTIME
        FOUND=$found python3 - "$title" "$num" "$start" "$end" <<'PYTHON'
import json, os, sys
title, gpus, start, end = sys.argv[1:]
found = json.loads(os.environ["FOUND"])["found"]
seconds = float(end) - float(start)
print(f"| {title} | {int(gpus):,} | {found['candidates']:,} | {found['simulated']:,} | {seconds:.1f} |")
PYTHON
    done
}
measure "Llama-3-70B" ""
measure "Llama-3-405B" "$llama_405b"
measure "1T of experts" "$moe_1t"
