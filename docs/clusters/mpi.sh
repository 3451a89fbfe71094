#!/bin/bash
# One rank per GPU under Open MPI, on the hosts of a hostfile: `docs/clusters/mpi.sh HOSTFILE GPUS_PER_HOST`.
# MPI only starts the processes; they communicate over TCP and NCCL.
set -euo pipefail
hosts=$1
gpus=$2
shift 2

MASTER_ADDR=$(awk 'NF { print $1; exit }' "$hosts")
# A caller that reaches the ports without the job's token is refused.
MEGABURN_JOB_TOKEN=$(openssl rand -hex 16)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500} MEGABURN_JOB_TOKEN

mpirun --hostfile "$hosts" --map-by "ppr:$gpus:node" --bind-to none \
    -x MASTER_ADDR -x MASTER_PORT -x MEGABURN_JOB_TOKEN \
    docs/clusters/as-rank.sh \
    target/release/megaburn train --config configs/llama-3-8b.toml "$@"
