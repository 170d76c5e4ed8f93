"""Workers of pytest-xdist, forked from one process that has imported what most tests do."""

import shlex
import socket
import subprocess
import sys
from pathlib import Path

SERVER = """
import gc
gc.disable()
import contextlib, os, select, signal, socket, sys, threading, warnings
signal.signal(signal.SIGINT, signal.SIG_IGN)
listener = socket.socket(fileno=int(sys.argv.pop()))
with warnings.catch_warnings(action="ignore"):
    import onnxscript.function_libs.torch_lib.ops, sklearn.datasets, sklearn.metrics
    import torch.export._trace, torch.onnx, torchmetrics, transformers
    import compress.cli, compress.export, compress.pipelines.api, compress.pipelines.runner.run
    import compress.pruning.channel_pruner, compress.training.fit
    import anyio
anyio.__doc__ = "PYTEST_DONT_REWRITE"  # or pytest warns that it cannot: it has a plugin
assert "onnxruntime" not in sys.modules, "a fork lacks its threads, and would wait for them"
gc.freeze()
while 0 not in select.select([listener, 0], [], [])[0]:
    connection, _ = listener.accept()
    if os.fork():
        connection.close()
        continue
    listener.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(socket.recv_fds(connection, 1, 3)[1]):
        os.dup2(stream, number)
        os.close(stream)
    connection.send(b"%d" % os.getpid())
    # What xdist kills is the process below.
    ended = lambda: connection.recv(1) or os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=ended, daemon=True).start()
    exec(eval(sys.stdin.readline()))  # as execnet's command does
    break
else:
    with contextlib.suppress(ChildProcessError):
        while os.wait():  # what they took of processors is counted then
            pass
"""
WORKER = """
import os, select, signal, socket
signal.signal(signal.SIGINT, signal.SIG_IGN)
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b" "], [0, 1, 2])
for number in range(2):
    os.dup2(os.open(os.devnull, os.O_RDWR), number)
select.select([os.pidfd_open(int(server.recv(16)))], [], [])
"""


def fork_workers(specs: list, folder: Path) -> subprocess.Popen[bytes]:
    """Have xdist's workers forked, and return the process that does so until its input ends."""
    address = str(folder / "workers")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        number = listener.fileno()
        server = [sys.executable, "-u", "-c", SERVER, str(number)]
        process = subprocess.Popen(server, stdin=subprocess.PIPE, pass_fds=[number])
    for spec in specs:
        spec.python = shlex.join([sys.executable, "-IS", "-c", WORKER.format(address=address)])
    return process
