"""An engine's per-layer cache and named arrays, one into the other; the only place that knows cache classes."""
