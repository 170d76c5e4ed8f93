"""wrk as the client of every server: it takes a few microseconds of a core for a request.

wrk is a package of Debian (`apt-get install wrk`).
"""

import json
import os
import resource
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SCRIPT = Path(__file__).with_suffix(".lua")
TIMEOUT_SECONDS = 30


@dataclass(frozen=True)
class Request:
    """A POST request, sent over and over."""

    url: str
    headers: dict[str, str]
    body: bytes


def run(
    request: Request, connections: int, seconds: int, pause_ms: float | None = None
) -> dict[str, float]:
    """Return what wrk saw: requests, errors, requests a second, percentiles in milliseconds.

    Each connection sends the next request when its last one is answered, or `pause_ms` later on
    average. `client_us` is what a request costs wrk, in microseconds of one core.
    """
    if shutil.which("wrk") is None:
        raise SystemExit("this benchmark takes wrk: apt-get install wrk")
    with tempfile.NamedTemporaryFile() as file:
        lines = "".join(f"{name}: {value}\n" for name, value in request.headers.items())
        file.write(lines.encode() + b"\n" + request.body)
        file.flush()
        variables = os.environ | {"LOAD_REQUEST": file.name}
        if pause_ms is not None:
            variables["LOAD_PAUSE_MS"] = str(pause_ms)
        command = ["wrk", "--threads", "1", "--connections", str(connections)]
        command += ["--duration", f"{seconds}s", "--timeout", f"{TIMEOUT_SECONDS}s"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [*command, "--script", SCRIPT, request.url],
            env=variables,
            capture_output=True,
            text=True,
            check=False,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode or not done.stdout.endswith("}\n"):
        raise SystemExit(f"wrk: {done.stderr or done.stdout}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    if not found["requests"]:
        raise SystemExit(f"{request.url}: answered nothing within {seconds} s")
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rate = found["requests"] / found["seconds"]
    return found | {"per_second": rate, "client_us": 1e6 * used / found["requests"]}
