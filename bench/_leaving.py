"""A benchmark that is interrupted ends with 130 and says nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130


def leave_with(main: Callable[[], int | None]) -> NoReturn:
    """This process ends with what ``main`` returns."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
