"""A run as it is built: the model, the optimizer, the data and the record."""
