"""What all Triton kernels share: where they run, how they are tuned, and which compilations of them are launched.

A module that imports this one needs Triton; `kernels.choice` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import triton

from kernels.choice import INTERPRETED


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One compilation of a kernel that is launched somewhere: `kernels.check` compiles each for an H100."""

    label: str
    """What tells it apart from the kernel's other ones: dtype, head dim, blocks."""
    kernel: Any
    """The @triton.jit function."""
    signature: Mapping[str, str]
    """Triton type of every parameter that is not constant: "*bf16", "*i64", "i32", "fp32"."""
    constants: Mapping[str, Any]
    """Value of every tl.constexpr parameter."""
    num_warps: int
    num_stages: int
    half_dot: bool = False
    """Whether it multiplies matrices in half precision, so that its code must have wgmma."""
    aligned: tuple[str, ...] = ()
    """Parameters that are multiples of 16 where it is launched: pointers to whole tensors, strides. Triton specialises on
    it; without it no load is of several entries at once, so none is asynchronous."""


def tuned(configs: Sequence[Any], key: Sequence[str]) -> Callable[[Any], Any]:
    """Return triton.autotune over configs; interpreted, where nothing can be timed, with the first one alone.

    Only for kernels that may run several times on the same arguments: tuning does that.

    Args:
        configs: triton.Config each.
        key: Parameters whose values choose anew.
    """
    decorate: Callable[[Any], Any] = triton.autotune(
        configs=list(configs[:1] if INTERPRETED else configs), key=list(key)
    )
    return decorate


def variants(
    kernel: Any,
    configs: Iterable[Any],
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    label: str,
    half_dot: bool = False,
    aligned: tuple[str, ...] = (),
) -> Iterator[Variant]:
    """Yield the compilations of a kernel over its configs, for one signature.

    Args:
        kernel: The @triton.jit function, or what `tuned` made of it.
        configs: triton.Config each; their kwargs are constants, too.
        signature: See Variant.
        constants: Constants that no config sets.
        label: Of the signature; the config is added.
        half_dot: See Variant.
        aligned: See Variant.
    """
    for config in configs:
        blocks = " ".join(f"{name}={value}" for name, value in config.kwargs.items())
        yield Variant(
            label=f"{label} {blocks} w{config.num_warps} s{config.num_stages}",
            kernel=kernel.fn if isinstance(kernel, triton.runtime.Autotuner) else kernel,
            signature=signature,
            constants={**constants, **config.kwargs},
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            half_dot=half_dot,
            aligned=aligned,
        )
