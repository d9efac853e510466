"""What a run will take, before it starts: steps, hours, memory, a trial step; and reset rules tried on old records."""
