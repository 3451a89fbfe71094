#!/bin/bash
# The ranks of one host under torchrun, for clusters that use it. On each of NODES hosts run
# `docs/clusters/torchrun.sh NODES RENDEZVOUS_HOST`, with the same MEGABURN_JOB_TOKEN
# (`openssl rand -hex 16` draws one): a caller that reaches the ports without it is refused.
set -euo pipefail
nodes=$1
host=$2
shift 2

torchrun --nnodes "$nodes" --nproc-per-node gpu --max-restarts 0 \
    --rdzv-backend c10d --rdzv-endpoint "$host:29400" --rdzv-id megaburn --no-python \
    target/release/megaburn train --config configs/llama-3-8b.toml "$@"
