"""Starting a run: the supervisor of a node, the line between nodes, Slurm, and what is said at the end.

Imports nothing: the Slurm script uses `link` and `slurm` with a Python that has none of our packages.
"""
