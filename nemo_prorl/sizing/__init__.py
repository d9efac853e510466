"""What a run takes of a machine: memory by part, devices, and whether they are there."""
