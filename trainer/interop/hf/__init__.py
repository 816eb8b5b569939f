"""Reads folders written by transformers' `save_pretrained`, without transformers."""
