"""Block sizes of the embedding kernels, and the compilations of them that `kernels.check` tries.

Blocks follow from the width alone: an update in place cannot be tuned by running it, and a lookup is bound by memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import triton

from kernels._triton import Variant
from kernels.embedding import triton_kernels as kernels
from kernels.embedding.checks import MAX_WIDTH

CHUNK = 64
"""Entries of a run that one lane adds up alone."""
BLOCK = 1024
"""Entries a program of the kernels over entries."""
WARPS = 4
_TILE = 1024  # numbers a program holds, 8 a thread: with twice as many, registers spill where addresses are not aligned
_USUAL = 64
_WIDTHS = (16, _USUAL, 100, MAX_WIDTH)
"""Smallest block, usual, not a power of two, largest: between them only the shape of a tile differs, not its size. What
changes types alone, not tiles, is compiled at the usual one."""
_SCALARS = {"num_rows": "i32", "num_bags": "i32", "num_features": "i32", "num_entries": "i32", "num_out": "i32"}
_SCALARS |= {"bag_rows": "i32", "feature_rows": "i32", "lr": "fp32", "eps": "fp32", "seed": "i32"}
_POINTERS = {"tables": "*i64", "fallback_of": "*i64", "rows": "*i64", "order": "*i64", "accumulator": "*fp32"}
_POINTERS |= {"run": "*i32", "start": "*i32", "count": "*i32", "scratch": "*fp32", "keys": "*i32", "ids": "*i64"}
_WIDE = {"keys": "*i64", "num_rows": "i64"}  # 2^31 rows and more


def block_width(width: int) -> int:
    """Return the columns of a tile: the least power of two that holds a row, 16 at least."""
    return max(16, triton.next_power_of_2(width))


def lanes_of(width: int) -> int:
    """Return how many rows a program takes."""
    return max(1, min(CHUNK, _TILE // block_width(width)))


def warps_of(width: int) -> int:
    """Return a program's warps: 8 numbers a thread where a row is longer than a tile."""
    return max(WARPS, block_width(width) // 256)


def launched() -> Iterator[Variant]:
    """Yield what is launched: every dtype and mode, at widths that stand for all."""
    for width in _WIDTHS:
        for variant in itertools.chain(_lookups(width), _updates(width), _runs(width)):
            yield variant
            if width == _USUAL:  # a slice of a weight begins anywhere
                yield replace(variant, aligned=(), label=f"{variant.label} unaligned")
    for ids, tables in itertools.product(("*i32", "*i64"), (False, True)):
        types, label = {"ids": ids}, f"{ids[1:]}{' tables' if tables else ''}"
        yield _variant(kernels.keys_kernel, label, types, {"HAS_TABLES": tables, "BLOCK": BLOCK})
    for types in ({}, _WIDE):
        yield _variant(kernels.starts_kernel, types.get("keys", "*i32")[1:], types, {"BLOCK": BLOCK})


def _lookups(width: int) -> Iterator[Variant]:
    for source, out, concatenate in itertools.product(("*bf16", "*fp32"), ("*bf16", "*fp32"), (False, True)):
        for ids, tables in (("*i64", False), ("*i32", True), ("*i64", True))[: 3 if width == _USUAL else 2]:
            constants = {"CONCATENATE": concatenate, "HAS_TABLES": tables}
            how = ("side by side" if concatenate else "summed") + (" tables" if tables else "")
            label = f"D={width} {source[1:]} {ids[1:]} -> {out[1:]} {how}"
            types = {"weight": source, "out": out, "ids": ids}
            yield _variant(kernels.lookup_kernel, label, types, {**constants, **_tile(width, "BLOCK_B")})


def _updates(width: int) -> Iterator[Variant]:
    for weight, grad in itertools.product(("*bf16", "*fp32"), repeat=2):
        for stochastic in (False, True) if weight == "*bf16" else (False,):
            label = f"D={width} {grad[1:]} -> {weight[1:]}{' stochastic' if stochastic else ''}"
            constants = {"STOCHASTIC": stochastic, **_tile(width, "BLOCK_U")}
            yield _variant(kernels.adagrad_kernel, label, {"weight": weight, "grad": grad}, constants)


def _runs(width: int) -> Iterator[Variant]:
    dense, merged, update = (int(mode.value) for mode in (kernels.DENSE, kernels.MERGED, kernels.UPDATE))
    modes = [(dense, "dense", "*fp32"), (dense, "dense", "*bf16"), (merged, "merged", "*fp32")]
    modes += [(update, "update", "*fp32"), (update, "update", "*bf16"), (update, "stochastic", "*bf16")]
    for grad, wide in itertools.product(("*bf16", "*fp32"), ({}, _WIDE) if width == _USUAL else ({},)):
        types = {"grad": grad, **wide}
        label = f"D={width} {grad[1:]} {types.get('keys', '*i32')[1:]}"
        constants = {"CHUNK": CHUNK, **_tile(width, "BLOCK_E")}
        yield _variant(kernels.long_pieces_kernel, label, types, constants)
        for mode, name, out in modes:
            own = f"{label} -> {out[1:]} {name}"
            shared = {"MODE": mode, "STOCHASTIC": name == "stochastic", "CHUNK": CHUNK}
            for kernel, lanes in ((kernels.short_runs_kernel, "BLOCK_U"), (kernels.long_runs_kernel, "BLOCK_E")):
                yield _variant(kernel, own, {**types, "out": out}, {**shared, **_tile(width, lanes)})


def _tile(width: int, lanes: str) -> dict[str, Any]:
    return {"WIDTH": width, lanes: lanes_of(width), "BLOCK_D": block_width(width)}


def _variant(kernel: Any, label: str, types: Mapping[str, str], constants: Mapping[str, Any]) -> Variant:
    known = {**_SCALARS, **_POINTERS, **types}
    signature = {name: known[name] for name in kernel.arg_names if name not in constants}
    return Variant(
        label=label,
        kernel=kernel,
        signature=signature,
        constants=constants,
        num_warps=warps_of(constants.get("WIDTH", 1)),
        num_stages=3,
        aligned=tuple(name for name, kind in signature.items() if kind.startswith("*")),
    )
