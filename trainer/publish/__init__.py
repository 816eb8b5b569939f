"""Sends the metrics of a run to a tracker, such as W&B or MLflow. The trainer imports none of this."""
