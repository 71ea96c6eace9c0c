"""Serving is the same computation as training: requests are scored as the pack of the same events is."""

import subprocess
import sys
from datetime import timedelta
from typing import Any

import numpy as np
import pandas as pd
import pytest

from gr_core.errors import DataContractError, FormatError
from gr_core.eval.scoring import score_pack
from gr_core.registry.scorer import RequestScorer, _load_pyfunc
from gr_core.registry.signature import example


@pytest.fixture(scope="module")
def scorer(trained) -> RequestScorer:
    return _load_pyfunc(str(trained.checkpoint))


def alone(scorer: RequestScorer, request: dict[str, Any], **changes: Any) -> list[float]:
    return scorer.score([{**request, **changes}])["scores_click"][0]


def test_requests_score_as_the_pack_does(trained, requests, scorer):
    """Case G3: logits of requests equal those of the pack of the same events, limits and late actions included."""
    scored = score_pack(trained.checkpoint, trained.pack)
    place = {event: row for row, event in enumerate(scored.event_ids)}
    found = scorer.score(requests)

    assert list(found) == ["scores_click", "scores_like"]
    assert len(place) == len(requests) == 84
    for column, name in enumerate(found):
        served = np.array([scores[0] for scores in found[name]])
        expected = scored.logits[[place[r["request_id"]] for r in requests], column]
        np.testing.assert_allclose(served, expected, atol=1e-5)
    assert np.std(scored.logits) > 0.01


def test_an_interleaved_model_serves_what_it_was_trained_on(interleaved, requests):
    """Item and action tokens of a request are those of the pack: equal logits; a history without shown_at is refused."""
    scorer = RequestScorer(interleaved.checkpoint)
    scored = score_pack(interleaved.checkpoint, interleaved.pack)
    place = {event: row for row, event in enumerate(scored.event_ids)}
    served = np.array([scores[0] for scores in scorer.score(requests)["scores_click"]])

    np.testing.assert_allclose(served, scored.logits[[place[r["request_id"]] for r in requests], 0], atol=1e-5)
    assert np.std(scored.logits) > 0.01
    assert all(len(scores) > 1 for scores in scorer.score(example(scorer._scorer.state))["scores_click"])
    past = [{name: value for name, value in entry.items() if name != "shown_at"} for entry in requests[-1]["history"]]
    with pytest.raises(DataContractError, match="shown_at"):
        scorer.score([{**requests[-1], "history": past}])


def test_candidates_do_not_see_each_other(requests, scorer):
    """A candidate's score is the same alone and among others, in any order, and histories may be ragged."""
    request = requests[-1]
    items, kinds = ["i1", "i2", "i5"], ["k1", "k2", "k1"]
    together = alone(scorer, request, candidates=items, candidate_kind=kinds)
    singles = [alone(scorer, request, candidates=[i], candidate_kind=[k])[0] for i, k in zip(items, kinds, strict=True)]
    reverse = alone(scorer, request, candidates=items[::-1], candidate_kind=kinds[::-1])
    many = {**request, "candidates": items, "candidate_kind": kinds}
    ragged = scorer.score([{**request, "history": request["history"][:3]}, many])

    np.testing.assert_allclose(together, singles, atol=1e-5)
    np.testing.assert_allclose(reverse, together[::-1], atol=1e-5)
    assert [len(scores) for scores in ragged["scores_click"]] == [1, 3]


def test_what_is_not_visible_yet_is_not_seen(requests, scorer):
    """History at or after shown_at changes nothing; what was visible before does."""
    request = requests[-1]
    shown = request["shown_at"]
    entry = {"item_id": "i9", "kind": "k1", "actions": 1, "known": 3}
    later = [*request["history"], {**entry, "visible_at": shown}]
    before = [*request["history"], {**entry, "visible_at": shown - timedelta(seconds=1)}]

    assert alone(scorer, request, history=later) == alone(scorer, request)
    assert alone(scorer, request, history=before) != alone(scorer, request)


def test_history_may_be_absent(requests, scorer):
    """A new user has a null or empty history, or none at all, and is scored all the same."""
    request = requests[0]
    empty = alone(scorer, request, history=[])

    assert alone(scorer, request, history=None) == empty
    assert np.isfinite(empty).all()


def test_side_features_come_with_the_candidate_or_beside_it(requests, scorer):
    """Structs and parallel lists mean the same; features that are not given are unknown, ids never seen fall back."""
    request = requests[-1]
    beside = alone(scorer, request, candidates=["i1"], candidate_kind=["k1"])
    unknown = alone(scorer, request, candidates=["i1"], candidate_kind=[None])
    never = [alone(scorer, request, candidates=[item]) for item in ("never seen", "i3")]

    assert alone(scorer, request, candidates=[{"item_id": "i1", "kind": "k1"}], candidate_kind=None) == beside
    assert alone(scorer, request, candidates=["i1"], candidate_kind=None) == unknown != beside
    assert never[0] == never[1]


@pytest.mark.parametrize(
    "form",
    [
        lambda t: t.replace(tzinfo=None),
        lambda t: t.isoformat(),
        pd.Timestamp,
        lambda t: np.datetime64(t.replace(tzinfo=None), "ns"),
        lambda t: round(t.timestamp() * 1e6),
    ],
    ids=["naive", "ISO text", "pandas", "numpy", "microseconds"],
)
def test_times_may_have_any_form(requests, scorer, form):
    """A time without a zone is UTC; text, pandas, numpy and integers are understood."""
    request = requests[-1]
    history = [{**entry, "visible_at": form(entry["visible_at"])} for entry in request["history"]]

    assert alone(scorer, request, shown_at=form(request["shown_at"]), history=history) == alone(scorer, request)


def test_a_frame_is_answered_row_by_row(requests, scorer):
    """The frame that MLflow hands over comes back with request_id and one list a row, index kept."""
    frame = pd.DataFrame(requests[:3], index=[5, 6, 7])
    found = scorer.predict(frame)

    assert list(found.columns) == ["request_id", "scores_click", "scores_like"]
    assert list(found.index) == [5, 6, 7]
    assert found["scores_click"].tolist() == scorer.score(requests[:3])["scores_click"]


def test_long_files_are_scored_in_parts(requests, scorer, monkeypatch):
    """Requests are cut into chunks of tokens; the scores do not depend on it, and empty requests keep their place."""
    asked = [requests[0], {**requests[1], "candidates": [], "candidate_kind": []}, *requests[2:6]]
    whole = scorer.score(asked)
    monkeypatch.setattr("gr_core.registry.scorer._CHUNK_TOKENS", 30)
    parts = scorer.score(asked)

    assert whole["scores_like"][1] == []
    for name, scores in whole.items():
        np.testing.assert_allclose(np.concatenate(parts[name]), np.concatenate(scores), atol=1e-5)


def test_bad_requests_are_named(requests, scorer, tmp_path):
    """A missing time and lists of unequal length name the request; a folder without a checkpoint is refused."""
    with pytest.raises(DataContractError, match="'u00:07' has no shown_at"):
        scorer.score([{**requests[0], "shown_at": None}])
    with pytest.raises(DataContractError, match="2 candidates and 1 values of candidate_kind"):
        scorer.score([{**requests[0], "candidates": ["i1", "i2"]}])
    with pytest.raises(FormatError, match=r"manifest\.json"):
        RequestScorer(tmp_path)


def test_the_loader_needs_no_heavy_library(root):
    """Importing the loader pulls neither MLflow, Polars, pandas, pydantic nor Prefect."""
    heavy = ("mlflow", "polars", "pandas", "pydantic", "prefect", "deltalake")
    code = f"import sys, gr_core.registry.scorer; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"
