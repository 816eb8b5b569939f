"""Sends a run's metrics to a tracker, such as W&B or MLflow. The trainer imports nothing from this package."""
