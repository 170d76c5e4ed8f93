"""`compress serve` for a folder of `export_genai`, as a user starts it, over plain HTTP."""

import json
import shutil
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from compress.artifacts.artifact import Artifact
from compress.export.genai.runtime import GENAI, GREEDY_TEXT_FILE, GreedyText
from compress.export.genai.text import TextTokenizer
from tests.export.tiny_decoder import LONGEST, VOCABULARY
from tests.forging import forge
from tests.serve.http.test_uvicorn_server import refused
from tests.serve.openai.asking import (
    CHAT,
    COMPLETIONS,
    USER,
    asked,
    events,
    metric,
    post,
    text_of,
    until,
)
from tests.serve.served_here import TOKEN, Served, serving

pytestmark = pytest.mark.skipif(
    GENAI.missing(), reason="to run these tests: pip install -e '.[genai]'"
)


@pytest.fixture
def server(genai_server: Served) -> Served:
    return genai_server


def test_the_proven_text_is_what_is_served(server: Served, folder: Artifact) -> None:
    proven, tokenizer = GreedyText.read(folder.path), TextTokenizer(folder)
    count = min(60, len(proven.tokens))
    assert 256 not in proven.tokens[:count], "the text does not end"
    body = {"model": "model", "prompt": [*proven.prompt], "max_tokens": count, "temperature": 0}
    status, answer = asked(server, **body)
    text = tokenizer.decode(proven.tokens[:count])
    assert (status, answer["choices"][0]["text"]) == (200, text)
    assert answer["usage"] == {
        "prompt_tokens": len(proven.prompt),
        "completion_tokens": count,
        "total_tokens": len(proven.prompt) + count,
    }
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    streamed = events(server, **body)
    assert "".join(each["choices"][0]["text"] for each in streamed) == text
    reasons = [each["choices"][0]["finish_reason"] for each in streamed]
    assert reasons == [None] * (len(streamed) - 1) + ["length"]
    assert len({each["id"] for each in streamed}) == 1
    assert all("usage" not in each for each in streamed)
    *others, last = events(server, **body, stream_options={"include_usage": True})
    assert (last["choices"], last["usage"]) == ([], answer["usage"])
    assert {each["usage"] for each in others} == {None}


def test_the_printed_curl_line_names_what_answers(server: Served) -> None:
    assert f"{server.url}/v1/completions" in server.curl
    assert TOKEN not in server.curl


def test_a_chat_is_answered_by_the_template(server: Served, folder: Artifact) -> None:
    ids = TextTokenizer(folder).encode("u:hi<|end|>a:", special_tokens=False)
    body: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    text = text_of(server, prompt=ids, max_tokens=12)
    status, answer = asked(server, CHAT, messages=[USER], **body)
    assert (status, answer["object"]) == (200, "chat.completion")
    message = answer["choices"][0]["message"]
    assert (message["role"], message["content"]) == ("assistant", text)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    first, *others, last = events(server, CHAT, messages=[USER], **body)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["choices"][0]["delta"]["content"] for each in others) == text
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == answer["choices"][0]["finish_reason"]
    # Without a limit it takes what the context has room for.
    _, answer = asked(server, CHAT, messages=[USER], temperature=0)
    ended = answer["choices"][0]["finish_reason"] == "stop"
    assert ended or answer["usage"]["total_tokens"] == LONGEST


def test_a_stop_ends_the_text_before_it(server: Served) -> None:
    prompt = {"prompt": "Hé", "max_tokens": 40}
    text = text_of(server, **prompt)
    stop = text[9:12]
    at = text.index(stop)
    for stops in (stop, ["\0none\0", stop]):
        _, answer = asked(server, **prompt, temperature=0, stop=stops)
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text[:at], "stop")
        assert answer["usage"]["completion_tokens"] < 40
        streamed = events(server, **prompt, temperature=0, stop=stops)
        assert "".join(each["choices"][0]["text"] for each in streamed) == text[:at]
        assert streamed[-1]["choices"][0]["finish_reason"] == "stop"
    assert text_of(server, **prompt, stop=["\0none\0"]) == text


@pytest.mark.parametrize("seeds", [range(60), [None] * 60], ids=["seeded", "without a seed"])
def test_the_end_token_stops_and_is_no_text(server: Served, seeds: Iterable[int | None]) -> None:
    # A random model ends a text within some tokens, if it is asked often enough.
    for seed in seeds:
        body = {"prompt": "a", "max_tokens": 80, "temperature": 2, "seed": seed}
        _, answer = asked(server, **body)
        choice = answer["choices"][0]
        has_ended = answer["usage"]["completion_tokens"] < 80
        assert choice["finish_reason"] == ("stop" if has_ended else "length")
        if has_ended:
            assert "<|end|>" not in choice["text"]
            return
    pytest.fail("no text ended")


def test_a_seed_gives_the_same_text_again(server: Served) -> None:
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 30, "temperature": 1.5, "top_p": 0.9}
    texts = {
        seed: {asked(server, **body, seed=seed)[1]["choices"][0]["text"] for _ in range(2)}
        for seed in (1, -5, 2**70)
    }
    assert [len(each) for each in texts.values()] == [1, 1, 1]
    assert len(set.union(*texts.values())) == 3
    unseeded = {asked(server, **body)[1]["choices"][0]["text"] for _ in range(3)}
    assert len(unseeded) > 1
    narrow = {**body, "top_p": 1e-6}
    assert {asked(server, **narrow)[1]["choices"][0]["text"] for _ in range(2)} == {
        text_of(server, prompt="a", max_tokens=30)
    }


def test_requests_at_a_time_have_their_own_answers(server: Served) -> None:
    prompts = ["a", "The ", "Hé", "1 2 3", "x" * 20, "\0", "🙂", "def f("]
    expected = [text_of(server, prompt=prompt, max_tokens=30) for prompt in prompts]
    assert len({*expected}) > 4
    with ThreadPoolExecutor(6) as pool:
        for _ in range(2):
            futures = [pool.submit(text_of, server, prompt=p, max_tokens=30) for p in prompts]
            assert [future.result() for future in futures] == expected


@pytest.mark.parametrize(
    ("body", "status", "param", "code", "words"),
    [
        ({"prompt": "a", "model": "gpt"}, 404, "model", "model_not_found", "expected 'model'"),
        ({"prompt": ""}, 400, "prompt", None, "prompt: found 0 tokens, expected 1 to 95"),
        ({"prompt": "a" * 200}, 400, "prompt", "context_length_exceeded", "found 200 tokens"),
        ({"prompt": [1] * LONGEST}, 400, "prompt", "context_length_exceeded", "96 together"),
        (
            {"prompt": [1] * 90, "max_tokens": 7},
            *(400, "max_tokens", "context_length_exceeded", "found 7, expected at most 6"),
        ),
        ({"prompt": [VOCABULARY]}, 400, "prompt", None, f"token id {VOCABULARY}, expected 0 to"),
        ({"prompt": [-1]}, 400, "prompt", None, "token id -1, expected 0 to 256"),
        ({"prompt": "a", "n": 3}, 400, "n", None, "n is not supported, found 3"),
        ({"messages": [USER]}, 400, "prompt", None, "prompt: Field required"),
    ],
)
def test_a_mistake_is_answered_in_openais_form(
    server: Served, body: Any, status: int, param: str, code: str | None, words: str
) -> None:
    for stream in (False, True):
        found, answer = asked(server, **body, stream=stream)
        error = answer["error"]
        assert (found, error["param"], error["code"]) == (status, param, code)
        assert error["type"] == "invalid_request_error"
        assert words in error["message"]


def test_what_fits_exactly_is_answered(server: Served) -> None:
    _, answer = asked(server, prompt=[1] * 90, max_tokens=6, temperature=0)
    assert answer["usage"]["total_tokens"] == LONGEST
    _, answer = asked(server, prompt=[1] * 90, temperature=0)  # 16, where there is room
    assert answer["usage"]["total_tokens"] == LONGEST


def test_messages_that_the_template_refuses(server: Served) -> None:
    status, answer = asked(server, CHAT, messages=[{"role": "tool", "content": "x"}])
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "the chat template refuses them: no such role: tool" in answer["error"]["message"]


def test_paths_tokens_and_forms(server: Served) -> None:
    def error(*arguments: Any, **options: Any) -> tuple[int, Any]:
        status, _, body = server.ask(*arguments, **options)
        return status, json.loads(body)["error"]

    for path, method in ((COMPLETIONS, "POST"), ("/v1/models", "GET"), ("/metrics", "GET")):
        status, found = error(path=path, method=method, headers={"Authorization": "Bearer x"})
        assert (status, found["code"]) == (401, "invalid_api_key")
    assert error(path=COMPLETIONS, method="GET")[0] == 405
    assert error(path="/v1/embeddings")[0] == 404
    assert error(path="/v1/models/other", method="GET")[0] == 404
    assert error(b"{}", {"Content-Type": "text/plain"}, path=COMPLETIONS)[0] == 415
    assert error(b"{}", {"Content-Encoding": "gzip"}, path=COMPLETIONS)[0] == 415
    assert error(b'"%s"' % (b"x" * 2**20), path=COMPLETIONS)[0] == 413
    assert error(b"{", {"Content-Type": ""}, path=COMPLETIONS)[0] == 400
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert server.ask(path=path, method="GET", headers={"Authorization": ""})[0] == 200
    _, _, body = server.ask(path="/v1/models", method="GET")
    (model,) = json.loads(body)["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("model", "model", LONGEST)
    assert json.loads(server.ask(path="/v1/models/model", method="GET")[2]) == model


def test_metrics_count_requests_and_tokens(server: Served) -> None:
    answers, prompts = (
        f'inference_tokens_total{{model="model",part="{part}",version="1"}}'
        for part in ("answer", "prompt")
    )
    before = metric(server, answers), metric(server, prompts)
    asked(server, prompt=[1, 2, 3], max_tokens=5, temperature=0)
    events(server, prompt=[1, 2], max_tokens=4, temperature=0)
    assert metric(server, answers) == before[0] + 9
    assert metric(server, prompts) == before[1] + 5
    assert metric(server, 'inference_requests_total{model="model",status="200",version="1"}') > 0


LONG = {"prompt": "a", "max_tokens": LONGEST - 1, "temperature": 2, "stream": True}


def test_a_client_that_has_gone_does_no_harm(server: Served) -> None:
    for _ in range(8):
        connection = post(server, **LONG)
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        connection.close()
    until(lambda: metric(server, "inference_queue_length") == 0)
    assert text_of(server, prompt="a", max_tokens=3)


def test_above_the_queue_requests_are_refused(server: Served) -> None:
    with ThreadPoolExecutor(40) as pool:
        body = {"prompt": "a", "max_tokens": LONGEST - 1, "temperature": 0}
        answers = [*pool.map(lambda _: asked(server, **body), range(40))]
    statuses = {status for status, _ in answers}
    assert statuses == {200, 503}
    error = next(answer["error"] for status, answer in answers if status == 503)
    assert (error["type"], error["code"]) == ("server_error", "overloaded")


def test_a_time_limit_gives_504(folder: Artifact) -> None:
    with serving(folder.path, "--seconds", "0.004", "--workers", "1") as server:
        body = {"prompt": "a", "max_tokens": LONGEST - 1, "temperature": 0}
        status, answer = asked(server, **body)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        assert "did not answer within 0.004 s" in answer["error"]["message"]


@pytest.mark.parametrize("processes", ["1", "2"])
def test_streams_in_progress_end_before_the_server_does(folder: Artifact, processes: str) -> None:
    with serving(folder.path, "--processes", processes, "--workers", "1") as server:
        connections = [post(server, **LONG, seed=seed) for seed in range(4)]
        first = [each.recv(64) for each in connections]
        server.process.send_signal(signal.SIGTERM)
        answers = [
            start + b"".join(iter(lambda each=each: each.recv(65536), b""))
            for start, each in zip(first, connections, strict=True)
        ]
        assert server.process.wait(60) == 143
        for connection in connections:
            connection.close()
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"data: [DONE]\n\n" in answer


def test_what_was_not_proven_is_not_served(folder: Artifact, tmp_path: Path) -> None:
    text = GreedyText.read(folder.path)
    other = (text.tokens[5] + 1) % VOCABULARY
    forged = shutil.copytree(folder.path, tmp_path / "forged")
    content = text._replace(tokens=(*text.tokens[:5], other, *text.tokens[6:]))._asdict()
    forge(forged, GREEDY_TEXT_FILE, json.dumps(content).encode())
    done = refused(forged)
    assert done.returncode == 1
    assert f"as token 6 of the text that proves the export, expected {other}" in done.stderr
    altered = shutil.copytree(folder.path, tmp_path / "altered")
    (altered / GREEDY_TEXT_FILE).chmod(0o644)
    (altered / GREEDY_TEXT_FILE).write_bytes(
        (altered / GREEDY_TEXT_FILE).read_bytes().replace(b"1", b"2")
    )
    assert f"{GREEDY_TEXT_FILE} is not the file" in refused(altered).stderr
    done = refused(folder.path, "--max-rows", "4")
    assert (done.returncode, "leave --report and --max-rows out" in done.stderr) == (2, True)
