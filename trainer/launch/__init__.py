"""Launches a job: process group, rendezvous, watchdog, signals, and control requests."""
