"""Resources that a run needs: memory by part, number of devices, and a check that both are enough."""
