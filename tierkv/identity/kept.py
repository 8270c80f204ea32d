"""Small files of facts that can be found again: written whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path


def keep_json(path: Path, document: object) -> None:
    """The file holds ``document``, or what it held before. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(document, file)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
