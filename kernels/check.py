"""`python -m kernels.check`: compile every kernel that is launched for an H100, without one, and read what it needs.

Every kernel and every configuration that tuning may choose is compiled to sm_90 machine code; the table shows registers,
shared memory and spilled bytes. A spill, a matrix product in half precision without wgmma, or more registers or shared
memory than the device has is a failure, since it would be slow (or not launch) without a word.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.choice import INTERPRETED

OPERATIONS = ("bucketed_auc", "embedding", "interval_attention")
"""Packages here whose `triton_op` has `launched()`."""
# CUDA C++ Programming Guide, compute capability 9.0: registers a thread and a multiprocessor, shared memory a block.
_REGISTERS_A_THREAD, _REGISTERS = 255, 65_536
_SHARED_BYTES = 227 * 1024
_WARP = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What one compilation needs."""

    operation: str
    kernel: str
    label: str
    registers: int
    """A thread."""
    shared_bytes: int
    """A block."""
    spilled_bytes: int
    """A thread's registers that lie in memory."""
    wgmma: bool
    faults: tuple[str, ...]


def compile_all(
    operations: Sequence[str] = OPERATIONS, *, one_each: bool = False, workers: int | None = None
) -> list[Compiled]:
    """Compile every launched variant of the operations for sm_90.

    Args:
        operations: Some of `OPERATIONS`.
        one_each: Only the first variant of each kernel.
        workers: Processes; None: one a core.

    Raises:
        RuntimeError: Triton interprets kernels in this process, so cannot compile them.
    """
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1 keeps Triton from compiling; unset it for python -m kernels.check")
    work = [(name, number) for name in operations for number in _numbers(name, one_each=one_each)]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(_compile, work))


def _numbers(operation: str, *, one_each: bool) -> list[int]:
    names = [variant.kernel.__name__ for variant in _launched(operation)]
    return [number for number, name in enumerate(names) if not one_each or name not in names[:number]]


def _launched(operation: str) -> list[Any]:
    return list(importlib.import_module(f"kernels.{operation}.triton_op").launched())


def _compile(work: tuple[str, int]) -> Compiled:
    """Compile one variant, found by number: kernels cannot be sent to a process."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    operation, number = work
    variant = _launched(operation)[number]
    signature = {**variant.signature, **dict.fromkeys(variant.constants, "constexpr")}
    names = variant.kernel.arg_names
    source = ASTSource(
        variant.kernel,
        signature={n: signature[n] for n in names},
        constexprs={n: variant.constants[n] for n in names if n in variant.constants},
        attrs={(place,): [["tt.divisibility", 16]] for place, n in enumerate(names) if n in variant.aligned},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION")  # Triton's advice about a later default
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, spilled = _resources(made.asm["cubin"])
    shared, wgmma = int(made.metadata.shared), "wgmma.mma_async" in made.asm["ptx"]
    return Compiled(
        operation=operation,
        kernel=variant.kernel.__name__,
        label=variant.label,
        registers=registers,
        shared_bytes=shared,
        spilled_bytes=spilled,
        wgmma=wgmma,
        faults=tuple(_faults(registers, spilled, shared, variant.num_warps, wgmma=wgmma or not variant.half_dot)),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and local-memory bytes of a thread, as the cuobjdump that comes with Triton reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump said nothing about registers: {done.stdout!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _faults(registers: int, spilled: int, shared: int, num_warps: int, *, wgmma: bool) -> Iterator[str]:
    if spilled:
        yield f"{spilled} bytes of registers spilled"
    if registers > _REGISTERS_A_THREAD or registers * num_warps * _WARP > _REGISTERS:
        yield f"{registers} registers a thread of {num_warps} warps are over budget"
    if shared > _SHARED_BYTES:
        yield f"{shared} bytes of shared memory are over {_SHARED_BYTES}"
    if not wgmma:
        yield "half-precision product without wgmma"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print, and return 1 if anything is at fault, else 0."""
    parser = argparse.ArgumentParser(prog="python -m kernels.check", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=OPERATIONS, default=OPERATIONS, help="some of the operations")
    parser.add_argument("--one-each", action="store_true", help="one compilation of each kernel: a minute less")
    parser.add_argument("--json", action="store_true", help="print exactly one object on stdout")
    options = parser.parse_args(arguments)
    if INTERPRETED:
        parser.error("TRITON_INTERPRET=1 keeps Triton from compiling; unset it for this command")
    found = compile_all(options.only, one_each=options.one_each)
    at_fault = [one for one in found if one.faults]
    if options.json:
        print(json.dumps({"target": "sm_90", "kernels": [asdict(one) for one in found], "faults": len(at_fault)}))
        return bool(at_fault)
    wide = max(len(one.label) for one in found)
    print(f"{'operation':18} {'kernel':28} {'configuration':{wide}} {'regs':>4} {'shared':>7} {'spilled':>7} wgmma")
    for one in found:
        print(
            f"{one.operation:18} {one.kernel:28} {one.label:{wide}} {one.registers:4d} {one.shared_bytes:7d} "
            f"{one.spilled_bytes:7d} {'yes' if one.wgmma else '-'}{'  FAULT: ' if one.faults else ''}{'; '.join(one.faults)}"
        )
    print(f"{len(found)} compilations for sm_90, {len(at_fault)} at fault")
    return bool(at_fault)


if __name__ == "__main__":
    sys.exit(main())
