"""Integrations with other programs' training loops. The library imports none, and each imports only its program."""
