#!/bin/bash
#SBATCH --nodes=3
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --open-mode=append
#
# Three replicas, each a step of its own: sbatch slurm.sh
#
# train.py has Trainer(num_nodes=3, devices=1, strategy=AsyncAveragingStrategy(min_replicas=1)), and a
# FaultTolerantCheckpoint. A replica that dies, any of them, is started again, and joins the others. Where the job is put
# into the queue again, all save, and go on from there. See docs/how-to/several-hosts.md.
set -m # each replica has a process group, by which it can be told to end
mapfile -t hosts <<< "$(scontrol show hostnames "$SLURM_JOB_NODELIST")" # with <(...) `wait` may wait for the store
export MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}} MASTER_PORT=${MASTER_PORT:-29500} LOCAL_RANK=0
export LIGHTNING_ASYNC_SECRET=${LIGHTNING_ASYNC_SECRET:-$(openssl rand -hex 32)}

# This script keeps the store, in which they meet: it outlives each of them, and SIGTERM, at which they save.
trap : TERM
export TORCHELASTIC_USE_AGENT_STORE=True
python -c "import signal, torch.distributed as dist
signal.signal(signal.SIGTERM, signal.SIG_IGN)
store = dist.TCPStore('$MASTER_ADDR', $MASTER_PORT, None, True, wait_for_workers=False)
signal.pause()" &
store=$!
disown

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
  return $status
}

for ((i = 0; i < ${#hosts[@]}; i++)); do
  replica $i &
done
for ((i = 0; i < ${#hosts[@]}; i++)); do
  wait -n
  status=$?
  ((status == 0 || status == 75)) && break # else it is lost, and the others train on
done
for ((seconds = 0; seconds < 30; seconds++)); do # the others are at their end, too
  [ -z "$(jobs -pr)" ] && break
  sleep 1
done
for group in $(jobs -pr); do
  kill -TERM -- "-$group"
done
wait
kill -KILL $store
exit $status
