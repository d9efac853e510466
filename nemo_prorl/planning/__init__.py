"""Plans a run before it starts: steps, hours, memory; and tries reset rules on old records."""
