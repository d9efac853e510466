"""Planning of a run before it starts (steps, tokens, hours), and a replay of reset rules on recorded runs."""
