"""One save from the lock to the commit, while the caller waits."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.commit.channel import StoreChannel
from trainer.checkpoint.format.layout import DEFAULT_FILE_BYTES
from trainer.checkpoint.format.manifest import MOST_ELEMENTS
from trainer.checkpoint.policy import Retention, SavePolicy
from trainer.checkpoint.tensors.live import Contents
from trainer.errors import CheckpointError, ConfigError
from trainer.regular_file import is_url


def check_target(folder: str | Path, iteration: int) -> None:
    """Refuse a folder or an iteration that cannot be saved.

    Raises:
        ConfigError: `folder` is a URL, or no path.
        CheckpointError: for an iteration that no folder is named after.
    """
    require_path(folder)
    if is_url(str(folder)):
        raise ConfigError("A checkpoint folder is a URL; only mounted file systems can be written", found=folder)
    if type(iteration) is not int or not 0 <= iteration <= MOST_ELEMENTS:
        raise CheckpointError(
            "This is no number of an iteration", expected="an int of 0 or more", found=repr(iteration)
        )


def require_path(path: object) -> None:
    """Refuse what is no path, by an error that a rank shares with the others.

    Raises:
        ConfigError: naming its type.
    """
    if not isinstance(path, (str, Path)):
        raise ConfigError("This is no path", expected="a str or a pathlib.Path", found=type(path).__name__)


def save_now(
    folder: str | Path, contents: Contents, channel: StoreChannel, *, iteration: int, nonce: str, keep: int
) -> Path:
    """Save `contents` as `folder/iter_<iteration>`, and return that path. A call of all ranks of the channel.

    Args:
        keep: how many checkpoints stay, the newest ones; 0 keeps all.

    Raises:
        TrainerError: if it did not become a checkpoint.
    """
    policy = SavePolicy(Path(folder), retention=Retention(keep), file_bytes=DEFAULT_FILE_BYTES)
    checkpointer = Checkpointer(policy, channel, nonce=nonce)
    try:
        checkpointer.start()
        report = checkpointer.save(iteration, contents)
    finally:
        checkpointer.close()
    assert report is not None
    if report.error is not None:
        raise report.error
    return report.path
