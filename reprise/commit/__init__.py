"""The two-phase commit by which ranks agree that a checkpoint is complete."""
