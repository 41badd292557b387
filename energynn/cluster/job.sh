#!/bin/bash
# Written by `energynn submit`: task i makes the i-th run. It executes notebooks/run_training.ipynb on the first node;
# srun starts the ranks. Data given as a tar file are unpacked on every node before, and go with the job. Warned of the
# time limit (SIGUSR1) it leaves a checkpoint and queues itself again.
@options@
runs=(
@runs@
)
run=${runs[${SLURM_ARRAY_TASK_ID:-${1:-0}}]}
exec >> "$run/job/log.txt" 2>&1
@setup@
cd @repository@ || exit
exec @python@ -m energynn.cluster.job "$run"
