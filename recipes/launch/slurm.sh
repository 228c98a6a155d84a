#!/usr/bin/env bash
# Train on several machines under SLURM: one launcher on each machine, which starts one rank for each of its GPUs.
#     sbatch --nodes 2 recipes/launch/slurm.sh ddp trainers/eagle.py recipes/llama3_70b.yaml run_dir=/shared/runs/llama3_70b
# The first argument is a launch file of this folder; the rest is the command as on one machine. Start it in a clone of
# the repository, with the environment active. run_dir must lie on a disk that all machines share.
# SLURM sends SIGTERM five minutes before the time limit: the run saves and exits, and the same sbatch continues it.
#SBATCH --job-name=headstart
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
set -euo pipefail
export CONFIG="recipes/launch/$1.yaml"
shift
read -r MAIN_ADDRESS < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MAIN_ADDRESS MAIN_PORT=$((20000 + SLURM_JOB_ID % 10000)) # two jobs may share a machine

# Expanded on each machine, where SLURM_NODEID differs.
srun --kill-on-bad-exit=1 bash -c 'exec accelerate launch --config_file "$CONFIG" \
    --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" \
    --num_processes "$((SLURM_NNODES * SLURM_GPUS_ON_NODE))" \
    --main_process_ip "$MAIN_ADDRESS" --main_process_port "$MAIN_PORT" "$@"' launch "$@"
