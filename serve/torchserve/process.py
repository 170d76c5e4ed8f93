"""A real TorchServe on loopback for the duration of a ``with`` block, and nothing of it afterwards.

Java is started directly: the ``torchserve`` launcher leaves the JVM behind on SIGTERM, returns 0
when its port is taken, and keeps one pid file for the whole machine.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from compress.common.errors import StageFailed, Unavailable
from serve.torchserve.config import LOGGING, configuration
from serve.torchserve.mar_file import model_name_of
from serve.worker.loaders import THREADS_VARIABLE

logger = logging.getLogger(__name__)

JAVA_MISSING = "needs Java 17 (e.g. apt-get install openjdk-17-jre-headless)"
TORCHSERVE_MISSING = "needs TorchServe: pip install -e '.[serve]'"
SECONDS_TO_BE_GONE = 1.0
POLL_SECONDS = 0.1
SHOWN_CHARACTERS = 300
GIVEN_UP = ("Retry worker:", "Load model failed", "Failed to load model", "BindException")
"""What the server's log says when a worker did not become ready."""
DIED = "Backend worker process died."
EMPTY_WORDS = (DIED, "RuntimeError: 500 - Unknown exception")
"""What a worker adds to a failure that it has told of."""
SECONDS_OF_LAST_WORDS = 15
# The JVM must not outlive this process, however it ends (prctl 1 is PR_SET_PDEATHSIG, which exec
# keeps). It follows the thread that started it: keep that thread alive while the server is used.
DIE_WITH_PARENT = (
    "import ctypes, os, sys; "
    f"ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)}); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


class TorchServe:
    """Serves one ``.mar``; entered, every worker is ready.

    Example:
        with TorchServe(Path("model.mar")) as server:
            print(server.url, server.model_name, server.token)
    """

    def __init__(
        self,
        mar: Path,
        *,
        threads: int | None = None,
        startup_seconds: float = 120.0,
        port: int = 0,
    ) -> None:
        """Remember what to serve; nothing is started yet.

        Args:
            mar: the archive. It is code: verify it before it is served.
            threads: CPU threads of each worker's model; the archive's own setting by default.
            startup_seconds: how long every worker may take to become ready.
            port: where predictions are asked for; 0 lets the system choose.
        """
        self.mar = mar.resolve()
        self.model_name = model_name_of(mar)
        self.startup_seconds = startup_seconds
        self.port = port
        self.token = ""
        """Key of the inference API."""
        self.url = self._management_url = ""
        self._environment = {} if threads is None else {THREADS_VARIABLE: str(threads)}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start, and wait until every worker is ready.

        Raises:
            Unavailable: Java or TorchServe is missing.
            StageFailed: a worker did not become ready; the message ends as the model's log does.
        """
        java, packages = find_java(), find_torchserve()
        started = time.monotonic()
        with self._stack:
            self.folder = Path(tempfile.mkdtemp(prefix="serve-", dir=short_folder()))
            self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._start(java, packages)
            self._wait_until_ready()
            self._stack = self._stack.pop_all()
        logger.info(
            "%s is served at %s after %.1f s", self.mar, self.url, time.monotonic() - started
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        """Number of the server's process."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Return whether the server has ended by itself."""
        return has_ended(self.pid)

    def _start(self, java: str, packages: Path) -> None:
        folder, ports = self.folder, free_ports(5)
        ports[0] = self.port or ports[0]
        (folder / "tmp").mkdir()
        (folder / "log4j2.xml").write_text(LOGGING.format(folder=folder))
        (folder / "config.properties").write_text(configuration(self.mar, ports))
        self.url, self._management_url = (f"http://127.0.0.1:{port}" for port in ports[:2])
        command = [java, "-Xmx512m", f"-Dmodel_server_home={packages}"]
        # Its performance counters lie outside of that folder, where a killed JVM leaves them.
        command += [f"-Djava.io.tmpdir={folder / 'tmp'}", "-XX:-UsePerfData"]
        command += [f"-Dlog4j.configurationFile=file://{folder / 'log4j2.xml'}"]
        command += ["-cp", f"{packages / 'ts' / 'frontend'}/*", "org.pytorch.serve.ModelServer"]
        command += ["--python", sys.executable, "-f", str(folder / "config.properties")]
        command += ["-s", str(self.mar.parent), "-ncs"]
        environment = os.environ | self._environment | {"TMPDIR": str(folder / "tmp")}
        environment |= {"LOG_LOCATION": str(folder), "METRICS_LOCATION": str(folder)}
        environment.pop("TS_CONFIG_FILE", None)  # it would override the arguments
        with (folder / "output.log").open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-ISc", DIE_WITH_PARENT, str(os.getpid()), *command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group of its own; Ctrl-C ends it through us
            )
        self._stack.callback(stop, self._process)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.startup_seconds
        while not self._is_ready():
            if has_ended(self._process.pid):
                raise StageFailed(self._failure("TorchServe ended while starting"))
            log = self._read("server.log")
            if any(words in log for words in GIVEN_UP):
                raise StageFailed(self._failure("the model was not loaded"))
            if time.monotonic() > deadline:
                seconds = f"{self.startup_seconds:g} s"
                raise StageFailed(self._failure(f"not every worker was ready after {seconds}"))
            time.sleep(POLL_SECONDS)

    def _is_ready(self) -> bool:
        """Ask for every worker's state: ``/ping`` says Healthy of a server without a model."""
        try:
            keys = json.loads((self.folder / "key_file.json").read_text())
            self.token = keys["inference"]["key"]
            request = urllib.request.Request(
                f"{self._management_url}/models/{self.model_name}",
                headers={"Authorization": f"Bearer {keys['management']['key']}"},
            )
            with urllib.request.urlopen(request, timeout=10) as response:
                (model,) = json.load(response)
        except (OSError, ValueError, KeyError):
            return False
        states = [worker["status"] for worker in model["workers"]]
        return len(states) >= max(1, model["minWorkers"]) and set(states) == {"READY"}

    def _failure(self, what: str) -> str:
        log = self._last("model.log") or self._read("server.log") or self._read("output.log")
        shown = last_lines(log.replace(f"{self.folder}/", ""))  # that folder is about to go
        return f"{self.mar}: {what}; its log ends: {shown}"

    def _last(self, name: str) -> str:
        """Return a log in which a worker has told why it died.

        The server may stop reading a worker before its last words; the worker that it starts
        instead says them again.
        """
        deadline = time.monotonic() + SECONDS_OF_LAST_WORDS
        while DIED not in (log := self._read(name)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return log

    def _read(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(errors="replace") if file.is_file() else ""


def find_java() -> str:
    """Return the path of Java.

    Raises:
        Unavailable: it is not on the PATH.
    """
    java = shutil.which("java")
    if java is None:
        raise Unavailable(f"serving with TorchServe {JAVA_MISSING}")
    return java


def find_torchserve() -> Path:
    """Return the directory in which TorchServe is installed.

    Raises:
        Unavailable: it is not installed.
    """
    spec = importlib.util.find_spec("ts")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "frontend").is_dir():
            return Path(place).parent
    raise Unavailable(f"serving {TORCHSERVE_MISSING}")


def short_folder() -> str:
    """Return a folder for temporary files whose path leaves room for a worker's socket.

    The path of a Unix socket ends after 107 bytes.
    """
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) < 70 else "/tmp"


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nothing listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def last_lines(log: str) -> str:
    """Return the end of a log in one line: the last line, and those before it that have room.

    A traceback's frames are left out: they would hide what was raised before.
    """
    shown = ""
    for line in reversed(log.splitlines()):
        if not line.strip() or line[0].isspace() or line.startswith(("Traceback ", *EMPTY_WORDS)):
            continue
        joined = f"{line} | {shown}" if shown else line[:SHOWN_CHARACTERS]
        if len(joined) > SHOWN_CHARACTERS:
            break
        shown = joined
    return shown or "nothing"


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it: its number stays its own."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, options) is not None


def stop(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and every process of its group.

    At once: on SIGTERM TorchServe 0.12 resets its connections, too, and then waits for seconds.
    """
    # Before the process is reaped: the number, and the group's, must not become another's.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _await_group_end(process.pid)


def _await_group_end(group: int) -> None:
    """Wait until the processes of a killed group are gone, or dead and not reaped by anyone yet."""
    deadline = time.monotonic() + SECONDS_TO_BE_GONE
    while _lives(group) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 10)


def _lives(group: int) -> bool:
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group, *_ = status.read_text(errors="replace").rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False
