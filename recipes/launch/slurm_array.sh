#!/usr/bin/env bash
# Harvest with a SLURM job array: each task makes one part of the shards by itself, on one GPU, whenever it is started.
#     sbatch --array 1-64 recipes/launch/slurm_array.sh 64 recipes/llama3_8b.yaml run_dir=/shared/runs/llama3_8b
# The first argument is the number of parts; the rest is the command as on one machine. Start it in a clone of the
# repository, with the environment active. run_dir must lie on a disk that all machines share. The last part to finish
# writes the manifest. SLURM sends SIGTERM five minutes before the time limit: the part finishes its running texts or
# shard and exits, and the same sbatch continues it; --array 3,17 starts these two parts alone.
#SBATCH --job-name=headstart-harvest
#SBATCH --ntasks=1
#SBATCH --gpus=1
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@300
set -euo pipefail
parts=$1
shift
srun headstart harvest "$@" --part "$SLURM_ARRAY_TASK_ID/$parts"
