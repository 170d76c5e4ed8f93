"""TorchServe under load, while its workers, and those who started it, are killed."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.attack.report import Section

ROOT = Path(__file__).parents[2]
KILLS, CLIENTS = 8, 4
LOADED_SECONDS = 1.0
"""Load before each kill."""
ANSWER_SECONDS = 20.0
"""Longest time of one answer; TorchServe can lose a request whose worker dies."""
RECOVERY_SECONDS = 60.0
STARTER = """
import sys, time
from pathlib import Path
from compress.serve.torchserve.process import TorchServe
with TorchServe(Path(sys.argv[1])) as server:
    print(server.pid, flush=True)
    time.sleep(600)
"""


def attack_torchserve(only: str, most: int | None) -> Section:
    """Kill the worker under load several times, then the process that started the server."""
    from compress.common.errors import CompressError
    from compress.core.context import Context
    from compress.serve.torchserve.process import TorchServe, find_torchserve
    from compress.serve.torchserve.stage import PackageTorchServe
    from tests.serve.served_here import sealed

    section = Section("kills of TorchServe")
    if only and only not in section.name:
        return section
    try:
        find_torchserve()
    except CompressError as missing:
        section.skipped = str(missing)
        return section
    with tempfile.TemporaryDirectory() as folder:
        model = sealed(Path(folder, "onnx"))
        context = Context(root=Path(folder, "mar"))
        archive: Any = PackageTorchServe(gates=(), batch_size=4).run(model, context)
        with TorchServe(archive.payload_path) as server:
            load = Load(server, archive.signature)
            for number in range(min(KILLS, most or KILLS)):
                section.add(f"worker {number}", load.while_killing(server.pid, section))
        section.add("no wrong answer", load.wrong)
        section.note("answers", load.answered)
        section.note("refused", load.refused)
        section.add("the process that started it", _kill_the_starter(archive.payload_path))
    return section


class Load:
    """Clients that ask until they are told to stop, and compare each answer."""

    def __init__(self, server: Any, signature: Any) -> None:
        self._server, self._signature = server, signature
        self.wrong, self.answered, self.refused, self.slowest = "", 0, 0, 0.0
        self._lock = threading.Lock()

    def while_killing(self, pid: int, section: Section) -> str:
        """Ask, kill the workers, and ask on; return what went wrong."""
        stop, self.slowest = threading.Event(), 0.0
        clients = [threading.Thread(target=self._ask, args=(stop, n)) for n in range(CLIENTS)]
        for each in clients:
            each.start()
        time.sleep(LOADED_SECONDS)
        workers = [p for p in psutil.Process(pid).children(recursive=True) if "python" in p.name()]
        for worker in workers:
            worker.send_signal(signal.SIGKILL)
        began, before = time.monotonic(), self.answered
        while self.answered < before + 20 and time.monotonic() - began < RECOVERY_SECONDS:
            time.sleep(0.05)
        recovered = time.monotonic() - began
        stop.set()
        for each in clients:
            each.join(ANSWER_SECONDS + 10)
        section.note("seconds until it answered again", recovered)
        section.note("seconds of an answer or error", self.slowest)
        if not workers:
            return "no worker was found"
        if any(each.is_alive() for each in clients):
            return "a client still waits"
        return f"answered nothing for {recovered:.0f} s" if recovered >= RECOVERY_SECONDS else ""

    def _ask(self, stop: threading.Event, seed: int) -> None:
        from compress.common.errors import StageFailed
        from compress.serve.client.client import Client

        server, chance = self._server, np.random.default_rng(seed)
        with Client(
            server.url,
            server.model_name,
            self._signature,
            token=server.token,
            timeout_seconds=ANSWER_SECONDS,
        ) as client:
            while not stop.is_set():
                row = np.array([[1, chance.integers(1000), chance.random(), 0.5]], np.float32)
                began = time.monotonic()
                try:
                    double, _, looked = client.predict([row])
                except StageFailed:
                    with self._lock:
                        self.refused += 1
                    time.sleep(0.1)
                    continue
                finally:
                    self.slowest = max(self.slowest, time.monotonic() - began)
                is_right = np.array_equal(double, 2 * row) and looked.tolist() == [row[0, 1]]
                with self._lock:
                    self.answered += 1
                    if not is_right:
                        self.wrong = f"{row.tolist()} was answered {double.tolist()}, {looked}"


def _kill_the_starter(mar: Path) -> str:
    """Kill the process that started TorchServe, with SIGKILL; return what is left of the server."""
    command = [sys.executable, "-c", STARTER, str(mar)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as starter:
        assert starter.stdout is not None
        server = psutil.Process(int(starter.stdout.readline()))
        family = [server, *server.children(recursive=True)]
        starter.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    for process in alive:
        process.kill()
    return f"{len(alive)} of {len(family)} processes go on" if alive else ""
