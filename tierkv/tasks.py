"""Tasks that end with the block that they are for.

``asyncio.TaskGroup`` would do, but up to Python 3.12 a cancellation from outside is lost when one of its tasks fails in
the same moment (and ``asyncio.wait_for`` loses one when what it waits for comes then): what was to end goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any


@contextlib.asynccontextmanager
async def ended(tasks: Sequence[asyncio.Task[Any]]) -> AsyncGenerator[None]:
    """Whatever ends the body, none of ``tasks`` runs on. Their errors are the body's to look at."""
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
