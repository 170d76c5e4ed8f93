"""onnxruntime without a server: so many threads, each calling one session as fast as it answers.

echo '{"model": "model.onnx", "inputs": {"image": {"dtype": "float32", "shape": [1, 1, 8, 8]}},
"connections": 8, "seconds": 2}' | python in_process.py
"""

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnxruntime

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
from session import open_session

from compress.profiling.quantiles import quantile


def main() -> None:
    for line in sys.stdin:
        given = json.loads(line)
        session = open_session(given["model"])
        # Ones: token 0 is padding, and a mask of zeros divides by nothing.
        feed = {name: np.ones(**each) for name, each in given["inputs"].items()}
        print(json.dumps(run(session, feed, given["connections"], given["seconds"])), flush=True)


def run(
    session: onnxruntime.InferenceSession, feed: dict, callers: int, seconds: float
) -> dict[str, float]:
    """Return calls, calls a second, and percentiles of latency in milliseconds."""
    for _ in range(50):
        session.run(None, feed)
    found: list[list[float]] = [[] for _ in range(callers)]
    end = time.perf_counter() + seconds

    def call(latencies: list[float]) -> None:
        while (began := time.perf_counter()) < end:
            session.run(None, feed)
            latencies.append(time.perf_counter() - began)

    began, used = time.perf_counter(), time.process_time()
    threads = [threading.Thread(target=call, args=(latencies,)) for latencies in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, used = time.perf_counter() - began, time.process_time() - used
    latencies = [latency for each in found for latency in each]
    return {
        "requests": len(latencies),
        "per_second": len(latencies) / took,
        "p50_ms": quantile(latencies, 0.5) * 1e3,
        "p99_ms": quantile(latencies, 0.99) * 1e3,
        "client_us": 1e6 * used / len(latencies),
    }


if __name__ == "__main__":
    main()
