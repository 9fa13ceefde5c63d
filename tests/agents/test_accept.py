"""More clients than file descriptors: they wait, they are all served, and the process can still open its own files."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pekoe.pipeline.agents.accept import accept_forever, connection_limit

CLIENTS = """
import asyncio, resource, sys

async def ask(port, text):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text.encode())
    answer = await reader.read()
    writer.close()
    return answer

async def main(port, count, text):
    async with asyncio.timeout(50):
        answers = await asyncio.gather(*(ask(port, text) for _ in range(count)))
    print(sum(sys.argv[4].encode() in answer for answer in answers))

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
"""


@contextmanager
def open_files(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def ask_at_once(port: int, count: int, text: str, expected: str) -> subprocess.Popen[str]:
    """`count` clients in a process of their own; it prints how many got an answer with `expected`."""
    command = [sys.executable, "-c", CLIENTS, str(port), str(count), text, expected]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def next_file() -> int:
    """The lowest free descriptor."""
    found = os.open(os.devnull, os.O_RDONLY)
    os.close(found)
    return found


def test_two_hundred_requests_with_few_descriptors(serve: Any) -> None:
    limit = next_file() + 64
    with open_files(limit):
        _, client = serve(max_requests=300)
        assert connection_limit(1024) == limit // 4
        port = int(client.url.split(":")[2].split("/")[0])
        body = '{"prompt": "1+", "max_tokens": 4}'
        text = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            f"Authorization: {client.headers['Authorization']}\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        )
        asking = ask_at_once(port, 200, text, "HTTP/1.1 200")
        highest = 0
        while asking.poll() is None:
            highest = max(highest, next_file())
        assert asking.communicate(timeout=60)[0] == "200\n"
        assert highest < limit - 8, "the process always had descriptors left for files of its own"


class Echo(asyncio.Protocol):
    """Sends back what comes, and hangs up."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)
        asyncio.get_running_loop().call_later(0.02, self.transport.close)


def test_no_descriptor_left_is_a_wait_and_not_an_end() -> None:
    """Without any bound but the kernel's."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    listener.setblocking(False)
    started, stopped = threading.Event(), threading.Event()

    async def serve() -> None:
        accepting = asyncio.create_task(accept_forever(listener, Echo, lambda: 0, 1))
        started.set()
        while not stopped.is_set() and not accepting.done():
            await asyncio.sleep(0.01)
        accepting.cancel()
        await asyncio.gather(accepting, return_exceptions=True)
        if not accepting.cancelled():
            accepting.result()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    with listener:
        thread.start()
        assert started.wait(60), "the loop has opened the descriptors that it needs itself"
        free = next_file()
        with open_files(free + 8):
            asking = ask_at_once(listener.getsockname()[1], 40, "hello", "hello")
            answered = asking.communicate(timeout=60)[0]
        stopped.set()
        thread.join(timeout=60)
    assert answered == "40\n"
