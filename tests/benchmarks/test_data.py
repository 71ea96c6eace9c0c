"""The data benchmark: children that tell their peak, packs of the presets, a loader that reads every byte, the object."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import _loading, _packing, _segments, data
from benchmarks._child import measure
from gr_core.data.batches import PackReader
from gr_core.data.packfile import PACK_FILE
from gr_core.schema import pack_schema


def test_a_child_tells_its_result_and_its_own_peak(tmp_path: Path) -> None:
    """Arguments arrive, the result comes back, time is the function's own, the peak that of a process with libraries."""
    arguments = {"preset": "ads", "num_tokens": 2000, "token_budget": 2048}
    found = measure("benchmarks._packing:pack", **arguments, out=str(tmp_path / "there"))
    here = _packing.pack(**arguments, out=str(tmp_path / "here"))

    assert found.result["num_tokens"] == here["num_tokens"]
    assert 0 < found.result["seconds"] < found.seconds
    assert found.cpu_seconds > 0
    assert 30 * 2**20 < found.peak_bytes < 2**30


def test_a_failing_child_is_told_with_its_error(tmp_path: Path) -> None:
    """What the child says last stands in the error."""
    with pytest.raises(RuntimeError, match="KeyError: 'no preset'"):
        measure("benchmarks._packing:pack", preset="no preset", num_tokens=9, token_budget=600, out=str(tmp_path))


@pytest.mark.parametrize("preset", _packing.PRESETS)
def test_packs_have_the_wanted_tokens_and_see_their_history(tmp_path: Path, preset: str) -> None:
    """About the wanted number of tokens, all of them packed; the last token of a segment sees all of its history."""
    source = _segments.source_of(preset, 100_000)
    told = _packing.pack(preset, 100_000, 8192, str(tmp_path))
    batches = list(PackReader(tmp_path))
    lengths = np.concatenate([np.diff(batch.segment_starts) for batch in batches])

    assert told["num_tokens"] == int(source.lengths.sum()) == pytest.approx(100_000, rel=0.02)
    assert sorted(lengths) == sorted(source.lengths)
    assert told["unused_budget_fraction"] < 0.1
    assert told["seconds"] > 0
    for batch in batches:
        last = batch.segment_starts[1:] - 1
        history = np.maximum(np.diff(batch.segment_starts) - _segments.SESSION, 0)
        assert np.array_equal(batch.hi.numpy()[last] - batch.segment_starts[:-1], history)
        assert np.array_equal(batch.lo.numpy()[last], np.minimum(batch.segment_starts[:-1], batch.hi.numpy()[last]))


@pytest.mark.parametrize("cold", [False, True])
def test_the_loader_sums_every_byte(tmp_path: Path, cold: bool) -> None:  # noqa: FBT001
    """Each column of the schema once, in its type; the sum is that of the plain reader; and time was measured."""
    _packing.pack("feed", 50_000, 8192, str(tmp_path / "pack"))
    reader = PackReader(tmp_path / "pack")
    batches = list(reader)
    expected = sum(float(c.sum(dtype=c.dtype)) for batch in batches for c in _loading.columns_of(batch))
    kinds = pack_schema(reader.features)

    found = _loading.read(str(tmp_path / "pack"), cold)
    plain = _loading.read_bytes(str(tmp_path / "pack"), cold)

    assert sorted(c.element_size() for c in _loading.columns_of(batches[0])) == sorted(f.type.byte_width for f in kinds)
    assert found["sum"] == expected
    assert found["tokens_per_second_and_core"] > 0
    assert plain["tokens_per_second"] > 0
    if cold:
        assert plain["sum"] == (tmp_path / "pack" / PACK_FILE).stat().st_size


def test_the_object_has_the_contracts_shape(capsys: pytest.CaptureFixture[str]) -> None:
    """One object on stdout: figures with four keys, conditions; --quick never misses."""
    status = data.main(["--quick", "--only", "packing", "--json"])
    printed = json.loads(capsys.readouterr().out)

    assert status == 0
    assert list(printed) == ["figures", "conditions"]
    names = set(printed["figures"])
    assert {name for name in names if name.startswith("packing/")} == {
        f"packing/{preset}/{figure}"
        for preset in _packing.PRESETS
        for figure in ("unused_budget_fraction", "tokens_per_second_and_core")
    }
    assert {"padding/ads/padded/sorted", "padding/feed/packed/none"} <= names
    assert all(list(figure) == ["value", "goal", "baseline", "unit"] for figure in printed["figures"].values())
    assert printed["conditions"]["packing/ads"]["peak_bytes"] > 10**7
