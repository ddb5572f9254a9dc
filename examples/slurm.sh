#!/bin/bash
#SBATCH --nodes=3
#
# Three replicas, each a step of its own: sbatch slurm.sh
#
# train.py has Trainer(num_nodes=3, devices=1, strategy=AsyncAveragingStrategy(min_replicas=1)). A replica that dies is
# started again, and joins the others. The first one's process keeps the store: without it they end. See
# docs/launching.md.
set -m # each replica has a process group, by which it can be told to end
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts[0]} MASTER_PORT=${MASTER_PORT:-29500} LOCAL_RANK=0
export LIGHTNING_ASYNC_SECRET=${LIGHTNING_ASYNC_SECRET:-$(openssl rand -hex 32)}

step() { # of the replica $1, which was started again $2 times. Without SLURM_NTASKS Lightning reads these variables.
  NODE_RANK=$1 LIGHTNING_ASYNC_REJOIN=$2 srun --exact --nodes=1 --ntasks=1 --nodelist="${hosts[$1]}" \
    env -u SLURM_NTASKS python -u train.py
}

replica() {
  for again in 0 1 2 3; do
    step "$1" $again
    status=$?
    ((status == 0 || status == 75)) && break # done, or told to go, and it has saved
  done
}

step 0 0 &
first=$!
for ((i = 1; i < ${#hosts[@]}; i++)); do
  replica $i &
done
wait $first
status=$?
for ((seconds = 0; seconds < 30; seconds++)); do # the others are at their end, too, or about to hear that the store is gone
  [ -z "$(jobs -pr)" ] && break
  sleep 1
done
for group in $(jobs -pr); do
  kill -TERM -- "-$group"
done
wait
exit $status
