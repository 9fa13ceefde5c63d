"""The process of one engine, started by a nursery: `python -m pekoe.pipeline.rollout.child.host PARENT STREAM BUCKET…`.

It dies with the nursery by the kernel's word, and with the rank by the end of the stream: it ends all that its engine
has started and itself. Nothing heavy is imported before that is arranged.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys

from pekoe.pipeline.child_processes import ignore_job_signals
from pekoe.pipeline.observe.stacks import answer_signal
from pekoe.pipeline.process_tree import be_first_out_of_memory, die_with_parent

OUT_OF_MEMORY_SCORE = 500
"""After reward workers, before ranks: a lost engine is built again."""


def main() -> None:
    parent, stream, *buckets = map(int, sys.argv[1:])
    die_with_parent(parent)
    be_first_out_of_memory(OUT_OF_MEMORY_SCORE)
    ignore_job_signals()
    faulthandler.enable()
    answer_signal()
    sys.stdout = sys.stderr
    for descriptor in (stream, *buckets):
        os.set_inheritable(descriptor, False)
    from pekoe.pipeline.rollout.child.engine_host import serve

    serve(socket.socket(fileno=stream), buckets)


if __name__ == "__main__":
    main()
