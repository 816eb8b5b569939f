"""Keeps torch to one thread in this process, and every process from waiting for names; orders the tests."""

import gc
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tests.profiles  # noqa: F401 - Hypothesis's settings
from tests import ROOT
from tests.times import Times, dealt

torch.set_num_threads(1)

# Programs that tests start in folders of their own run this checkout: an installed library has no package `trainer`.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

# Ranks that tests launch take the cores they are given, whatever the user's shell has set.
os.environ.pop("OMP_NUM_THREADS", None)

# Threads of a product that wait for each other sleep: several processes share the cores, which spinning would take.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A store asks for the name of whoever connects. Where the name server is silent, that takes the resolver's five seconds
# each time (see resolv.conf(5)); they are no part of any test.
os.environ.setdefault("RES_OPTIONS", "timeout:1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files, so that no process is left alone with one in the end."""
    places = dealt([item.path for item in items], config.rootpath, config.option.markexpr)
    items.sort(key=lambda item: places[item.path])


_times = Times()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note the time of a test or of a fixture; the process that deals the tests out gets all reports."""
    _times.add(report.fspath, report.duration, is_slow="slow" in report.keywords)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the times of a run that is asked to."""
    if "REPRISE_WRITE_TIMES" in os.environ and not hasattr(session.config, "workerinput"):
        _times.write()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt what stays, modules and tests, from garbage collections, which take a tenth of a process's time else."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """Restore the levels of loggers, which a command may set for the rest of its process."""
    before = _levels()
    yield
    for logger, level in _levels().items():
        if level != before.get(logger, logging.NOTSET):
            logger.setLevel(before.get(logger, logging.NOTSET))


def _levels() -> dict[logging.Logger, int]:
    named = logging.root.manager.loggerDict.values()
    return {logger: logger.level for logger in (logging.root, *named) if isinstance(logger, logging.Logger)}


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """Give this process a process group of its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
