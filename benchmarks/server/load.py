"""A load generator that costs little: sockets, one loop of epoll, prepared requests.

    echo '{"port": 8080, "request": "<base64>", "connections": 8, "seconds": 2}' | python load.py

prints one line of JSON. With `rate`, so many requests are sent each second and no more; without,
each connection sends its next one as soon as it is answered.
"""

import base64
import json
import select
import socket
import sys
import time

from compress.profiling.quantiles import quantile

RECEIVED = 1 << 18


def main() -> None:
    given = json.loads(sys.stdin.readline())
    request = base64.b64decode(given["request"])
    found = run(given["port"], request, given["connections"], given["seconds"], given.get("rate"))
    print(json.dumps(found))


def run(
    port: int, request: bytes, connections: int, seconds: float, rate: float | None = None
) -> dict[str, float]:
    """Return what was seen: requests, errors, rates and percentiles of latency in milliseconds."""
    sockets = {}
    poll = select.epoll()
    for _ in range(connections):
        each = socket.create_connection(("127.0.0.1", port), timeout=60)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[each.fileno()] = each
        poll.register(each, select.EPOLLIN)
    latencies: list[float] = []
    errors = 0
    sent: dict[int, float] = {}
    partly: dict[int, bytes] = {}
    usual = 0  # bytes of a good answer: they are alike, and reading heads costs the server's cores
    idle = [*sockets]
    began, used = time.perf_counter(), time.process_time()
    due, end = began, began + seconds
    while (now := time.perf_counter()) < end or sent:
        while idle and now < end and (rate is None or due <= now):
            place = idle.pop()
            sent[place] = now
            sockets[place].sendall(request)
            due = max(due + 1 / rate, now - 1) if rate else now
        wait = 1.0 if rate is None or not idle or now >= end else max(0.0, due - now)
        for place, _ in poll.poll(wait):
            received = sockets[place].recv(RECEIVED)
            if partly:
                received = partly.pop(place, b"") + received
            if len(received) != usual and not is_whole(received):
                if not received:
                    raise SystemExit("the server closed a connection")
                partly[place] = received
                continue
            latencies.append(time.perf_counter() - sent.pop(place))
            good = received.startswith(b"HTTP/1.1 200")
            usual = len(received) if good else usual
            errors += not good
            idle.append(place)
    took, used = time.perf_counter() - began, time.process_time() - used
    for each in sockets.values():
        each.close()
    found = summary(latencies, took)
    return found | {"errors": errors, "client_us": 1e6 * used / found["requests"]}


def is_whole(received: bytes) -> bool:
    """Return whether an answer is here to its last byte."""
    head = received.find(b"\r\n\r\n")
    if head < 0:
        return False
    lower = received[:head].lower()
    at = lower.find(b"\r\ncontent-length:")
    if at < 0:
        raise SystemExit(f"an answer without a length: {received[:200]!r}")
    ends = lower.find(b"\r\n", at + 2)
    length = int(lower[at + 17 : ends if ends > 0 else head])
    return len(received) >= head + 4 + length


def summary(latencies: list[float], took: float) -> dict[str, float]:
    """Return requests, requests a second, and percentiles in milliseconds."""
    return {
        "requests": len(latencies),
        "per_second": len(latencies) / took,
        "p50_ms": quantile(latencies, 0.5) * 1e3,
        "p99_ms": quantile(latencies, 0.99) * 1e3,
    }


if __name__ == "__main__":
    main()
