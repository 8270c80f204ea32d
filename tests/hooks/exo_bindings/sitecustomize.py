"""What EXO needs of mlx where models run on the CPU: two things that a GPU gives by itself.

- mlx waits for the other ranks of a ring without giving up the GIL; what a runner has said before must be sent by then.
- Collectives run on the CPU, those of a model on the CPU on the stream that computes it. Two streams would mix on one
  ring what EXO and the model send; on a GPU all collectives share the default CPU stream.
"""

import sys
import time

UTILS = "exo.worker.engines.mlx.utils_mlx"


class Before:
    """Changes mlx before EXO's runner uses it."""

    done = False

    def find_spec(self, name, path, target=None):
        if name.startswith(("mlx_lm", "exo.worker.engines.mlx")) and not self.done:
            self.done = True
            import mlx.core as mx

            start = mx.distributed.init

            def init(*given, **named):
                time.sleep(0.5)
                return start(*given, **named)

            mx.distributed.init = init
            for maker in ("new_stream", "new_thread_local_stream"):
                if hasattr(mx, maker):
                    setattr(mx, maker, mx.default_stream)


sys.meta_path.insert(0, Before())
