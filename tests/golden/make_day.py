"""Write the golden raw day: a few rows of each kind, by hand. Run once; the file is part of the repository."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

START = 1_748_736_000_000  # 2025-06-01T00:00:00Z, ms


def main() -> None:
    """Write tests/golden/raw/log/date=2025-06-01/part-0.parquet."""
    rows = []
    for n in range(40):
        user, item = n % 5, (n * 7) % 11
        rows.append((f"e{n}", user, item, START + n * 1_800_000, n % 3 == 0, n % 4 == 0, ["home", "search"][n % 2]))
    rows.append(rows[3])  # an exact duplicate
    rows.append((None, 1, 2, START, True, False, "home"))  # no id: quarantine
    names = ["id", "uid", "item", "ts", "clicked", "liked", "surface"]
    table = pa.table({name: [row[i] for row in rows] for i, name in enumerate(names)})
    path = Path(__file__).parent / "raw" / "log" / "date=2025-06-01" / "part-0.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)


if __name__ == "__main__":
    main()
