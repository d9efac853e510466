"""Start of a run: the supervisor of a node, Slurm jobs, chains of stages, and the results printed at the end.

The folder lies at the top of the repository and is imported as `nemo_prorl.launcher`.

How the end of each part is noticed and reported:
    process       noticed by its node's `supervisor`: exit code 2, 3 or 4 of a rank is kept, other failures become 1
    supervisor    writes to a file how its processes ended (`peers`); node 0 decides which of these ends is the cause
    node          noticed by `srun`, which ends all supervisors; `srun_step` reads the messages of srun and node 0
    attempt       `slurm_driver` then ends the job, starts again, or requeues the job, possibly without one node

This file imports nothing, because `slurm_driver` runs with a Python that has no other packages.
"""
