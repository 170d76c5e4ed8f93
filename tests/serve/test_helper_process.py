"""Texts, templates and tokenizers that take any time or memory: the server goes on, and says so."""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from compress.artifacts.artifact import Artifact
from compress.common.errors import ArtifactInvalid
from compress.serve.http.helper_process import READING, WRITING, HelperProcess
from compress.serve.http.messages import HttpError
from tests.forging import forge
from tests.serve.called_service import Service, broken, slow
from tests.serve.openai.asking import CHAT, USER, asked, connected, request, text_of, until
from tests.serve.openai.conftest import folder  # noqa: F401 - a fixture
from tests.serve.openai.session_decoder import serving_by_session
from tests.serve.served_here import Served


@contextmanager
def helper(seconds: float = 30) -> Iterator[HelperProcess]:
    """Start a process whose calls may take 28 MiB."""
    made = HelperProcess(Service, what=Path("model"), seconds=seconds, needed_bytes=20 << 20)
    with closing(made):
        yield made


def test_calls_return_what_the_other_process_does() -> None:
    async def run() -> None:
        with helper() as called:
            pid = await called.call("pid")
            assert pid != os.getpid()
            for size in (0, 1, 100_000, 5 << 20):
                assert await called.call("echo", 7, body=bytearray(size)) == (7, size)
            with pytest.raises(HttpError, match="no coffee") as refused:
                await called.call("refuse")
            assert refused.value.response.status == 418
            assert refused.value.response.headers["retry-after"] == "1"
            with pytest.raises(RuntimeError, match="KeyError: 'a bug'"):
                await called.call("fail")
            assert await called.call("pid") == pid
        until(lambda: not psutil.pid_exists(pid))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("method", "args", "status", "words"),
    [
        ("sleep", [30], 504, "was not read in 0.2 s"),
        ("allocate", [100], 413, "takes more than 28 MiB"),
        ("abort", [], 413, "takes more than"),
    ],
)
def test_a_call_that_takes_too_much_ends_with_its_process(
    method: str, args: list[Any], status: int, words: str
) -> None:
    async def run() -> None:
        with helper(seconds=0.6) as called:
            pid = await called.call("pid")
            with pytest.raises(HttpError, match=words) as refused:
                await called.call(method, *args)
            assert refused.value.response.status == status
            until(lambda: not psutil.pid_exists(pid))
            assert await called.call("echo", 1, body=b"") == (1, 0)

    asyncio.run(run())


def test_what_earlier_calls_left_refuses_no_other() -> None:
    async def run() -> None:
        with helper() as called:
            assert [await called.call("grow", 12) for _ in range(6)] == [1, 2, 1, 2, 1, 2]

    asyncio.run(run())


def test_a_call_that_nobody_waits_for_is_ended() -> None:
    async def run() -> None:
        with helper() as called:
            pid = await called.call("pid")
            sleeping = asyncio.create_task(called.call("sleep", 30))
            waiting = asyncio.create_task(called.call("sleep", 30))
            await asyncio.sleep(0.1)
            waiting.cancel()
            sleeping.cancel()
            assert await asyncio.wait_for(called.call("echo", 1, body=b"x"), 20) == (1, 1)
            until(lambda: not psutil.pid_exists(pid))

    asyncio.run(run())


def test_large_calls_wait_for_each_other_first() -> None:
    async def run() -> None:
        ended = list[int]()
        with helper() as called:

            async def call(number: int, size: int) -> None:
                await called.call("echo", number, body=bytes(size))
                ended.append(number)

            sizes = [1 << 20] * 4 + [1]
            await asyncio.gather(*(call(number, size) for number, size in enumerate(sizes)))
            assert ended.index(4) <= 1  # behind the one that was in progress

    asyncio.run(run())


def test_a_killed_process_is_started_again() -> None:
    async def run() -> None:
        with helper() as called:
            pid = await called.call("pid")
            parent = psutil.Process(pid).parent()
            assert parent is not None
            parent.kill()
            until(lambda: not psutil.pid_exists(pid))
            assert await called.call("echo", 1, body=b"x") == (1, 1)

    asyncio.run(run())


def test_a_start_anew_holds_up_nobody_else_and_may_fail(tmp_path: Path) -> None:
    how = tmp_path / "how"
    how.write_text("0")

    async def run() -> None:
        made = HelperProcess(slow, str(how), what=Path("m"), seconds=30, needed_bytes=20 << 20)
        with closing(made) as called:
            for says in ("1", "broken", "0"):
                if says != "0":
                    pid = await called.call("pid")
                    parent = psutil.Process(pid).parent()
                    assert parent is not None
                    parent.kill()
                    until(lambda pid=pid: not psutil.pid_exists(pid))
                how.write_text(says)
                calls = [
                    asyncio.create_task(called.call("echo", 1, body=b"x", lane=lane))
                    for lane in (READING, WRITING)
                ]
                turns = 0
                while not all(each.done() for each in calls):
                    await asyncio.sleep(0.02)
                    turns += 1
                # In the second that the start takes; counted, as a busy machine holds up each.
                assert turns > 5 or says != "1", "the event loop waited for the start"
                if says == "broken":
                    with pytest.raises(HttpError, match="cannot be started again") as refused:
                        calls[0].result()
                    assert refused.value.response.status == 503
                    assert isinstance(calls[1].exception(), HttpError)
                else:
                    assert [each.result() for each in calls] == [(1, 1), (1, 1)]

    asyncio.run(run())


def test_answers_are_written_while_requests_are_read() -> None:
    async def run() -> None:
        with helper() as called:
            reading = [asyncio.create_task(called.call("sleep", 20)) for _ in range(3)]
            await asyncio.sleep(0.1)
            for number in range(5):
                assert await called.call("echo", number, body=b"", lane=WRITING) == (number, 0)
            assert not any(each.done() for each in reading)
            for each in reading:
                each.cancel()

    asyncio.run(run())


def test_what_cannot_be_created_is_raised() -> None:
    with pytest.raises(ArtifactInvalid, match="the tokenizer is broken"):
        HelperProcess(broken, what=Path("model"), seconds=1, needed_bytes=0)


LOOPS = """{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x"""
WRITES = """{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"""


def forged(folder: Artifact, place: Path, change: Any) -> Artifact:  # noqa: F811
    """Return a copy of a folder with another tokenizer.json or template, sealed again."""
    shutil.copytree(folder.path, place)
    change(place)
    return Artifact.from_directory(place)


def with_template(template: str) -> Any:
    def change(place: Path) -> None:
        forge(place, "chat_template.jinja", template.encode())

    return change


def with_growing_normalizer(place: Path) -> None:
    content = json.loads((place / "tokenizer.json").read_text())
    grows = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    content["normalizer"] = {"type": "Sequence", "normalizers": [grows] * 12}
    forge(place, "tokenizer.json", json.dumps(content).encode())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "status"),
    [
        (with_template(LOOPS), 504),
        # What takes too much memory ends in the same way; a call that does is above.
        pytest.param(with_template(WRITES), 413, marks=pytest.mark.soak),
        pytest.param(with_growing_normalizer, 413, marks=pytest.mark.soak),
    ],
    ids=["template that loops", "template that writes", "tokenizer"],
)
def test_a_hostile_folder_holds_up_no_server(
    folder: Artifact,  # noqa: F811
    tmp_path: Path,
    change: Any,
    status: int,
) -> None:
    hostile = forged(folder, tmp_path / "hostile", change)
    with serving_by_session(hostile, "--seconds", "2") as server, ThreadPoolExecutor(4) as pool:
        before = memory(server)
        chat = {"messages": [USER | {"content": "a"}]}
        answers = [pool.submit(asked, server, CHAT, **chat) for _ in range(2)]
        slowest, most = 0.0, 0.0
        while not all(each.done() for each in answers):
            began = time.monotonic()
            assert server.ask(path="/v2/health/live", method="GET")[0] == 200
            slowest = max(slowest, time.monotonic() - began)
            most = max(most, memory(server))
            time.sleep(0.05)  # both take a processor from what is watched
        for each in answers:
            assert each.result()[0] == status, each.result()
        assert text_of(server, prompt=[1, 2], max_tokens=2)
        assert most - before < 60
        asking = connected(server)
        asking.sendall(request(path=CHAT, **chat))
        processes = psutil.Process(server.process.pid).children(recursive=True)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 143
        asking.close()
        until(lambda: not any(each.is_running() for each in processes))


def memory(server: Served) -> float:
    """Return the memory of a server's processes in MiB, shared pages once."""
    process = psutil.Process(server.process.pid)
    total = 0
    for each in (process, *process.children(recursive=True)):
        try:
            lines = Path(f"/proc/{each.pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024
