"""What is said of a data worker that ends while it hands over a tensor."""

import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from compress.data.dataloader import original_error


def _hand_over_and_end(connection: Connection) -> None:
    connection.send_bytes(ForkingPickler.dumps(torch.ones(2)))
    os._exit(1)


def test_a_worker_that_ended_before_its_tensor_was_taken_is_named() -> None:
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=_hand_over_and_end, args=(theirs,))
    worker.start()
    tensor = ours.recv_bytes()
    worker.join(30)
    with pytest.raises(ConnectionError) as error:
        ForkingPickler.loads(tensor)
    assert "a data worker ended unexpectedly; perhaps memory ran out" in str(
        original_error(error.value)
    )


def test_the_end_of_a_users_own_connection_stays_what_it_is() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(EOFError) as error:
        ours.recv()
    assert original_error(error.value) is error.value
