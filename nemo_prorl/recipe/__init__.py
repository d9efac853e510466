"""The prolonged run: its records, hard resets, warm-up and first model."""
