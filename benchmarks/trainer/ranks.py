"""Runs a function in several new processes of one process group."""

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp

from compress.training.distributed.base import process_group


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function on every rank and return the results in the order of ranks."""
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    group = mp.spawn(
        _rank, args=(ranks, port, queue, function, arguments), nprocs=ranks, join=False
    )
    results = {}
    # A rank that fails puts nothing, and `join` raises its error.
    while not group.join(timeout=0.1) or not queue.empty():
        while not queue.empty():
            rank, result = queue.get()
            results[rank] = result
    return [results[rank] for rank in range(ranks)]


def _rank(rank: int, ranks: int, port: int, queue: Any, function: Any, arguments: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    with process_group("cpu"):
        queue.put((rank, function(*arguments)))
