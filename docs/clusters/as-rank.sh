#!/bin/sh
# Runs a command with torchrun's environment variables, translated from those of Slurm, Open MPI or
# MPICH (in this order). MASTER_ADDR and MASTER_PORT come from the job.
export RANK="${SLURM_PROCID:-${OMPI_COMM_WORLD_RANK:-$PMI_RANK}}"
export WORLD_SIZE="${SLURM_NTASKS:-${OMPI_COMM_WORLD_SIZE:-$PMI_SIZE}}"
export LOCAL_RANK="${SLURM_LOCALID:-${OMPI_COMM_WORLD_LOCAL_RANK:-$MPI_LOCALRANKID}}"
on_this_host="${SLURM_NTASKS_PER_NODE:-${OMPI_COMM_WORLD_LOCAL_SIZE:-$MPI_LOCALNRANKS}}"
if [ -n "$on_this_host" ]; then export LOCAL_WORLD_SIZE="$on_this_host"; fi
exec "$@"
