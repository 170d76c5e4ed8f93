"""The device `web`: onnxruntime-web in a headless Chromium."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

from compress.common.errors import StageFailed, describe_exit_code
from compress.common.requirements import Requirement
from compress.export.common.remote_device import DEADLINE_S, RemoteDevice
from compress.export.web.page import ONNXRUNTIME_WEB, SCRIPT, WASM

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = Requirement(
    what=next(filter(shutil.which, BROWSERS), BROWSERS[0]),
    program=True,
    install="Chromium or Chrome, e.g. apt-get install chromium",
)
OPTIONS = (
    *("--headless=new", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    # The page needs nothing from elsewhere, and gets nothing.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    # Chromium ends when the other end of its descriptor 3 is closed, however this process ends.
    "--remote-debugging-pipe",
)
START = ("sh", "-c", 'exec "$0" "$@" 3<&0 4>/dev/null </dev/null')
PAGE = Path(__file__).with_name("session.html")
POLL_S = 60
"""How long the page waits for a frame before it asks again: browsers give requests up."""


class Browser(RemoteDevice):
    """onnxruntime-web, in a headless Chromium, on one thread."""

    name, title = "web", "web (onnxruntime-web in Chromium)"
    requirements = (ONNXRUNTIME_WEB, CHROMIUM)

    @property
    def version(self) -> str:
        """The version of onnxruntime-web."""
        return ONNXRUNTIME_WEB.version()

    def start(self) -> Page:
        """Open a page in Chromium."""
        return Page(PAGE)


class Page:
    """A page in Chromium that answers frames; it gets them from a server on the loopback."""

    # Chromium alone: Playwright or a driver would add a package, and the page asks by itself.

    def __init__(self, page: Path) -> None:
        dist = ONNXRUNTIME_WEB.need_folder() / "dist"
        # Other pages, processes and users of this machine do not know the address.
        root = f"/{secrets.token_hex(16)}/"
        files = {
            root: (page.read_bytes(), "text/html; charset=utf-8"),
            f"{root}ort.mjs": ((dist / SCRIPT).read_bytes(), "text/javascript"),
            f"{root}ort.wasm": ((dist / WASM).read_bytes(), "application/wasm"),
        }
        self._frames, self._replies = SimpleQueue[bytes](), SimpleQueue[bytes]()
        handler = _handler(files, f"{root}exchange", self._frames, self._replies)
        self._folder = TemporaryDirectory(prefix="compress-chromium-", ignore_cleanup_errors=True)
        self._log = Path(self._folder.name, "log")
        # Chromium refuses its sandbox to root.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        profile = f"--user-data-dir={self._folder.name}/profile"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*START, CHROMIUM.what, *OPTIONS, *sandbox, profile],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        url = {"url": f"http://127.0.0.1:{self._server.server_port}{root}"}
        # Not as an argument, which every user of this machine can read.
        command = {"id": 1, "method": "Target.createTarget", "params": url}
        with suppress(BrokenPipeError):  # it has ended
            self._process.stdin.write(json.dumps(command).encode() + b"\0")  # type: ignore[union-attr]

    def exchange(self, frame: bytes, deadline_s: float) -> bytes:
        """Return the page's answer to a frame."""
        self._frames.put(frame)
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            with suppress(Empty):
                return self._replies.get(timeout=0.2)
            if (code := self._process.poll()) is not None:
                *_, last = "", *self._log.read_text(errors="replace").splitlines()
                raise StageFailed(f"{CHROMIUM.what} {describe_exit_code(code)}: {last}")
        raise StageFailed(f"the page in {CHROMIUM.what} answered nothing within {deadline_s:g} s")

    def close(self) -> None:
        """Kill Chromium and its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._server.shutdown()
        self._server.server_close()
        self._folder.cleanup()


def _handler(
    files: dict[str, tuple[bytes, str]],
    exchange: str,
    frames: SimpleQueue[bytes],
    replies: SimpleQueue[bytes],
) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = DEADLINE_S

        def do_GET(self) -> None:
            """Send the page, or onnxruntime-web; a browser also asks for an icon."""
            if self.path not in files:
                self.send_error(404)
                return
            self._send(200, *files[self.path])

        def do_POST(self) -> None:
            """Take an answer, if there is one, and send the next frame."""
            if not secrets.compare_digest(self.path.encode(), exchange.encode()):
                self.send_error(404)
                return
            if size := int(self.headers.get("Content-Length", 0)):
                replies.put(self.rfile.read(size))
            try:
                self._send(200, frames.get(timeout=POLL_S), "application/octet-stream")
            except Empty:
                self._send(204, b"", "")

        def _send(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing on standard error."""

    return Handler


BROWSER = {"web": Browser()}
