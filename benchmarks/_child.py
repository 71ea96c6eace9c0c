"""A heavy part in a process of its own: its result, wall and CPU seconds, and its peak memory.

`measure("benchmarks._stages:data_night", root=..., ...)` calls that function with those arguments (JSON values) in
`python -m benchmarks._child`, and reads one JSON object from the last line of its output.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a child did."""

    result: Any
    """What the function returned."""
    seconds: float
    """Wall time of the function, without the start of Python and the module's imports."""
    cpu_seconds: float
    """CPU time of the function, of all threads."""
    peak_bytes: int
    """The child's largest resident set ever (the kernel's VmHWM; pages of mapped files count); 0 where unknown."""


def measure(target: str, *, threads: int | None = None, **arguments: Any) -> Measured:
    """Call a function in a fresh process.

    Args:
        target: module:function.
        threads: POLARS_MAX_THREADS of the child; None: as here.
        arguments: JSON values.

    Raises:
        RuntimeError: The child failed; the message has the end of its output.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    if threads is not None:
        environment["POLARS_MAX_THREADS"] = str(threads)
    command = [sys.executable, "-m", "benchmarks._child", target, "--arguments", json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        end = "\n".join((done.stderr or done.stdout).strip().splitlines()[-15:])
        raise RuntimeError(f"{target} failed with exit code {done.returncode}: {end}")
    return Measured(**json.loads(done.stdout.strip().splitlines()[-1]))


def peak_bytes() -> int:
    """Return this process's largest resident set so far, which includes mapped files; 0 where /proc is not there."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def call(target: str, arguments: Mapping[str, Any]) -> Measured:
    """Call a function in this process."""
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    began, cpu = time.perf_counter(), time.process_time()
    result = function(**arguments)
    return Measured(
        result=result,
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - cpu,
        peak_bytes=peak_bytes(),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Call the named function and print what `Measured` has as one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks._child")
    parser.add_argument("target")
    parser.add_argument("--arguments", default="{}")
    options = parser.parse_args(arguments)
    found = call(options.target, json.loads(options.arguments))
    values = {name: getattr(found, name) for name in Measured.__slots__}
    sys.stdout.write(json.dumps(values) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
