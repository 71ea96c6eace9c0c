"""Errors cross processes whole: a bucket on a Ray worker fails with the message, the place and the stage."""

from __future__ import annotations

import pickle

from gr_core.errors import UsageError


def test_an_error_keeps_its_place_and_its_notes_in_another_process() -> None:
    """Status names the stage by the note."""
    error = UsageError("wrong", where="here")
    error.add_note("stage sequences")

    found = pickle.loads(pickle.dumps(error))

    assert (type(found), str(found), found.where) == (UsageError, "wrong", "here")
    assert found.__notes__ == ["stage sequences"]
    found.add_note("more")
    assert error.__notes__ == ["stage sequences"]
