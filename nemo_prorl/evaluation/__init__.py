"""`prorl evaluate`: benchmarks as yaml files, responses of any model, pass@k with errors, comparison of models."""
