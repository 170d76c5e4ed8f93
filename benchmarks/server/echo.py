"""What HTTP alone costs: the built-in server's library, which reads a body and answers 40 bytes.

python echo.py 8080
"""

import sys
from typing import Any

import uvicorn

HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/octet-stream"), (b"content-length", b"40")],
}
BODY = {"type": "http.response.body", "body": bytes(40)}


async def answer(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    await send(HEAD)
    await send(BODY)


if __name__ == "__main__":
    uvicorn.run(
        answer,
        port=int(sys.argv[1]),
        http="httptools",
        loop="uvloop",
        lifespan="off",
        log_config=None,
        access_log=False,
    )
