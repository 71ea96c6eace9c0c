"""Which implementation of an operation runs: a plain rule on the tensor's device, never a silent fallback."""

from __future__ import annotations

import importlib.util
import logging
import os
from typing import Literal

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

Impl = Literal["auto", "reference", "triton"]
Chosen = Literal["reference", "triton"]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton runs kernels in Python on the CPU: for tests. Triton reads it when it is imported."""
_INSTALLED = importlib.util.find_spec("triton") is not None
_logged: set[tuple[str, str, str]] = set()
_preferred: Impl = "auto"


def prefer(impl: Impl) -> None:
    """Say what "auto" means in this process from now on: a run's one switch for all operations; "auto": `choose`'s rule."""
    global _preferred  # noqa: PLW0603 -- one process trains one run
    _preferred = impl


def choose(operation: str, impl: Impl, tensor: Tensor) -> Chosen:
    """Return what runs an operation on a tensor's device.

    Args:
        operation: Its name, for the log and for errors.
        impl: "auto" is what `prefer` said, else Triton on CUDA and the reference elsewhere; the others are what they say.
        tensor: Where the work is.

    Raises:
        ValueError: Another impl.
        RuntimeError: Triton, asked for or due on CUDA, cannot run there; says why and what to do.
    """
    if impl not in ("auto", "reference", "triton"):
        raise ValueError(f"impl of {operation} must be auto, reference or triton, got {impl!r}")
    if impl == "auto":
        impl = _preferred
    chosen: Chosen = "triton" if impl == "triton" or (impl == "auto" and tensor.is_cuda) else "reference"
    if chosen == "triton":
        reason = _why_not(tensor.device.type)
        if reason is not None:
            raise RuntimeError(f"the Triton kernel of {operation} cannot run: {reason}")
    if not torch.compiler.is_compiling():  # a graph with logging in it is no whole one
        _log(operation, chosen, tensor.device.type)
    return chosen


def _why_not(device: str) -> str | None:
    if not _INSTALLED:
        return "Triton is not installed; pip install triton, or ask for impl = 'reference'"
    if device != "cuda" and not INTERPRETED:
        return (
            f"the tensors are on {device}; move them to a CUDA device, ask for impl = 'reference', or set "
            "TRITON_INTERPRET=1 before Python starts to test it"
        )
    return None


def _log(operation: str, chosen: Chosen, device: str) -> None:
    """Log a choice once."""
    if (operation, chosen, device) not in _logged:
        _logged.add((operation, chosen, device))
        logger.info("%s on %s: %s", operation, device, chosen)
