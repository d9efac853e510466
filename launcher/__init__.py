"""Starting a run: the supervisor of a node, Slurm, and what is said at the end.

The folder lies at the top of the repository and is imported as `nemo_prorl.launcher`.

Who notices that something ended, and tells whom:
    a process        its node's `supervisor`: exit code 2, 3 or 4 of a rank stays, any other failure is 1
    a supervisor     `peers`: one file per node; node 0 decides which end explains the others
    a node           `srun`, which ends all supervisors; `srun_step` reads what it and node 0 say
    an attempt       `slurm_driver`: the job ends, starts again, or is requeued, perhaps without one node

This file imports nothing: `slurm_driver` runs with a Python that has none of our packages.
"""
