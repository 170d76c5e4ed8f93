"""A shared store on S3 whose server answers slowly, with errors, in part, or with other bytes.

moto's server is real; a proxy before it spoils answers. What a run fetches through it is either the
artifact that was made, or nothing, and then the stage runs.
"""

import http.client
import http.server
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.attack.report import Section

ROOT = Path(__file__).parents[2]
FAULTS = ("slow", "500", "503", "truncated", "tampered", "longer", "empty", "closed", "no XML")
SHARES = (0.2, 1.0)
"""How many of the answers are spoiled."""
MOST_SECONDS = 120.0


class Proxy(http.server.ThreadingHTTPServer):
    """Passes requests on, and spoils a share of the answers."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behind, self.fault, self.share = port, "", 0.0
        self.chance = random.Random(0)


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection of the proxy."""

    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *_: object) -> None:
        """Write no log."""

    def pass_on(self) -> None:
        """Ask the server, spoil its answer where chance says so, and send it."""
        proxy = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        behind = http.client.HTTPConnection("127.0.0.1", proxy.behind, timeout=60)
        behind.request(self.command, self.path, body, dict(self.headers.items()))
        answer = behind.getresponse()
        content, status = answer.read(), answer.status
        behind.close()
        fault = proxy.fault if proxy.chance.random() < proxy.share else ""
        length = len(content)
        if fault == "slow":
            time.sleep(1)
        elif fault == "closed":
            self.close_connection = True
            return
        elif fault in ("500", "503"):
            status, content = int(fault), b"<Error><Code>InternalError</Code></Error>"
            length = len(content)
        elif fault == "empty":
            content, length = b"", 0
        elif fault == "no XML":
            content = b"<html>\x1b[2J"
            length = len(content)
        elif fault == "longer":
            content += bytes(100)
            length = len(content)
        elif fault == "tampered" and content:
            place = proxy.chance.randrange(len(content))
            content = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
        elif fault == "truncated":
            content = content[: len(content) // 2]
            self.close_connection = True
        self.send_response(status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        self.send_header(
            "Content-Length", answer.getheader("Content-Length", "0") if is_head else str(length)
        )
        self.end_headers()
        if not is_head:
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on  # noqa: N815


@contextmanager
def proxied() -> Iterator[Proxy]:
    """Start moto's server and the proxy before it; where s3fs looks, the environment names it."""
    command = [sys.executable, str(ROOT / "tests" / "pipelines" / "s3_here.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        proxy = Proxy(int(server.stdout.readline()))
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        os.environ.update(
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{proxy.server_address[1]}",
            AWS_ACCESS_KEY_ID="an-id",
            AWS_SECRET_ACCESS_KEY="a-secret",
            AWS_DEFAULT_REGION="us-east-1",
            AWS_MAX_ATTEMPTS="2",
        )
        try:
            yield proxy
        finally:
            proxy.shutdown()
            server.kill()


def attack_store(only: str, most: int | None) -> Section:
    """Upload and fetch an artifact through each fault."""
    from benchmarks.attack.cases_texts import sound_artifact
    from compress.artifacts.artifact import Artifact

    section = Section("shared store on S3")
    wanted = [
        (fault, share, way)
        for fault in FAULTS
        for share in SHARES
        for way in ("fetch", "upload")
        if only in fault
    ][:most]
    with tempfile.TemporaryDirectory() as folder, proxied() as proxy:
        import s3fs

        model = Artifact.from_directory(sound_artifact(Path(folder)))
        for number, (fault, share, way) in enumerate(wanted):
            bucket = f"bucket-{number}"
            s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
            began = time.monotonic()
            failure = _tried(Path(folder, bucket), bucket, model, proxy, (fault, share, way))
            seconds = time.monotonic() - began
            section.note("seconds", seconds)
            late = f"took {seconds:.0f} s" if seconds > MOST_SECONDS else ""
            section.add(f"{way}, {share:.0%} {fault}", failure or late)
    return section


def _tried(root: Path, bucket: str, model: Any, proxy: Proxy, how: tuple[str, float, str]) -> str:
    """Return what went wrong when an artifact was uploaded, or fetched, through a fault."""
    import s3fs

    from compress.common.errors import CompressError
    from tests.pipelines.store.test_remote import Machine

    fault, share, way = how
    url = f"s3://{bucket}/store"

    def on_machine(name: str, method: str, *arguments: object, spoilt: bool = False) -> Any:
        s3fs.S3FileSystem.clear_instance_cache()
        proxy.fault, proxy.share = fault, share if spoilt else 0.0
        try:
            return getattr(Machine(root / name, url), method)(*arguments)
        except CompressError:
            if not spoilt:
                raise
            return None  # one line at the start, exit code 2
        finally:
            proxy.share = 0.0

    try:
        on_machine("first", "make", model, spoilt=way == "upload")
        found = on_machine("second", "find", spoilt=way == "fetch")
        if found is not None and found.digest != model.digest:
            return "another artifact was fetched"
        found = on_machine("third", "find")
        if found is not None and found.digest != model.digest:
            return "another artifact was stored"
        if found is None and way == "fetch":
            return "a fault while it was read spoilt the store"
    except Exception as error:  # noqa: BLE001 - whatever reaches a user
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""
