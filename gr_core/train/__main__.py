"""`python -m gr_core.train RUN.json`: train one night from packs, by hand exactly as from Prefect.

Stdout: one JSON object a line (progress, then done or error). Stderr: logs. Exit: 0 done, 1 failed, 2 bad input. Where
`train.distributed` asks for several ranks it becomes torchrun on this machine, whose exit is 1 for bad input too; over
several machines start it under torchrun.
`--attribute N` measures N steps instead and saves nothing: one object, event attribution. `--trace FILE` records two steps.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gr_core.errors import DaybreakError
from gr_core.train import launch

if TYPE_CHECKING:
    from gr_core.train.run import Run


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what RUN.json describes and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gr_core.train", description="Train one night from packs.")
    parser.add_argument("run", type=Path, help="RUN.json: packs, vocabulary, parent, output, config")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when stdin closes: with the parent process")
    parser.add_argument("--attribute", type=int, metavar="N", help="measure N steps, save nothing")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="record two steps for chrome://tracing")
    options = parser.parse_args(arguments)
    if options.attribute is not None and options.attribute < 1:
        parser.error(f"--attribute takes a number of steps from 1 on, got {options.attribute}")
    given = list(sys.argv[1:] if arguments is None else arguments)
    if launch.ranks_asked(options.run) > 1 and not launch.is_launched():
        torchrun = launch.command(options.run, given)
        os.execv(torchrun[0], torchrun)  # its ranks inherit stdin, stdout and stderr
    if options.exit_with_stdin:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    # Read by OpenMP when torch is loaded. Spinning threads on a busy machine cost a factor of 14: 4,350 tokens/s
    # instead of 63,800 on two cores with a load of 4.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    level = logging.INFO if launch.is_first() else logging.WARNING
    logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(name)s %(message)s")
    from gr_core.train.loop import train
    from gr_core.train.run import read_run

    try:
        run = read_run(options.run)
        if options.attribute is not None:
            return _attribute(run, options)
        state = train(run, _say, trace=options.trace)
    except DaybreakError as error:
        logging.getLogger(__name__).error("%s", error.message)
        _say({"event": "error", "type": type(error).__name__, "message": error.message, "where": error.where})
        return error.exit_code
    except Exception as error:
        logging.getLogger(__name__).exception("training failed")
        _say({"event": "error", "type": type(error).__name__, "message": str(error), "where": str(options.run)})
        return 1
    if state:  # ranks but the first have none
        _say({"event": "done", "checkpoint": str(run.output), "digest": state["digest"], "step": state["step"]})
    return 0


def _attribute(run: Run, options: argparse.Namespace) -> int:
    from gr_core.train.measuring import attribute

    found = attribute(run, options.attribute, options.trace)
    if found:
        _say({"event": "attribution", **found})
    return 0


def _exit_with_stdin() -> None:
    """Wait for the parent's end of the pipe to close, then end at once; a checkpoint is atomic, so nothing is half."""
    sys.stdin.read()
    os._exit(1)


def _say(line: dict[str, Any]) -> None:
    """Print one line. Of several ranks the first speaks; an error is told by whichever met it, so perhaps by all."""
    if not launch.is_first() and line["event"] != "error":
        return
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
