#!/bin/bash
#SBATCH --ntasks=2
#SBATCH --time=2
#SBATCH --requeue
#SBATCH --signal=TERM@40
#SBATCH --open-mode=append
srun "$@"
code=$?
echo "The ranks ended with exit code $code."
if ((code == 143)); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
