"""``tierkv demo``: a real model's prompt goes cold, hot, evicted and restored, on this machine alone."""
