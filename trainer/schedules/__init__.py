"""The numbers that follow the progress of a run: learning rate, batch size, samples."""
