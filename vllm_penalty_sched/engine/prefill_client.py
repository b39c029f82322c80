"""Ask a prefill instance over HTTP, off the engine's thread."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllm_penalty_sched.disaggregation.remote_prefills import (
    Fallback,
    PrefillAnswer,
    PrefillError,
)

if TYPE_CHECKING:
    from aiohttp import ClientSession

# Further questions wait for one of these connections, and their wait counts.
_MOST_CONNECTIONS = 256
_MESSAGE_CHARACTERS = 200


class PrefillClient:
    """Posts completions to one vLLM server from a thread of its own.

    A question that is cancelled closes its connection, by which vLLM knows to stop computing.
    """

    def __init__(
        self, url: str, *, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Set up a client; nothing is sent yet.

        Args:
            url: The server's address.
            timeout_s: Longest wait for an answer.
            clock: Tells when an answer came.
        """
        self._url = f"{url}/v1/completions"
        self._clock = clock
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._session: ClientSession | None = None
        self._thread: threading.Thread | None = None
        # The key that vLLM's own server takes from there: both instances run under the same one.
        key = os.environ.get("VLLM_API_KEY")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def ask(self, body: Mapping[str, object]) -> Future[PrefillAnswer]:
        """Post a body and return at once.

        Returns:
            The answer to come, without ``kv_params`` if the server names none; it fails with a
            PrefillError.
        """
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="penalty-prefill-client", daemon=True
            )
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(self._post(body), self._loop)

    def close(self) -> None:
        """Drop what is under way; nothing can be asked afterwards."""
        if self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        self._thread.join(timeout=2.0)

    async def _post(self, body: Mapping[str, object]) -> PrefillAnswer:
        from aiohttp import ClientConnectorError, ClientError

        try:
            async with asyncio.timeout(self._timeout_s):
                status, content = await self._exchange(body)
        except TimeoutError as error:
            raise PrefillError(Fallback.TIMEOUT, f"no answer in {self._timeout_s} s") from error
        except ClientConnectorError as error:
            raise PrefillError(Fallback.UNREACHABLE, str(error)) from error
        except (ClientError, OSError, ValueError) as error:
            raise PrefillError(Fallback.BROKE_OFF, f"{type(error).__name__}: {error}") from error
        if status != 200:
            cause = Fallback.REFUSED if 400 <= status < 500 else Fallback.BROKE_OFF
            raise PrefillError(cause, f"HTTP {status}: {str(content)[:_MESSAGE_CHARACTERS]}")
        kv_params = content.get("kv_transfer_params") if isinstance(content, dict) else None
        return PrefillAnswer(
            kv_params=kv_params if isinstance(kv_params, dict) else {}, answered_s=self._clock()
        )

    async def _exchange(self, body: Mapping[str, object]) -> tuple[int, Any]:
        if self._session is None:
            self._session = _open_session()
        async with self._session.post(self._url, json=body, headers=self._headers) as response:
            if response.status != 200:
                return response.status, await response.text()
            return response.status, await response.json()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
        self._loop.stop()


def _open_session() -> ClientSession:
    from aiohttp import ClientSession, ClientTimeout, TCPConnector

    # A kept-alive connection may be closed by the server just when it is used again.
    connector = TCPConnector(limit=_MOST_CONNECTIONS, force_close=True)
    return ClientSession(connector=connector, timeout=ClientTimeout(total=None))
