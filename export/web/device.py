"""The device `web`: onnxruntime-web in a headless Chromium."""

from __future__ import annotations

import json
import os
import shutil
from base64 import b64decode
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compress.common.errors import StageFailed
from compress.common.requirements import Requirement
from compress.export.common.remote_device import FarEnd, RemoteDevice
from compress.export.common.remote_session import unpack
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
    "--host-resolver-rules=MAP * ~NOTFOUND",
    # The DevTools protocol on descriptors 3 and 4; Chromium ends when the first is closed.
    "--remote-debugging-pipe",
)
START = ("sh", "-c", 'exec "$0" "$@" 3<&0 4>&1 </dev/null >&2')
PAGE = Path(__file__).with_name("session.js")


class Browser(RemoteDevice):
    """onnxruntime-web, in a headless Chromium, on one thread."""

    name, title = "web", "web (onnxruntime-web in Chromium)"
    requirements = (ONNXRUNTIME_WEB, CHROMIUM)

    @property
    def version(self) -> str:
        """The version of onnxruntime-web."""
        return ONNXRUNTIME_WEB.version()

    def start(self) -> Page:
        """Start Chromium."""
        return Page(PAGE)


class Page(FarEnd):
    """A page in Chromium that answers frames, asked by the DevTools protocol on pipes."""

    # Not by Playwright or a driver, each a package more, nor by a port, which others could use.

    def __init__(self, script: Path) -> None:
        dist = ONNXRUNTIME_WEB.need_folder() / "dist"
        self._script = script.read_text()
        self._runtime = [(dist / name).resolve(strict=True) for name in (SCRIPT, WASM)]
        self._target: dict[str, str] = {}
        self._rest = b""
        self._folder = TemporaryDirectory(prefix="compress-chromium-", ignore_cleanup_errors=True)
        # Chromium refuses its sandbox to root.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        options = [*OPTIONS, *sandbox, f"--user-data-dir={self._folder.name}"]
        super().__init__(CHROMIUM.what, [*START, CHROMIUM.what, *options])

    def answer(self, frame: bytes) -> bytes:
        """Return the page's answer to a frame."""
        if not self._target:
            target = self._call("Target.createTarget", url="about:blank")
            found = self._call("Target.attachToTarget", **target, flatten=True)
            self._target = {"sessionId": found["sessionId"]}
            self._evaluate(self._script)
            self._set_files(*self._runtime)
            self._evaluate("load()")
        file = Path(self._folder.name, "frame")
        file.write_bytes(frame)
        self._set_files(file, *unpack(frame)[0].get("files", ()))
        return b64decode(self._evaluate("answer()"))

    def _set_files(self, *files: Path | str) -> None:
        # Not in messages, of which Chromium reads 10 MB a second, and at most 100 MB.
        element = self._call("Runtime.evaluate", expression="input")["result"]["objectId"]
        self._call("DOM.setFileInputFiles", files=[*map(str, files)], objectId=element)

    def _evaluate(self, code: str) -> Any:
        """Return the value of JavaScript in the page."""
        how = {"awaitPromise": True, "returnByValue": True}
        found = self._call("Runtime.evaluate", expression=code, **how)
        if "exceptionDetails" in found:
            raise StageFailed(f"{CHROMIUM.what}: {found['result'].get('description', 'failed')}")
        return found["result"].get("value")

    def _call(self, method: str, **params: Any) -> Any:
        """Return the result of a command of the DevTools protocol."""
        command = {"id": 1, "method": method, "params": params, **self._target}
        self.stdin.write(json.dumps(command).encode() + b"\0")
        self.stdin.flush()
        while "id" not in (message := json.loads(self._read_message())):
            pass  # an event
        if "result" not in message:
            raise StageFailed(f"{CHROMIUM.what}: {method}: {message['error']}")
        return message["result"]

    def _read_message(self) -> bytes:
        parts = [self._rest]
        while b"\0" not in parts[-1]:
            if not (part := self.stdout.read1(2**20)):
                raise EOFError
            parts.append(part)
        last, _, self._rest = parts.pop().partition(b"\0")
        return b"".join([*parts, last])

    def close(self) -> None:
        """Kill Chromium and its processes."""
        super().close()
        self._folder.cleanup()


BROWSER = {"web": Browser()}
