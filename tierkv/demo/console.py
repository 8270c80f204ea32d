"""``tierkv tui`` on this terminal while the demonstration works behind it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping

from tierkv.demo.processes import end_with_parent
from tierkv.demo.progress import Progress
from tierkv.demo.watcher import Watcher

_GRACE_S = 5.0


@contextlib.contextmanager
def console_beside(environment: Mapping[str, str], progress: Progress, watcher: Watcher) -> Iterator[None]:
    """The console is open from the start of the block until the person leaves it, or the block fails.

    ``progress`` is hidden meanwhile. The end of the block waits for the person.
    """
    progress.hide()
    console = subprocess.Popen(
        [sys.executable, "-m", "tierkv.cli.main", "tui"], env=dict(environment), preexec_fn=end_with_parent
    )
    watcher.add(console.pid)
    back = threading.Thread(target=lambda: (console.wait(), progress.show()), daemon=True)
    back.start()
    try:
        yield
        console.wait()
    finally:
        console.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            console.wait(_GRACE_S)
        console.kill()
        back.join()
        watcher.discard(console.pid)
