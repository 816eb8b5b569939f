"""The run's record in its checkpoint, and the rules for resuming with differences."""
