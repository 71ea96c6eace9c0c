"""The disk cache of compiled kernels: shared by processes at once, warm for the next one."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from gr_core.environment import child_variables

# one kernel: what a C++ compiler takes for more of them is no part of the question
CHILD = """
import json, time, torch
from types import SimpleNamespace
from gr_core.model.blocks import Block
from gr_core.model.execution import Execution, graphs
from gr_core.model.settings import ModelConfig

torch.manual_seed(0)
block = Block(ModelConfig(width=16, num_heads=2), top=True)
Execution(compile="blocks").apply(SimpleNamespace(blocks=[block], parameters=block.parameters))
began = time.perf_counter()
with torch.no_grad():
    out = block.regions[1](block, torch.ones(53, 16), torch.ones(53, 2, 8))
print(json.dumps({**graphs(), "seconds": time.perf_counter() - began, "sum": float(out.sum())}))
"""


def compile_into(cache):
    """Compile one region into a cache, in a process of its own; return its object."""
    # no pool of compiling processes: starting one takes longer than what it would save here
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**child_variables(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_processes_share_a_cold_cache_and_the_next_one_starts_warm(tmp_path):
    """Two processes compile into one empty cache at once and agree; a third compiles nothing and is faster."""
    cache = tmp_path / "compiled"
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(compile_into, [cache, cache])
    warm = compile_into(cache)

    assert first["graphs"] == second["graphs"] == warm["graphs"] == 1
    assert first["sum"] == second["sum"] == warm["sum"]
    assert first["cache_miss"] + second["cache_miss"] >= 1
    assert (warm["cache_hit"], warm["cache_miss"]) == (1, 0)
    assert warm["seconds"] < max(first["seconds"], second["seconds"])
    assert list(cache.iterdir())
