"""Object stores: checkpoints behind a URL, read and written by processes of their own, which alone load obstore."""
