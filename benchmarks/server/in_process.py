"""onnxruntime without a server: so many threads, each calling one session as fast as it answers.

echo '{"model": "model.onnx", "input": "image", "shape": [1, 1, 8, 8], "connections": 8,
"seconds": 2}' | python in_process.py
"""

import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnxruntime

sys.path.insert(0, str(Path(__file__).parent))
from load import summary


def main() -> None:
    for line in sys.stdin:
        given = json.loads(line)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(given["model"], options)
        feed = {given["input"]: np.zeros(given["shape"], given["dtype"])}
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
    seen = summary([latency for latencies in found for latency in latencies], took)
    return seen | {"client_us": 1e6 * used / seen["requests"]}


if __name__ == "__main__":
    main()
