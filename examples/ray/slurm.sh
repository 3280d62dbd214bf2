#!/bin/bash
# A run on three nodes with Slurm: sbatch slurm.sh
# The folder in which it is submitted, and your home, are on paths that all nodes see. Once before: ray get-auth-token --generate
#SBATCH --job-name=polyrhythm
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --time=04:00:00
#SBATCH --requeue                # after the loss of a node or a preemption the job goes back into the queue,
#SBATCH --signal=B:USR1@120      # and by this signal, two minutes before its time is up, too
#SBATCH --open-mode=append
set -euo pipefail
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1

source .venv/bin/activate   # with polyrhythm[ray]
export RAY_worker_niceness=0    # else stations have a nice value of 15

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahostsv4 "$head" | awk 'NR == 1 {print $1}'):6390

# One command on every node: it starts Ray, and on the head node then the run; when that ends, Ray ends everywhere.
# A job that is requeued keeps its number, so resume=auto finds the run that it began, and goes on from there.
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
  --num-cpus "$SLURM_CPUS_PER_TASK" -- \
  polyrhythm train cartpole launcher=ray ray.address=auto ray.start_s=120 --out "runs/$SLURM_JOB_ID" resume=auto &
wait $!
