"""How fast a folder of `export_genai` generates by `compress generate` and by `compress serve`."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from time import perf_counter
from urllib.parse import urlsplit

from export.genai.text import continue_text

ROUNDS, TOKENS = 7, 128
PROMPT = "The with statement is used to wrap the execution of a block with methods. " * 4
TOKEN = "a-token-of-the-benchmark"


def streamed(place: str) -> tuple[float, float]:
    """Return milliseconds to the first token, and tokens a second after it, of one stream."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection(place, timeout=60)
    start, times = perf_counter(), []
    headers = {"Authorization": f"Bearer {TOKEN}"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    for line in connection.getresponse():
        if line.startswith(b"data: {"):
            times.append(perf_counter())
    connection.close()
    # The last event has the reason of the end, and no token.
    return 1000 * (times[0] - start), (TOKENS - 1) / (times[-1] - times[0])


def main(folder: Path) -> None:
    """Print medians of both, measured in turn, and the sum of two clients at a time."""
    command = [sys.executable, "-c", "import cli; cli.main()", "serve", str(folder), "--port", "0"]
    environment = os.environ | {"COMPRESS_SERVE_TOKEN": TOKEN}
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [*command, "--workers", "2"], cwd=root, env=environment, stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            place = urlsplit(server.stdout.readline().split("served at ")[1].split()[0]).netloc
            found: dict[str, list[tuple[float, float]]] = {"generate": [], "one": [], "two": []}
            with ThreadPoolExecutor(2) as pool:
                for _ in range(ROUNDS):
                    text = continue_text(folder, PROMPT, TOKENS, 1)
                    found["generate"].append((text.first_token_ms, text.tokens_per_second or 0.0))
                    found["one"].append(streamed(place))
                    first, second = pool.map(streamed, [place] * 2)
                    found["two"].append((max(first[0], second[0]), first[1] + second[1]))
        finally:
            server.terminate()
    print("| | first token, ms | tokens/s |\n|---|---|---|")
    names = ("`compress generate`", "`compress serve`, one client", "two clients, together")
    for name, rounds in zip(names, found.values(), strict=True):
        first_token, rate = map(median, zip(*rounds, strict=True))
        print(f"| {name} | {first_token:.1f} | {rate:.1f} |")
