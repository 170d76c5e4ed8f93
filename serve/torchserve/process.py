"""Run TorchServe on loopback for the duration of a ``with`` block.

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
from typing import TYPE_CHECKING, Any, Self

from compress.common.errors import StageFailed, Unavailable
from compress.common.requirements import JAVA, pip_install
from compress.serve.client.client import Client
from compress.serve.torchserve.mar_file import model_name_of
from compress.serve.worker.loaders import THREADS_VARIABLE

if TYPE_CHECKING:
    from compress.common.signature import Signature

logger = logging.getLogger(__name__)

KILL_SECONDS = 1.0  # how long killed processes may take to disappear
POLL_SECONDS = 0.1
SHOWN_CHARACTERS = 300
STARTUP_FAILURES = ("Retry worker:", "Load model failed", "Failed to load model")
"""Lines of the server's log when a worker did not become ready."""
WORKER_DIED = "Backend worker process died."
WORKER_LOG_SECONDS = 15  # how long to wait for a dead worker's error in the log
MAX_BYTES = 256 * 1024**2  # largest request and response; a larger response would kill the worker
LOGGING = """\
<Configuration>
  <Appenders>
    <File name="server" fileName="{folder}/server.log"><PatternLayout pattern="%m%n"/></File>
    <File name="model" fileName="{folder}/model.log"><PatternLayout pattern="%m%n"/></File>
  </Appenders>
  <Loggers>
    <Logger name="MODEL_LOG" level="info" additivity="false"><AppenderRef ref="model"/></Logger>
    <Logger name="MODEL_METRICS" level="off"/>
    <Logger name="TS_METRICS" level="off"/>
    <Logger name="ACCESS_LOG" level="off"/>
    <Root level="info"><AppenderRef ref="server"/></Root>
  </Loggers>
</Configuration>
"""
# The JVM must not outlive this process, however it ends (prctl 1 is PR_SET_PDEATHSIG, which exec
# keeps). It is bound to the thread that started the server: keep that thread alive meanwhile.
DIE_WITH_PARENT = (
    "import ctypes, os, sys; "
    f"ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)}); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


class PortTaken(StageFailed):
    """Another process listens on a port that was chosen for TorchServe."""


class TorchServe:
    """Serves one ``.mar``; in the `with` block, every worker is ready.

    Example:
        with TorchServe(Path("model.mar")) as server:
            print(server.url, server.model_name, server.token)
    """

    def __init__(
        self, mar: Path, *, threads: int | None = None, startup_seconds: float = 120.0
    ) -> None:
        """Configure the server of an archive, which is code: verify it before it is served.

        `threads` are those of each worker's model, by default as the archive says.
        """
        self.mar = mar.resolve()
        self.model_name = model_name_of(mar)
        self.startup_seconds = startup_seconds
        self.token = ""
        self.url = self._management_url = ""
        self._environment = {} if threads is None else {THREADS_VARIABLE: str(threads)}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        """Start, and wait until all workers are ready; else StageFailed with the log's end."""
        java, packages = find_torchserve()
        started = time.monotonic()
        for attempts_left in (2, 1, 0):
            try:
                self._start_and_wait(java, packages)
                break
            except PortTaken:
                # Another process took one of the ports after `free_ports` had found them free.
                if not attempts_left:
                    raise
        logger.info(
            "%s is served at %s after %.1f s", self.mar, self.url, time.monotonic() - started
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pid(self) -> int:
        """PID of the server."""
        return self._process.pid

    def client(self, signature: Signature, max_rows: int) -> Client:
        """Return a client of the served model."""
        return Client(self.url, self.model_name, signature, token=self.token, max_rows=max_rows)

    def _start_and_wait(self, java: str, packages: Path) -> None:
        with self._stack:
            # Linux limits the path of a Unix socket, such as a worker's in here, to 107 bytes.
            folder = tempfile.gettempdir()
            folder = folder if len(os.fsencode(folder)) < 70 else "/tmp"
            self.folder = Path(tempfile.mkdtemp(prefix="serve-", dir=folder))
            self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._start(java, packages)
            self._wait_until_ready()
            # Nothing has failed: what was started stays until `__exit__`.
            self._stack = self._stack.pop_all()

    def _start(self, java: str, packages: Path) -> None:
        folder, ports = self.folder, free_ports(5)
        (folder / "tmp").mkdir()
        (folder / "log4j2.xml").write_text(LOGGING.format(folder=folder))
        (folder / "config.properties").write_text(configuration(self.mar, ports))
        self.url, self._management_url = (f"http://127.0.0.1:{port}" for port in ports[:2])
        command = [java, "-Xmx512m", f"-Dmodel_server_home={packages}"]
        # UsePerfData writes outside of that folder, and a killed JVM would leave its files behind.
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
        self._stack.callback(kill_group, self._process)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.startup_seconds
        while not self._is_ready():
            if "Address already in use" in self._read("output.log"):
                raise PortTaken(f"{self.mar}: TorchServe found its ports taken")
            if has_ended(self._process.pid):
                raise StageFailed(self._failure("TorchServe ended while starting"))
            log = self._read("server.log")
            if any(words in log for words in STARTUP_FAILURES):
                raise StageFailed(self._failure("the model was not loaded"))
            if time.monotonic() > deadline:
                seconds = f"{self.startup_seconds:g} s"
                raise StageFailed(self._failure(f"not every worker was ready after {seconds}"))
            time.sleep(POLL_SECONDS)

    def _is_ready(self) -> bool:
        """Query every worker's state: ``/ping`` is Healthy even if no model is loaded."""
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
        # The server may stop reading a dead worker's output before the error; the worker that it
        # starts instead repeats it.
        deadline = time.monotonic() + WORKER_LOG_SECONDS
        while WORKER_DIED not in (log := self._read("model.log")) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        log = log or self._read("server.log") or self._read("output.log")
        shown = log_tail(log.replace(f"{self.folder}/", ""))  # that folder is about to be deleted
        return f"{self.mar}: {what}; its log ends: {shown}"

    def _read(self, name: str) -> str:
        file = self.folder / name
        return file.read_text(errors="replace") if file.is_file() else ""


def configuration(mar: Path, ports: list[int]) -> str:
    """Return ``config.properties`` for one archive and five ports."""
    settings: dict[str, Any] = {
        "inference_address": f"http://127.0.0.1:{ports[0]}",
        "management_address": f"http://127.0.0.1:{ports[1]}",
        "metrics_address": f"http://127.0.0.1:{ports[2]}",
        "grpc_inference_address": "127.0.0.1",
        "grpc_management_address": "127.0.0.1",
        "grpc_inference_port": ports[3],
        "grpc_management_port": ports[4],
        "disable_token_authorization": "false",
        # A year: after the default of 60 minutes clients would get 400.
        "token_expiration_min": 525600,
        # No client may load another archive, which is code.
        "enable_model_api": "false",
        "allowed_urls": "none://disabled",
        "load_models": mar.name,
        # The handler decodes bodies itself, by their Content-Type.
        "decode_input_request": "false",
        "max_request_size": MAX_BYTES,
        "max_response_size": MAX_BYTES,
        "number_of_gpu": 0,
        "disable_system_metrics": "true",
        "metrics_mode": "prometheus",
        "install_py_dep_per_model": "false",
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())


def find_torchserve() -> tuple[str, Path]:
    """Return Java's path, and TorchServe's directory; Unavailable where one is missing."""
    java, spec = JAVA.program_path(), importlib.util.find_spec("ts")
    if java is None:
        raise Unavailable(f"serving with TorchServe needs {JAVA.install}")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / "frontend").is_dir():
            return java, Path(folder).parent
    raise Unavailable(f"serving needs TorchServe: {pip_install('serve')}")


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nothing listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def log_tail(log: str) -> str:
    """Return as many of a log's last lines as fit SHOWN_CHARACTERS, joined by ` | `."""
    shown = ""  # without tracebacks' frames, so that chained exceptions fit
    for line in reversed(log.splitlines()):
        # A worker logs the last two after the actual error.
        skipped = ("Traceback ", WORKER_DIED, "RuntimeError: 500 - Unknown exception")
        if not line.strip() or line[0].isspace() or line.startswith(skipped):
            continue
        joined = f"{line} | {shown}" if shown else line[:SHOWN_CHARACTERS]
        if len(joined) > SHOWN_CHARACTERS:
            break
        shown = joined
    return shown or "nothing"


def has_ended(pid: int) -> bool:
    """Return whether a child has ended, without reaping it, so that its PID is not reused."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, options) is not None


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and every process of its group."""
    # SIGKILL: on SIGTERM TorchServe 0.12 resets its connections too, and then takes seconds.
    # Before the process is reaped, as its PID and group id could be reused afterwards.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + KILL_SECONDS
    while _group_is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 10)


def _group_is_alive(group: int) -> bool:
    """Return whether a process group has processes that are neither dead nor zombies."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group, *_ = status.read_text(errors="replace").rpartition(")")[2].split()
            if int(its_group) == group and state not in "ZX":
                return True
    return False
