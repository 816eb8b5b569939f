"""Folders written by transformers' `save_pretrained`, read without transformers."""
