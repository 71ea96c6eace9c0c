"""The pandas groupby that the sequences stage is measured against; imports pandas alone."""

from __future__ import annotations

import pandas as pd  # type: ignore[import-untyped]


def group_with_pandas(files: list[str]) -> dict[str, int]:
    """Group a feed's events into lists a user with pandas, in (user, time) order."""
    actions = ("click", "like", "watched")
    columns = ["uid", "item", "category", "surface", "ts", *actions]
    rows = pd.concat([pd.read_parquet(file, columns=columns) for file in files])
    rows["actions"] = sum(rows.pop(name).astype("int32") * (1 << bit) for bit, name in enumerate(actions))
    rows = rows.sort_values(["uid", "ts"], ignore_index=True)
    found = rows.groupby("uid")[["item", "category", "surface", "actions", "ts"]].agg(list)
    return {"users": len(found), "events": len(rows)}
