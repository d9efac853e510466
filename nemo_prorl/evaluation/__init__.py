"""`prorl evaluate`: benchmarks as files, samples of any model, pass@k with intervals, comparison of models."""
