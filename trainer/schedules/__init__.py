"""Functions of the progress of a run: learning rate, batch size, samples."""
