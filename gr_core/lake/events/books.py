"""The event table's books: rows that came by commits, less rows that were removed = rows that its files hold.

Every Delta version that adds or removes rows carries the running balance as an app transaction, so the books are one
number in the log's snapshot, whatever the age of the table; the files' own counts stand beside it. Two writers that
start from one balance cannot both commit. The balance comes from what each operation counted, never from the files.
"""

from __future__ import annotations

from deltalake import DeltaTable, Transaction

from gr_core.lake.events import layout

BALANCE = "rows"  # app transaction


def entry(table: DeltaTable, change: int) -> Transaction:
    """Return the balance after a version that is worked out from `table` and changes the number of rows so."""
    return Transaction(BALANCE, (table.transaction_version(BALANCE) or 0) + change)


def check(table: DeltaTable) -> int:
    """Compare the balance with what the files of the table's version hold; reads the log alone.

    Returns:
        The number of rows.

    Raises:
        AssertionError: They differ: rows were lost or came twice (a fault of ours, never of the data).
    """
    expected, held = table.transaction_version(BALANCE) or 0, int(layout.files_of(table)["rows"].sum())
    if expected != held:
        raise AssertionError(
            f"row accounting broken: commits brought {expected} rows net of removed ones, the event table's files hold "
            f"{held} (version {table.version()})"
        )
    return held
