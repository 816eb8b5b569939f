"""Live tensors of a model and its optimizer, and their memory."""
