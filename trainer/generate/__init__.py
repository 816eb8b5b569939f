"""Text generation, from a checkpoint or during training."""
