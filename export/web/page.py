"""Writes one HTML file that runs an ONNX file in a browser, and opens it in a headless Chromium."""

from __future__ import annotations

import base64
import gzip
import html
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, SimpleQueue
from string import Template
from tempfile import TemporaryDirectory
from threading import Thread
from typing import TYPE_CHECKING, Any

from compress.common.errors import StageFailed, Unavailable
from compress.common.requirements import Requirement
from compress.common.tensor_difference import largest_finite

if TYPE_CHECKING:
    import torch

    from compress.artifacts.artifact import Artifact

    Batch = tuple[torch.Tensor, ...]

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class NodePackage(Requirement):
    """A package of the npm registry, in the folder that an environment variable names."""

    variable: str

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

REPORT = "report"  # where a page posts its results, on the server that it came from
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


TEMPLATE = Path(__file__).with_name("page.html")
SCRIPT, WASM = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
"""What onnxruntime-web needs to run on the CPU: its code in JavaScript and in WebAssembly."""
LARGEST_MODEL = 2**28
"""Bytes of a model in a page. Browsers hold the page as one text, of at most 2**29 characters."""
EQUAL_SHARE = 0.01


def web_page(
    name: str,
    model: Artifact,
    batches: Mapping[int, Sequence[Batch]],
    *,
    seconds: float,
    atol: float | None = None,
    baseline: Mapping[int, float] | None = None,
    facts: Mapping[str, str] | None = None,
    report: str = "",
) -> str:
    """Return a page that holds an ONNX file, onnxruntime-web, inputs by rows and answers.

    It needs no other file and asks nothing of the network. Answers are equal up to `atol`, by
    default 1 % of the largest one, as runtimes round integers differently. The page measures calls
    of each number of rows for some seconds, shows them beside `baseline`, milliseconds of a call
    here by rows, and `facts` of the model, and sends them as JSON to the address `report`. Raise
    StageFailed where the model is too large, or onnxruntime-web lacks a file.
    """
    folder = ONNXRUNTIME_WEB.need_folder() / "dist"
    model.verify_cached()
    if model.payload_bytes > LARGEST_MODEL:
        raise StageFailed(
            f"{model.path}: has {model.payload_bytes / 2**20:,.0f} MiB, expected at most "
            f"{LARGEST_MODEL / 2**20:,.0f} MiB for a page in a browser"
        )
    packed = {}
    for id_, part in (("script", SCRIPT), ("wasm", WASM)):
        try:
            packed[id_] = _packed((folder / part).read_bytes(), level=9)
        except OSError as error:
            raise StageFailed(
                f"{folder / part}: {error.strerror}; {ONNXRUNTIME_WEB.install}"
            ) from None
    # The graph comes first, before the weights that a large one has beside it.
    files = sorted(model.model_files, key=lambda file: file != model.payload)
    for i, file in enumerate(files):
        packed[f"file-{i}"] = _packed((model.path / file).read_bytes())
    sizes, largest = [], 0.0
    with model.open() as predict:
        for rows, of_this_size in batches.items():
            stored = []
            for inputs in of_this_size:
                outputs = predict(*inputs)
                largest = max(largest, *map(largest_finite, outputs))
                tensors = {"inputs": inputs, "outputs": outputs}
                stored.append({key: [*map(_tensor, found)] for key, found in tensors.items()})
            times = {"baseline_ms": (baseline or {}).get(rows)}
            sizes.append({"rows": rows, "batches": stored, **times})
    if atol is None:
        atol = EQUAL_SHARE * largest
    setup = {
        "files": files,
        "sizes": sizes,
        "atol": atol,
        "seconds": seconds,
        "report": report,
        "facts": {
            "Model": f"{name}, {model.payload_bytes / 2**20:.2f} MiB",
            "Digest": model.digest,
            "Runtime": f"onnxruntime-web {ONNXRUNTIME_WEB.version()}",
            **(facts or {}),
        },
    }
    blocks = (
        f'<script type="text/plain" id="{id_}">{text}</script>' for id_, text in packed.items()
    )
    return Template(TEMPLATE.read_text()).substitute(
        title=html.escape(name),
        setup=json.dumps(setup).replace("<", r"\u003c"),
        packed="\n".join(blocks),
    )


def _packed(content: bytes, level: int = 6) -> str:
    return base64.b64encode(gzip.compress(content, level, mtime=0)).decode()


def _tensor(tensor: torch.Tensor) -> dict[str, Any]:
    array = tensor.detach().cpu().contiguous().numpy()
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "packed": _packed(array.tobytes(), level=1),
    }


def run_in_browser(model: Artifact, batches: Sequence[Batch]) -> tuple[str, dict[str, Any]]:
    """Run an artifact's file in a headless Chromium on batches of one size, and measure it.

    Returns where it ran, and `difference` (the largest absolute one of an output to the artifact's
    own runtime; None for NaN and other shapes), `p50_ms` and `p90_ms` of a call.
    """
    from compress.profiling.benchmark import MEASURED_SECONDS

    sizes = {len(batches[0][0]): batches}
    page = web_page(model.path.name, model, sizes, seconds=MEASURED_SECONDS, report=REPORT)
    found = run_page(page)
    where = f"onnxruntime-web {ONNXRUNTIME_WEB.version()} in {CHROMIUM.what}"
    if "error" in found:
        raise StageFailed(f"does not run in {where}: {found['error']}")
    (size,) = found["sizes"]
    return where, size
