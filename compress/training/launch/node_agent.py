"""What a node does that joins another one's training."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from compress.common.errors import CompressError, StageFailed
from compress.training.launch.launcher import run_ranks
from compress.training.launch.multi_node import LUGGAGE, invitation_in, own_bytes, taking_part
from compress.training.launch.worker_errors import FAILURE, record_failure

if TYPE_CHECKING:
    from pathlib import Path

    from compress.training.launch.multi_node import Meeting


def join_training(folder: Path, meeting: Meeting) -> None:
    """Run this node's ranks of a training, and return when it is over or has been called off.

    Raises:
        ArtifactInvalid: the luggage is another user's.
        CompressError: the training failed here; the node that invited tells it too.
    """
    try:
        own_bytes(folder / LUGGAGE)  # refused where it is another user's
        with taking_part(folder, meeting):
            run_ranks(meeting, folder, hosts=False)
    except FileNotFoundError:
        return  # called off
    except CompressError as error:
        if invitation_in(folder) != meeting:
            return
        _record(folder, error)
        raise
    except (KeyboardInterrupt, SystemExit):
        _record(folder, StageFailed("the node was told to stop"))
        raise


def _record(folder: Path, error: CompressError) -> None:
    """Let the node that invited tell it, unless a rank has said why."""
    if not (folder / FAILURE).exists():
        told = type(error)(f"{error} (on node {socket.gethostname()})")
        record_failure(folder, -os.getpid(), told)
