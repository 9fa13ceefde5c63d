"""An OpenAI-compatible server on the loopback address, in front of any inference engine.

```
 agent ──HTTP, bearer token──► own thread and loop ──► RequestReader ──► engine.generate × n ──► AnswerWriter ──► agent
          401 403 413 429                           400 404         aborted when the agent hangs up; 503 at stop()
```
It holds no state of an agent's session. A request waits while the engine is paused for new weights, as any other does.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pekoe.pipeline.agents.accept import accept_forever, connection_limit
from pekoe.pipeline.agents.openai_answers import AnswerWriter, error_object, model_list
from pekoe.pipeline.agents.openai_requests import CompletionRequest, RequestError, RequestReader
from pekoe.pipeline.rollout.engine import EngineClosedError, EngineFailedError, GenerationRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from pekoe.pipeline.rollout.engine import InferenceEngine, Response

LOOPBACK = "127.0.0.1"
SHORTEST_TOKEN = 16
STOP_SECONDS = 5.0
"""What the answers to requests under way get to be written in when the endpoint stops."""
IDLE_SECONDS = 10.0
"""A connection that asks for nothing makes room for one that waits."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """What is served, to whom, and how much of it at once."""

    token: str
    """The run's secret: a request without `Authorization: Bearer <token>` is refused."""
    model: str
    """Name under which the engine's model is served."""
    max_new_tokens: int = 512
    """Of a chat that names no number."""
    max_requests: int = 256
    """Requests under way; one more gets 429. OpenAI's client waits and tries again."""
    max_connections: int = 1024
    """Open connections, and never above a quarter of the files that the process may open; more of them wait."""
    max_body_bytes: int = 8 << 20


class Endpoint:
    """`start()` gives the base URL; `stop()` leaves neither thread nor port. `on_failure` is told, once, from the
    endpoint's thread, if it can no longer accept connections."""

    def __init__(
        self, engine: InferenceEngine, tokenizer: PreTrainedTokenizerBase, settings: EndpointSettings,
        on_failure: Callable[[BaseException], None] | None = None,
    ) -> None:  # fmt: skip
        if len(settings.token) < SHORTEST_TOKEN or not settings.token.isascii() or not settings.token.isprintable():
            raise ValueError(
                f"endpoint token: too short or not plain; allowed: {SHORTEST_TOKEN} ASCII characters or more"
            )
        self._engine = engine
        self._settings = settings
        self._on_failure = on_failure
        self._reader = RequestReader(tokenizer, settings.model, settings.max_new_tokens)
        self._writer = AnswerWriter(tokenizer, settings.model)
        self._created = int(time.time())
        self._num_requests = 0
        self._hosts: frozenset[str] = frozenset()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Serves from now on; gives `http://127.0.0.1:PORT/v1`. The port is taken by binding it: no race for it."""
        if self._thread is not None:
            raise RuntimeError("endpoint: start() was called before")
        listener = socket.create_server((LOOPBACK, 0), backlog=min(self._settings.max_connections, 4096))
        listener.setblocking(False)
        port = listener.getsockname()[1]
        self._hosts = frozenset({f"{LOOPBACK}:{port}", f"localhost:{port}"})
        self._thread = threading.Thread(target=self._run, args=(listener,), name="agents-endpoint", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise RuntimeError("endpoint: it could not start") from self._failure
        return f"http://{LOOPBACK}:{port}/v1"

    def stop(self) -> None:
        """Requests under way get 503, their completions are aborted. May be called again."""
        if self._thread is None:
            return
        if self._loop is not None and self._ending is not None and self._thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(self._ending.set)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise
        self._thread.join()

    def _run(self, listener: socket.socket) -> None:
        """The endpoint's thread."""
        try:
            with listener:
                asyncio.run(self._serve(listener))
        except BaseException as error:
            self._failure = error
            if self._ready.is_set() and self._on_failure is not None:
                self._on_failure(error)
        finally:
            self._ready.set()

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._ending = asyncio.Event()
        application = web.Application(middlewares=[self._guard], client_max_size=self._settings.max_body_bytes)
        application.router.add_get("/v1/models", self._models)
        for path, read, write in (
            ("/v1/chat/completions", self._reader.chat, self._writer.chat),
            ("/v1/completions", self._reader.completion, self._writer.completion),
        ):
            application.router.add_post(path, functools.partial(self._complete, read, write))
        runner = web.AppRunner(
            application, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_SECONDS,
            keepalive_timeout=IDLE_SECONDS,
        )  # fmt: skip
        await runner.setup()
        server = runner.server
        assert server is not None
        limit = connection_limit(self._settings.max_connections)
        accepting = asyncio.create_task(accept_forever(listener, server, lambda: len(server.connections), limit))
        ending = asyncio.create_task(self._ending.wait())
        self._ready.set()
        try:
            await asyncio.wait({accepting, ending}, return_when=asyncio.FIRST_COMPLETED)
            failed = accepting.done()
        finally:
            self._ending.set()
            accepting.cancel()
            ending.cancel()
            listener.close()
            await runner.cleanup()
        if failed:
            accepting.result()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Who may ask at all; and every refusal as an error object."""
        if request.host not in self._hosts:
            # A page in a browser reaches this address under a name of its own, if that name resolves to it.
            return _refusal(403, f"Host {request.host!r} is not this endpoint's", "invalid_request_error")
        if not self._is_known(request.headers.get("Authorization", "")):
            message = "Authorization: the run's token is needed, as `Bearer <token>`"
            refusal = _refusal(401, message, "invalid_request_error", code="invalid_api_key")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        try:
            return await handler(request)
        except RequestError as error:
            return _refusal(error.status, str(error), "invalid_request_error", error.field, error.code)
        except web.HTTPRequestEntityTooLarge:
            message = f"the body is too large; allowed: {self._settings.max_body_bytes} bytes"
            return _refusal(413, message, "invalid_request_error")
        except web.HTTPException as error:
            return _refusal(error.status, f"{request.method} {request.path}: {error.reason}", "invalid_request_error")

    def _is_known(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        given = token.strip().encode(errors="surrogateescape")
        return hmac.compare_digest(given, self._settings.token.encode()) and scheme.lower() == "bearer"

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(model_list(self._settings.model, self._created))

    async def _complete(
        self,
        read: Callable[[bytes], CompletionRequest],
        write: Callable[[CompletionRequest, list[Response]], dict[str, Any]],
        request: web.Request,
    ) -> web.Response:
        if self._num_requests >= self._settings.max_requests:
            message = f"{self._num_requests} requests are under way; try again"
            refusal = _refusal(429, message, "rate_limit_error", code="rate_limit_exceeded")
            refusal.headers["Retry-After"] = "1"
            return refusal
        self._num_requests += 1
        try:
            asked = read(await request.read())
            return web.json_response(write(asked, await self._sample(asked)))
        except _EndedError:
            return _refusal(503, "the endpoint is being stopped", "server_error")
        except (EngineFailedError, EngineClosedError) as error:
            return _refusal(503, str(error), "server_error")
        except RequestError:
            raise
        except ValueError as error:
            return _refusal(400, str(error), "invalid_request_error")
        except RuntimeError as error:
            _log.exception("endpoint: a request failed")
            return _refusal(500, f"{type(error).__name__}: {error}", "server_error")
        finally:
            self._num_requests -= 1

    async def _sample(self, asked: CompletionRequest) -> list[Response]:
        """All completions of a request, at once. Whatever ends the wait early aborts those that are not done."""
        assert self._ending is not None
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        tasks = [
            asyncio.ensure_future(
                self._engine.generate(
                    GenerationRequest(prompt, asked.sampling, seed=completion_seed(seed, i, k), sample=k)
                )
            )
            for i, prompt in enumerate(asked.prompts)
            for k in range(asked.n)
        ]
        whole = asyncio.gather(*tasks)
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            waited: set[asyncio.Future[Any]] = {whole, ending}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not whole.done():
                raise _EndedError
            return list(whole.result())
        finally:
            ending.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(whole, *tasks, return_exceptions=True)


class _EndedError(Exception):
    """The endpoint is stopped while the engine computes."""


def completion_seed(seed: int, prompt: int, sample: int) -> int:
    """Seed of one of a request's completions: as the request's seed says, and none like another."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{prompt}/{sample}".encode(), digest_size=8).digest()) >> 1


def _refusal(status: int, message: str, kind: str, field: str | None = None, code: str | None = None) -> web.Response:
    return web.json_response(error_object(message, kind, field, code), status=status, dumps=json.dumps)
