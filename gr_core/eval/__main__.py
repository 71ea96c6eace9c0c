"""`python -m gr_core.eval RUN.json`: score each checkpoint of a running training on its holdout pack.

Start it beside `python -m gr_core.train RUN.json`, in any order; it ends when the final checkpoint is scored. Stdout: one
JSON object a line (gr_core.eval.watching). Stderr: logs. Exit: 0 the final checkpoint was scored, 1 not, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gr_core.errors import DaybreakError

ENDED = "training ended"
"""What the parent process writes, as a line, when training has ended well."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Score the checkpoints of what RUN.json trains and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gr_core.eval", description="Score checkpoints beside a training.")
    parser.add_argument("run", type=Path, help="RUN.json, with packs.holdout")
    parser.add_argument(
        "--exit-with-stdin",
        action="store_true",
        help=f"end when stdin closes: with the parent process, which says {ENDED!r} when that is so",
    )
    options = parser.parse_args(arguments)
    ended = threading.Event()
    if options.exit_with_stdin:
        threading.Thread(target=_follow_stdin, args=(ended,), daemon=True).start()
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read by OpenMP when torch is loaded; see gr_core.train
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    from gr_core.eval.watching import Watcher, is_finished, open_results, read_watch

    _give_way(options.run)  # only now: training's own process imports meanwhile, and the first checkpoint comes soon
    try:
        watch = read_watch(options.run)
        write = open_results(watch.run.output)

        def say(line: dict[str, Any]) -> None:
            write(line)
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()

        watcher = Watcher(watch, say)
        say({"event": "started"})
        watcher.warm_up()

        def finished(seconds: float) -> bool:
            time.sleep(seconds)
            return is_finished(watch.run)

        return 0 if watcher.follow(ended.wait if options.exit_with_stdin else finished) else 1
    except DaybreakError as error:
        logging.getLogger(__name__).error("%s", error.message)
        return error.exit_code


def _follow_stdin(ended: threading.Event) -> None:
    """Set the event when the parent says so; when its end of the pipe closes, end at once: it is gone, or gave up."""
    for line in sys.stdin:
        if line.strip() == ENDED:
            ended.set()
    os._exit(1)


def _give_way(run: Path) -> None:
    """Lower this process's priority by `evaluation.niceness`."""
    try:
        settings = json.loads(run.read_text(encoding="utf-8")).get("evaluation") or {}
        os.nice(int(settings.get("niceness", 0)))
    except (OSError, ValueError, AttributeError, TypeError):
        return  # not allowed to, or no RUN.json: read_watch says which


if __name__ == "__main__":
    sys.exit(main())
