"""Folders that transformers' `save_pretrained` writes, read without transformers."""
