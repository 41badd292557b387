#!/bin/bash
# Written by `energynn submit` from energynn/launch/job.sh, which you may change: each task of the array makes one run
# by energynn.launch.job, which executes notebooks/run_training.ipynb on the first node, whose srun starts the ranks;
# warned of the time limit (SIGUSR1) it asks for a checkpoint and queues the task again.
#SBATCH --job-name=@name
#SBATCH --nodes=@nodes
#SBATCH --ntasks=@devices
#SBATCH --ntasks-per-node=@devices_of_node
#SBATCH --time=@time
#SBATCH --array=@array
#SBATCH --signal=B:USR1@@@warning_s
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --export=HOME,USER,LOGNAME,LANG,PATH
#SBATCH --output=@log
@options
runs=(
@runs
)
run=${runs[${SLURM_ARRAY_TASK_ID:-${1:-0}}]}
exec >> "$run/job/log.txt" 2>&1
@setup
cd @repository || exit
exec @python -P -m energynn.launch.job "$run"
