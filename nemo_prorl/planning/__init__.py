"""Plans a run before it starts: steps and hours; and tries reset rules on old records."""
