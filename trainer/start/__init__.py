"""What a run starts from, and the state that is filled from it."""
