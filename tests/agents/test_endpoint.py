"""The endpoint over a real engine and real connections: what it answers, whom it serves, and how it ends."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import psutil
import pytest

from pekoe.pipeline.agents.endpoint import Endpoint, EndpointSettings
from pekoe.pipeline.rollout.engine import GenerationRequest, SamplingParameters

CHAT = "/chat/completions"
LONG = {"prompt": "1+1=", "max_tokens": 120, "ignore_eos": True}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "1+2"}], **fields}


async def wait_until(is_so: Any) -> None:
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.01)


def test_a_chat_is_the_engines_own_completion_of_the_rendered_messages(
    client: Any, engine: Any, tokenizer: Any
) -> None:
    status, answer = client.post(CHAT, chat(temperature=0, logprobs=True, return_token_ids=True, ignore_eos=True))
    assert status == 200
    prompt = tokenizer.encode("1+2+")
    greedy = SamplingParameters(max_new_tokens=12, greedy=True, ignore_eos=True)
    expected = asyncio.run(engine.generate(GenerationRequest(tuple(prompt), greedy)))
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == prompt
    assert choice["token_ids"] == expected.tokens.tolist()
    assert choice["weight_versions"] == [0] * 12
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == pytest.approx(expected.logprobs.tolist())
    assert choice["message"] == {
        "role": "assistant", "content": tokenizer.decode(expected.tokens, skip_special_tokens=True),
    }  # fmt: skip
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}


def test_completions_take_text_ids_and_several_of_either(client: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("3+4=")
    options = {"seed": 3, "max_tokens": 5, "n": 2, "return_token_ids": True, "logprobs": 1, "ignore_eos": True}
    by_text = client.post("/completions", {"prompt": "3+4=", **options})[1]["choices"]
    by_ids = client.post("/completions", {"prompt": ids, **options})[1]["choices"]
    both = client.post("/completions", {"prompt": [ids, "1+"], **options})[1]["choices"]
    picked = [[choice["token_ids"] for choice in choices] for choices in (by_text, by_ids, both[:2])]
    assert picked[0] == picked[1] == picked[2]
    assert [choice["index"] for choice in both] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in both] == [ids, ids, tokenizer.encode("1+"), tokenizer.encode("1+")]
    assert by_text[0]["token_ids"] != by_text[1]["token_ids"], "samples of one request differ"
    assert len(by_text[0]["logprobs"]["token_logprobs"]) == 5
    again = client.post("/completions", {"prompt": ids, **options, "seed": 4})[1]["choices"]
    assert [c["token_ids"] for c in again] != [c["token_ids"] for c in by_ids]


def test_a_stop_string_ends_the_text_before_itself(client: Any, tokenizer: Any) -> None:
    options = {"prompt": "7+", "max_tokens": 40, "seed": 1, "ignore_eos": True}
    text = client.post("/completions", options)[1]["choices"][0]["text"]
    stop = text[3]
    (choice,) = client.post("/completions", {**options, "stop": stop})[1]["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (chat(stream=True), "stream"),
        (chat(tools=[{"type": "function"}]), "tools"),
        (chat(response_format={"type": "json_object"}), "response_format"),
        (chat(temperature=-1), "temperature"),
        (chat(temperature=True), "temperature"),
        (chat(top_p=0), "top_p"),
        (chat(max_tokens=0), "max_tokens"),
        (chat(n="2"), "n"),
        (chat(n=257), "n"),
        (chat(stop=[""]), "stop"),
        (chat(logit_bias={"x": 1}), "logit_bias"),
        (chat(top_logprobs=3), "top_logprobs"),
        (chat(max_tokenz=3), "max_tokenz"),
        (chat(messages=[]), "messages"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages[0].content"),
        (chat(messages=[{"content": "1"}]), "messages[0]"),
        (chat(messages=[{"role": "user", "content": "1", "tool_calls": [1]}]), "messages[0].tool_calls"),
        ([1], None),
    ],
)
def test_what_is_not_served_is_named(client: Any, body: Any, field: str | None) -> None:
    status, answer = client.post(CHAT, body)
    assert status == 400
    assert answer["error"]["param"] == field
    assert answer["error"]["type"] == "invalid_request_error"
    assert field is None or field in answer["error"]["message"]


def test_what_the_engine_refuses_is_the_clients_error_too(client: Any) -> None:
    status, answer = client.post("/completions", {"prompt": [5, 100000]})
    assert (status, "not in the vocabulary" in answer["error"]["message"]) == (400, True)


def test_null_is_absent_and_what_changes_nothing_is_accepted(client: Any) -> None:
    body = chat(stream=None, tools=None, user="me", metadata={}, store=False, stream_options=None, max_tokens=2)
    assert client.post(CHAT, body)[0] == 200


def test_models_unknown_paths_and_unknown_models(client: Any) -> None:
    assert client.get("/models")[1]["data"][0]["id"] == "tiny"
    status, answer = client.post(CHAT, chat(model="gpt"))
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert client.get("/embeddings")[0] == 404
    assert client.get(CHAT)[0] == 405


@pytest.mark.parametrize(
    "authorization", [None, "", "Bearer", "Bearer wrong", "Basic a-token-of-a-run-0123456789", "Bearer é"]
)
@pytest.mark.parametrize("path", ["/models", "/nowhere"])
def test_nothing_is_told_without_the_runs_token(client: Any, authorization: str | None, path: str) -> None:
    headers = {} if authorization is None else {"Authorization": authorization}
    status, answer = client.get(path, headers=headers)
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


def test_another_name_for_this_address_is_refused(client: Any) -> None:
    """A page whose name resolves to the loopback address cannot use a browser against the endpoint."""
    status, answer = client.get("/models", headers={**client.headers, "Host": "evil.example"})
    assert (status, "evil.example" in answer["error"]["message"]) == (403, True)


def test_it_listens_on_the_loopback_address_only(client: Any) -> None:
    port = int(client.url.split(":")[2].split("/")[0])
    listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]


def test_a_large_body_is_refused(serve: Any) -> None:
    _, client = serve(max_body_bytes=2000)
    status, answer = client.post("/completions", {"prompt": "1" * 3000})
    assert (status, answer["error"]["message"]) == (413, "the body is too large; allowed: 2000 bytes")
    assert client.post("/completions", {"prompt": "1", "max_tokens": 1})[0] == 200


def test_requests_above_the_limit_are_turned_away_until_there_is_room(serve: Any, engine: Any) -> None:
    _, client = serve(max_requests=2)
    engine.pause()

    async def work() -> tuple[list[Any], tuple[int, Any]]:
        first = [asyncio.create_task(client.send("POST", "/completions", json=LONG)) for _ in range(2)]
        try:
            await wait_until(lambda: engine.gauges()["waiting"] == 2)
            refused = await client.send("POST", "/completions", json=LONG)
        finally:
            engine.resume()
        return list(await asyncio.gather(*first)), refused

    served, refused = client.run(work())
    assert (refused[0], refused[1]["error"]["code"]) == (429, "rate_limit_exceeded")
    assert [status for status, _ in served] == [200, 200]
    assert client.post("/completions", LONG)[0] == 200


def test_a_client_that_hangs_up_frees_its_place(client: Any, engine: Any) -> None:
    before = engine.gauges()["tokens"]

    async def work() -> None:
        task = asyncio.create_task(client.send("POST", "/completions", json={**LONG, "n": 16}))
        await wait_until(lambda: engine.gauges()["tokens"] > before)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await wait_until(lambda: engine.gauges()["running"] == 0)

    client.run(work())
    assert engine.gauges()["tokens"] - before < 16 * 120, "it was not simply finished"


def test_stop_answers_requests_under_way_and_leaves_no_thread_and_no_port(
    serve: Any, engine: Any, held_up: Any
) -> None:
    endpoint, client = serve()
    port = int(client.url.split(":")[2].split("/")[0])
    engine.pause()

    async def work() -> list[Any]:
        tasks = [asyncio.create_task(client.send("POST", "/completions", json=LONG)) for _ in range(3)]
        await wait_until(lambda: engine.gauges()["waiting"] == 3)
        began = time.monotonic()
        await asyncio.to_thread(endpoint.stop)
        assert time.monotonic() - began < 3 + held_up(), "it waits for no completion"
        return list(await asyncio.gather(*tasks))

    try:
        answers = client.run(work())
    finally:
        engine.resume()
    assert [(status, body["error"]["type"]) for status, body in answers] == [(503, "server_error")] * 3
    assert "agents-endpoint" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=60)
    endpoint.stop()
    deadline = time.monotonic() + 10
    while engine.gauges()["waiting"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.gauges()["waiting"] == 0, "their completions were aborted"


def test_two_endpoints_never_share_a_port_and_a_short_token_is_refused(serve: Any, engine: Any, tokenizer: Any) -> None:
    assert len({serve()[1].url for _ in range(8)}) == 8
    with pytest.raises(ValueError, match="16 ASCII characters or more"):
        Endpoint(engine, tokenizer, EndpointSettings(token="short", model="tiny"))


def test_a_client_of_another_protocol_does_not_stop_it(client: Any) -> None:
    port = int(client.url.split(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(b"\x16\x03\x01\x02 this is no HTTP\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.")
    assert client.get("/models")[0] == 200
