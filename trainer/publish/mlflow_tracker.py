"""MLflow. It identifies a figure by name, timestamp, step and value, so sending a figure twice has no effect."""

from __future__ import annotations

from collections.abc import Sequence

import requests
from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from trainer.publish.tracker import RemoteRun, Tracker, TrackerRow

_ID = "reprise.run"
_MOST_CHARACTERS = 6000  # in a parameter's value
_MOST_PARAMETERS = 100  # per call
_MOST_TAG_CHARACTERS = 5000


class MlflowTracker(Tracker):
    """An MLflow run tagged with our id, because MLflow generates its own ids.

    MLflow stores float64 values, including NaN. It replaces infinity with the largest finite number.
    """

    failures = (OSError, MlflowException, requests.RequestException)

    def open(self, run: RemoteRun) -> None:
        client = self._client = MlflowClient()
        experiment = client.get_experiment_by_name(run.project)
        number = client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        matches = client.search_runs([number], f"tags.`{_ID}` = '{run.id}'")
        remote = matches[0] if matches else client.create_run(number, tags={_ID: run.id}, run_name=run.name)
        self._run, self.place = remote.info.run_id, client.tracking_uri
        client.update_run(self._run, status="RUNNING")
        params = [Param(name, str(value)[:_MOST_CHARACTERS]) for name, value in run.config.items()]
        missing = [param for param in params if param.key not in remote.data.params]
        for first in range(0, len(missing), _MOST_PARAMETERS):
            client.log_batch(self._run, params=missing[first : first + _MOST_PARAMETERS])

    def send(self, rows: Sequence[TrackerRow]) -> None:
        metrics = [
            Metric(name, value, round(row.time * 1e3), row.iteration)
            for row in rows
            for name, value in row.figures.items()
        ]
        texts = {name: text[:_MOST_TAG_CHARACTERS] for row in rows for name, text in row.texts.items()}
        self._client.log_batch(self._run, metrics, tags=[RunTag(name, text) for name, text in texts.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)
