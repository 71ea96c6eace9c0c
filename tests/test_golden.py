"""Golden outputs: what the data stages make of one raw day may change only together with their format number."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa

import tests.tiny as tiny
from gr_core.config import load_config
from gr_core.lake.events import EventTable
from gr_core.night import STAGE_FORMAT, open_night
from gr_core.schema import EVENT_FORMAT, PACK_FORMAT
from gr_core.stages import ingesting, packing, sequencing

GOLDEN = Path(__file__).parent / "golden"
HINT = "an output changed: raise its number in STAGE_FORMAT (or schema.py), then write the new values to expected.json"


def digest(values: Any) -> str:
    """Return a short digest of plain values."""
    return hashlib.sha256(json.dumps(values, default=str).encode()).hexdigest()[:16]


def test_golden_outputs_change_only_with_their_format(tmp_path: Path) -> None:
    """Events, sequences, vocabulary and pack of the golden day are the recorded ones for the recorded formats."""
    path = tmp_path / "tiny.toml"
    path.write_text(tiny.CONFIG.format(root=GOLDEN / "raw"))
    config, home = load_config(path), str(tmp_path / "home")
    night = open_night(config, home, tiny.FIRST_DAY, at_us=0)

    ingested = ingesting.ingest(night)
    buckets = [sequencing.build_bucket(night, ingested, bucket) for bucket in range(config.lake.num_buckets)]
    words = packing.grow_vocabulary(night, buckets)
    encoded = [packing.encode_bucket(night, part, words, bucket) for bucket, part in enumerate(buckets)]
    packing.write_pack(night, ingested, buckets, encoded, words, "train")

    events = EventTable(night.table_uri, config).read(ingested["bound"]["delta_version"])
    folder = Path(home) / "nights" / "2025-06-01"
    with pa.OSFile(str(folder / "packs" / "train" / "pack.arrow")) as stream:
        pack = pa.ipc.open_file(stream).read_all()
    found = {
        "formats": {**{k: STAGE_FORMAT[k] for k in ("ingest", "sequences", "vocabulary", "encode", "pack")}},
        "table_formats": {"events": EVENT_FORMAT, "pack": PACK_FORMAT},
        "rows": ingested["rows"],
        "reasons": ingested["reasons"],
        "counts": [part["counts"] for part in buckets],
        "events": digest(events.to_dicts()),
        "vocabulary": words["version"],
        "pack": digest(pack.to_pydict()),
    }
    assert json.loads((GOLDEN / "expected.json").read_text()) == found, f"{HINT}: {json.dumps(found)}"
