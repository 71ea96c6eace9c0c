"""Every kernel compiles for an H100 with no GPU, within its registers and shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import check

ROOT = Path(__file__).parents[2]


def test_every_kernel_compiles_for_sm_90_without_a_fault() -> None:
    """One configuration each; `make check` compiles all. Half-precision products become wgmma, nothing spills."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.check", "--one-each", "--json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["target"] == "sm_90"
    assert {one["operation"] for one in found["kernels"]} == set(check.OPERATIONS)
    assert all(one["registers"] > 0 and one["spilled_bytes"] == 0 for one in found["kernels"])
    assert any(one["wgmma"] for one in found["kernels"] if one["operation"] == "interval_attention")


@pytest.mark.parametrize(
    ("needs", "fault"),
    [
        ({"spilled": 8}, "8 bytes of registers spilled"),
        ({"registers": 160, "num_warps": 16}, "160 registers a thread of 16 warps"),
        ({"shared": 240_000}, "240000 bytes of shared memory"),
        ({"wgmma": False}, "without wgmma"),
    ],
)
def test_what_would_be_slow_or_not_launch_is_a_fault(needs: dict[str, int], fault: str) -> None:
    """Each budget of the device is one fault that names the figure."""
    fine = {"registers": 128, "spilled": 0, "shared": 100_000, "num_warps": 8, "wgmma": True}
    assert not list(check._faults(**fine))  # type: ignore[arg-type]

    found = list(check._faults(**{**fine, **needs}))  # type: ignore[arg-type]

    assert len(found) == 1
    assert fault in found[0]


def test_it_refuses_to_compile_where_triton_interprets() -> None:
    """The tests' own process interprets: said by name, not a compiler's trace."""
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 keeps Triton from compiling"):
        check.compile_all()
