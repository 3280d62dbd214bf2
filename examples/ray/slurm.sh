#!/bin/bash
# polyrhythm train cartpole --slurm nodes=3,cpus=8,time=04:00:00
# The job goes back into the queue when a node is lost or it is preempted (--requeue), and by the signal that it gets
# 120 s before its time is up. It then goes on with the run in its folder (resume=auto).
#SBATCH --job-name=cartpole
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --chdir=/home/me/project
#SBATCH --output=/home/me/project/runs/cartpole/20261128-120000/job/slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
export PATH=/home/me/project/.venv/bin:"$PATH"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=/home/me/project/runs/cartpole/20261128-120000/job/ray_token
export RAY_worker_niceness=0    # else stations have a nice value of 15
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1')
address=$(getent ahostsv4 "$head" | awk 'NR == 1 {print $1}'):6390

# One command on every node: it starts Ray, and on the first node then the run; when that ends, Ray ends everywhere.
srun --cpus-per-task 8 ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-cpus 8 --num-gpus 0 -- \
  polyrhythm train /home/me/project/runs/cartpole/20261128-120000/job/cartpole.yaml --out /home/me/project/runs/cartpole/20261128-120000 resume=auto &
wait $!
