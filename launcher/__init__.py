"""Starting a run: the supervisor of a node, Slurm, and what is said at the end.

Imports nothing: the Slurm script uses `slurm` with a Python that has none of our packages.
"""
