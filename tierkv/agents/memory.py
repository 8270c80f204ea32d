"""How this process gets memory for messages of megabytes."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_BYTES = 64 << 20
_MMAP_BYTES = 32 << 20


def keep_freed_memory() -> bool:
    """Freed buffers of up to 32 MiB are used again instead of going back to the system. True where that can be set.

    By default glibc maps and unmaps every large buffer, and a fresh page costs more than the copy into it: measured
    per GB read from a vault over loopback, server 1.34 -> 1.04 s of CPU, client 1.47 -> 0.86 s, throughput x 1.9. At
    most 64 MiB stay unused with this process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES))
