"""State that other programs wrote, brought into checkpoints of ours, and checkpoints brought out to them."""
