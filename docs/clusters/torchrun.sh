#!/bin/bash
# The ranks of one host under torchrun, where that is what the cluster has. On each of NODES hosts:
# `docs/clusters/torchrun.sh NODES RENDEZVOUS_HOST`, with the same MEGABURN_JOB_TOKEN on each
# (`openssl rand -hex 16` draws one): who reaches the ports and does not know it is refused.
set -euo pipefail
nodes=$1
host=$2
shift 2

torchrun --nnodes "$nodes" --nproc-per-node gpu --max-restarts 0 \
    --rdzv-backend c10d --rdzv-endpoint "$host:29400" --rdzv-id megaburn --no-python \
    target/release/megaburn train --config configs/llama-3-8b.toml "$@"
