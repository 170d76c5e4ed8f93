"""The time limit of a connection, and the least that a response takes."""

import asyncio
import time

from compress.serve.http.bounded_protocol import Deadline
from compress.serve.http.messages import Response, response_bytes


def test_only_the_last_time_limit_ends_a_connection() -> None:
    async def ended() -> list[tuple[str, float]]:
        loop, seen, start = asyncio.get_running_loop(), [], time.monotonic()
        deadline = Deadline(loop)

        def on_timeout(name: str) -> None:
            seen.append((name, time.monotonic() - start))

        deadline.set(0.02, lambda: on_timeout("earlier"))
        deadline.set(0.2, lambda: on_timeout("later"))
        await asyncio.sleep(0.4)
        deadline.set(9, lambda: on_timeout("far"))
        deadline.set(0.02, lambda: on_timeout("near"))
        await asyncio.sleep(0.2)
        deadline.set(0.02, lambda: on_timeout("cancelled"))
        deadline.cancel()
        await asyncio.sleep(0.1)
        deadline.set(0.02, lambda: on_timeout("closed"))
        deadline.close()
        await asyncio.sleep(0.1)
        return seen

    names, seconds = zip(*asyncio.run(ended()), strict=True)
    assert names == ("later", "near")
    assert seconds[0] >= 0.2


def test_a_response_is_one_piece() -> None:
    response = Response(200, b"{}", {"content-type": "application/json", "X-Batch-Axis": "0"})
    kept, closed = (
        response_bytes(response, [(b"date", b"x")], keep_alive=k) for k in (True, False)
    )
    head = b"HTTP/1.1 200 OK\r\ndate: x\r\ncontent-type: application/json\r\nx-batch-axis: 0\r\n"
    assert kept == head + b"content-length: 2\r\n\r\n{}"
    assert closed == head + b"content-length: 2\r\nconnection: close\r\n\r\n{}"
