"""A run as built: model, optimizer, data and record."""
