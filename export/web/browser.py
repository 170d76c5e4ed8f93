"""Opens a page in a headless Chromium and waits for what it reports."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed, Unavailable
from compress.common.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterator

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class NodePackage(Requirement):
    """A package of the npm registry, in the folder that an environment variable names."""

    variable: str
    """The environment variable."""

    def missing(self) -> bool:
        """Whether the variable names no folder of that package."""
        return self._package_file() is None

    def need_folder(self) -> Path:
        """Return the folder, or raise Unavailable."""
        if (file := self._package_file()) is None:
            raise Unavailable(f"needs {self.what}, which was not found; {self.install}")
        return file.parent

    def version(self) -> str:
        """Return the package's version; empty where it is missing."""
        file = self._package_file()
        return json.loads(file.read_text())["version"] if file else ""

    def _package_file(self) -> Path | None:
        file = Path(os.environ.get(self.variable, ""), "package.json")
        try:
            return file if json.loads(file.read_text())["name"] == self.what else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


ONNXRUNTIME_WEB = NodePackage(
    what="onnxruntime-web",
    variable="ONNXRUNTIME_WEB",
    install="npm install onnxruntime-web@1.30.0, and set ONNXRUNTIME_WEB to its folder, "
    "such as $PWD/node_modules/onnxruntime-web",
)
CHROMIUM = Requirement(
    what=next(filter(shutil.which, BROWSERS), BROWSERS[0]),
    program=True,
    install="Chromium or Chrome, e.g. apt-get install chromium",
)


REPORT = "report"
"""Where a page posts its results, on the server that it came from."""
DEADLINE_S = 600
LARGEST_REPORT = 2**20
OPTIONS = (
    *("--headless=new", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # The page needs nothing from elsewhere, and gets nothing.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def run_page(page: str, deadline_s: float = DEADLINE_S) -> Any:
    """Open a page in Chromium and return the JSON that it posts to :data:`REPORT`.

    Raise Unavailable without Chromium, StageFailed where it ended or posted nothing in time.
    """
    # Chromium alone: Playwright or a driver would add a package, and the page reports by itself.
    reports: SimpleQueue[bytes] = SimpleQueue()
    with (
        _served(page.encode(), reports) as address,
        TemporaryDirectory(prefix="compress-chromium-", ignore_cleanup_errors=True) as folder,
        _chromium(address, Path(folder)) as process,
    ):
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            with suppress(Empty):
                return json.loads(reports.get(timeout=0.2))
            if process.poll() is not None:
                *_, last = "", *Path(folder, "log").read_text(errors="replace").splitlines()
                raise StageFailed(
                    f"{CHROMIUM.what} ended with exit code {process.returncode}: {last}"
                )
    raise StageFailed(f"the page in {CHROMIUM.what} reported nothing within {deadline_s:g} s")


@contextmanager
def _served(page: bytes, reports: SimpleQueue[bytes]) -> Iterator[str]:
    """Serve a page on a free port of the loopback interface; what it posts goes to a queue."""

    class Handler(BaseHTTPRequestHandler):
        timeout = DEADLINE_S

        def do_GET(self) -> None:
            """Send the page; a browser also asks for an icon."""
            if self.path != "/":
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            # An isolated page gets a clock of 5 µs instead of 100.
            self.send_header("Cross-Origin-Opener-Policy", "same-origin")
            self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
            self.end_headers()
            self.wfile.write(page)

        def do_POST(self) -> None:
            """Take a report."""
            size = int(self.headers.get("Content-Length", 0))
            if self.path != f"/{REPORT}" or size > LARGEST_REPORT:
                self.send_error(404)
                return
            reports.put(self.rfile.read(size))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing on standard error."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def _chromium(address: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run Chromium with a new profile; it and its processes end with the block."""
    if (program := CHROMIUM.program_path()) is None:
        raise Unavailable(f"needs {CHROMIUM.what}, which was not found; {CHROMIUM.install}")
    # Chromium refuses its sandbox to root.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    command = [program, *OPTIONS, *sandbox, f"--user-data-dir={folder / 'profile'}", address]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
