"""The cause of a failed training, and what is only its consequence on other ranks."""

import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from compress.common.errors import StageFailed
from compress.training.launch import worker
from compress.training.launch.worker import (
    RankKilled,
    error_of_exit,
    record_failure,
    recorded_failure,
)

# As gloo and torch's NCCL backend word them.
LOST = {
    "gloo": "[/src/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:9",
    "remote": "NCCL error in: ../ProcessGroupNCCL.cpp:3690, remote process exited or there was a "
    "network error, NCCL version 2.27.5\nncclRemoteError: A call failed possibly due to a "
    "network error or a remote process exiting prematurely.",
    "aborted": "NCCL communicator was aborted on rank 1. ",
    "watchdog": "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
    "OpType=ALLREDUCE) ran for 1800071 milliseconds before timing out.",
}


@pytest.mark.parametrize("message", LOST.values(), ids=LOST)
def test_a_lost_connection_gives_way_to_its_cause(monkeypatch, message):
    store, error = dist.HashStore(), dist.DistBackendError(message)
    cause = threading.Timer(0.3, record_failure, (store, 0, ValueError("no disk")))
    cause.start()
    record_failure(store, 1, error)
    cause.join()
    assert str(recorded_failure(store)) == "rank 0: ValueError: no disk"
    monkeypatch.setattr(worker, "SECONDS_FOR_THE_CAUSE", 0)
    alone = dist.HashStore()
    record_failure(alone, 1, error)
    assert str(recorded_failure(alone)).startswith("rank 1 lost the connection to another process")


def test_other_errors_of_nccl_are_recorded_at_once():
    store, started = dist.HashStore(), time.monotonic()
    message = "NCCL error in: a.cpp:1, invalid usage, NCCL version 2.27.5"
    record_failure(store, 1, dist.DistBackendError(message))
    assert time.monotonic() - started < worker.SECONDS_FOR_THE_CAUSE
    assert "invalid usage" in str(recorded_failure(store))


def test_a_process_that_the_watchdog_has_ended_says_why(tmp_path: Path):
    log = tmp_path / "rank-1.log"
    assert "Watchdog" not in str(error_of_exit(1, -9, log))
    log.write_text(f"[rank1]:[E1] {LOST['watchdog']}\nterminate called\n")
    error = error_of_exit(1, -6, log)
    assert isinstance(error, RankKilled)
    assert "SIGABRT" in str(error) and "(Watchdog caught collective operation timeout: " in str(
        error
    )
    assert isinstance(error_of_exit(1, 0, log), StageFailed)
