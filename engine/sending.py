"""An answer is worked on as long as its client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def while_there(answering: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Answer until that is done, or until the client goes: then it is cancelled. A connection that breaks meanwhile is no error."""
    work = asyncio.ensure_future(answering)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    except OSError:  # the connection broke while we wrote
        pass
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
