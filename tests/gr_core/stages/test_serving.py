"""`daybreak score`: files of requests, scored as the evaluation scored the same targets; bad rows named; whole or nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tests.tiny as tiny
from flows.cli import main
from gr_core.config import load_config
from gr_core.environment import artifact_root, tracking_uri
from gr_core.errors import DataContractError, DaybreakError, FormatError, UsageError
from gr_core.eval.scoring import Scored
from gr_core.lake import store
from gr_core.lake.events import EventTable
from gr_core.registry import requests as request_files
from gr_core.registry.mlflow_store import MlflowStore
from gr_core.registry.scorer import RequestScorer
from gr_core.stages import judging, serving
from tests.plain import run
from tests.s3 import bucket, s3_endpoint

__all__ = ["bucket", "s3_endpoint"]

pytestmark = pytest.mark.filterwarnings("default")  # MLflow, pandas and SQLAlchemy warn of their own
DAY = tiny.FIRST_DAY
# the whole history of a user fits, so that a segment of several targets begins where a request's does
LONG = ("sequences.max_history=200", "sequences.max_targets=100", "pack.token_budget=512")


@dataclass(frozen=True, kw_only=True)
class World:
    """Two nights, how the second one's holdout was evaluated, and requests for the same targets."""

    config: Path
    home: Path
    checkpoint: Path
    scored: Scored
    requests: list[dict[str, Any]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("serving")
    config, home = tiny.make(folder, days=2), folder / "home"
    text = config.read_text()
    for was, now in [
        ('  surface = "surface"\n', '  surface = "surface"\n  kind = "item % 3"\n'),
        ("[vocabulary.surface]\n", "[vocabulary.kind]\nmin_count = 1\n[vocabulary.surface]\n"),
        ('item_features = ["item_id"]', 'item_features = ["item_id", "kind"]'),
    ]:
        assert was in text
        text = text.replace(was, now)
    config.write_text(text)
    run(config, home, DAY, *LONG)
    night, done = run(config, home, DAY + timedelta(days=1), *LONG)
    scored = judging.score(night, done["train"]["uri"], done["pack"]["holdout"], done["vocabulary"])
    table = EventTable(night.table_uri, night.settings)
    rows = {row["event_id"]: row for row in table.read(table.delta_version()).to_dicts()}
    made = [
        {
            "request_id": event,
            "user_id": user,
            "shown_at": datetime.fromtimestamp(at // 1_000_000, UTC).replace(microsecond=at % 1_000_000),
            "history": None,
            "candidates": [rows[event]["item_id"], "5", "never seen"],
            "surface": rows[event]["surface"],
        }
        for user, at, event in scored.events
    ]
    return World(config=config, home=home, checkpoint=Path(done["train"]["uri"]), scored=scored, requests=made)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write requests in the form that the suffix names."""
    if path.suffix == ".parquet":
        history = pa.list_(pa.struct([("item_id", pa.string()), ("visible_at", pa.timestamp("us", "UTC"))]))
        kinds = {"shown_at": pa.timestamp("us", "UTC"), "history": history}
        names = list(dict.fromkeys(name for row in rows for name in row))
        table = pa.table({name: pa.array([row.get(name) for row in rows], kinds.get(name)) for name in names})
        pq.write_table(table, path)
    else:
        path.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """Read scores."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


def score(world: World, source: Path, output: Path, model: str = "challenger") -> dict[str, Any]:
    return serving.score(load_config(world.config, list(LONG)), str(world.home), model, str(source), str(output))


@pytest.mark.parametrize(("taken", "given"), [(".parquet", ".jsonl"), (".jsonl", ".parquet")])
def test_scores_are_those_of_the_evaluation(world: World, tmp_path: Path, taken: str, given: str) -> None:
    """Histories and side features from the lake: each target's logit equals the evaluation's of the same to 1e-5."""
    source, output = write(tmp_path / f"in{taken}", world.requests), tmp_path / f"out{given}"

    assert score(world, source, output) == {"rows": len(world.requests), "model_version": 2, "output": str(output)}

    found = read(output)
    assert list(found[0]) == ["request_id", "scores_click", "scores_like"]
    assert [row["request_id"] for row in found] == world.scored.event_ids
    assert {len(row["scores_click"]) for row in found} == {3}
    for bit, name in enumerate(("scores_click", "scores_like")):
        np.testing.assert_allclose([row[name][0] for row in found], world.scored.logits[:, bit], atol=1e-5)
    assert np.std(world.scored.logits[:, 0]) > 0.01
    assert len({round(row["scores_click"][1], 4) for row in found}) > 5  # users differ, so histories were read


def test_a_history_is_computed_once_for_all_candidates(world: World) -> None:
    """A request of 50 candidates is one segment of its history and 50 targets."""
    scorer = RequestScorer(world.checkpoint)
    past = [{"item_id": str(n % 12), "visible_at": n, "actions": 1, "known": 3} for n in range(40)]
    request = {"shown_at": 100, "history": past, "candidates": [str(n) for n in range(50)]}

    assert len(scorer._batch([request], [50]).time) == 40 + 50
    assert len(scorer.score([request])["scores_click"][0]) == 50


def test_given_histories_and_features_stand(world: World, tmp_path: Path) -> None:
    """What a request says is not looked up: an empty history is none, and candidate_kind is taken as given."""
    one = max(world.requests, key=lambda request: request["shown_at"])
    rows = [
        one,
        {**one, "history": []},
        {**one, "candidate_kind": ["0", "1", None]},
        {**one, "user_id": "stranger"},
        {**one, "user_id": None, "candidates": []},
    ]
    score(world, write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    found = [row["scores_click"] for row in read(tmp_path / "out.jsonl")]

    assert found[1] != found[0]
    assert found[2] != found[0]
    assert found[3] == found[1]  # nothing is known of a stranger
    assert found[4] == []


def test_ids_that_became_floats_are_the_same_ids(world: World, tmp_path: Path) -> None:
    """A column of integers with nulls reaches us as floats: 3.0 is user 3 and item 3, with history and side features."""
    one = max(world.requests, key=lambda request: request["shown_at"])
    whole = {**one, "user_id": int(one["user_id"]), "candidates": [1, 2, 5]}
    rows = [whole, {**whole, "user_id": float(one["user_id"]), "candidates": [1.0, 2.0, 5.0]}, {**whole, "history": []}]
    score(world, write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    found = [row["scores_click"] for row in read(tmp_path / "out.jsonl")]

    np.testing.assert_allclose(found[1], found[0], atol=1e-5)
    assert not np.allclose(found[2], found[0], atol=1e-3)


BAD = [
    ({"shown_at": None}, "shown_at", "is missing"),
    ({"shown_at": "yesterday"}, "shown_at", "no time"),
    ({"shown_at": 1.5}, "shown_at", "must be a timestamp"),
    ({"shown_at": 1_748_822_400_000}, "shown_at", "no time from 2000 on in microseconds"),
    ({"user_id": 3.7}, "user_id", "must be a user id"),
    ({"user_id": ["u1"]}, "user_id", "must be a user id"),
    ({"candidates": None}, "candidates", "must be a list"),
    ({"candidates": "5"}, "candidates", "must be a list"),
    ({"candidates": ["5", None]}, "candidates[1]", "must be an item id"),
    ({"candidate_kind": ["1"]}, "candidate_kind", "one value a candidate (3), got 1 values"),
    ({"history": "none"}, "history", "must be a list"),
    ({"history": [{"visible_at": 1}]}, "history[0].item_id", "must be an item id"),
    ({"history": [{"item_id": 1}]}, "history[0].visible_at", "is missing"),
    ({"candidate_knid": ["1", "1", "1"]}, "candidate_knid", "is nothing that this model reads; remove it or mend"),
    ({"candidates": [{"item_id": 1, "knid": 2}]}, "candidates[0].knid", "it reads item_id, kind"),
    (
        {"history": [{"item_id": 1, "visible_at": 1_748_822_400_000_000, "knid": 1}]},
        "history[0].knid",
        "it reads actions, item_id, kind, known, shown_at, visible_at",
    ),
    (
        {"history": [{"item_id": 1, "visible_at": 1_748_822_400_000_000, "actions": -1}]},
        "history[0].actions",
        "mask of action bits",
    ),
]


@pytest.mark.parametrize(("change", "column", "said"), BAD, ids=[f"{column} {said}" for _, column, said in BAD])
def test_a_bad_row_is_named_and_nothing_is_written(
    world: World, tmp_path: Path, change: dict[str, Any], column: str, said: str
) -> None:
    """File, row and column stand in the message; the older scores stay as they were, and no half file remains."""
    source = write(tmp_path / "in.jsonl", [world.requests[0], {**world.requests[1], **change}])
    (tmp_path / "out.jsonl").write_text("older")

    with pytest.raises(DataContractError) as error:
        score(world, source, tmp_path / "out.jsonl")

    assert f"{source}: row 2, column {column}: " in error.value.message
    assert said in error.value.message
    assert error.value.where == f"{source}:2:{column}"
    assert (tmp_path / "out.jsonl").read_text() == "older"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"shown_at": 1, "candidates": []}\n{"half', "row 2, column *: is no JSON"),
        (b"[1]\n", "row 1"),
        (b'{"shown_at": 1, "candidates": [], "shown_at": 2}', "row 1, column shown_at: is given twice; give one value"),
        (b'{"candidates": [{"item_id": 1, "item_id": 2}]}', "row 1, column item_id: is given twice"),
        (b"\xff\n", "UTF-8"),
    ],
    ids=["half a line", "no object", "a key twice", "an inner key twice", "not UTF-8"],
)
def test_lines_that_are_no_requests_are_named(world: World, tmp_path: Path, content: bytes, said: str) -> None:
    """Broken JSON lines name their row."""
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(DataContractError, match=r"in\.jsonl") as error:
        score(world, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    assert said in error.value.message


def test_files_and_models_that_cannot_be_are_refused(world: World, tmp_path: Path) -> None:
    """Missing or unreadable files, columns, suffixes, folders, versions and aliases: one error each, before any output."""
    good = write(tmp_path / "in.parquet", world.requests[:2])
    (tmp_path / "broken.parquet").write_bytes(good.read_bytes()[:-30])
    pq.write_table(pa.table({"shown_at": [1]}), tmp_path / "short.parquet")
    twice = pa.table([[1], [["5"]], [2]], names=["shown_at", "candidates", "shown_at"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    entry = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["item_id", "item_id"])
    nested = pa.table({"shown_at": [1], "candidates": pa.ListArray.from_arrays([0, 1], entry)})
    pq.write_table(nested, tmp_path / "nested.parquet")
    (tmp_path / "folder.jsonl").mkdir()
    out = tmp_path / "out.jsonl"
    cases: list[tuple[str, Path, Path, type[DaybreakError], str]] = [
        ("1", tmp_path / "absent.parquet", out, UsageError, "does not exist"),
        ("1", tmp_path / "folder.jsonl", out, UsageError, "is a folder"),
        ("1", tmp_path / "in.csv", out, UsageError, "ends in"),
        ("1", good, tmp_path / "out.txt", UsageError, "ends in"),
        ("1", good, good, UsageError, "is the file of requests"),
        ("1", good, tmp_path / "no" / "out.jsonl", UsageError, "no folder"),
        ("1", tmp_path / "broken.parquet", out, DataContractError, "no readable Parquet"),
        ("1", tmp_path / "short.parquet", out, DataContractError, "no column candidates"),
        ("1", tmp_path / "twice.parquet", out, DataContractError, "has column shown_at twice"),
        ("1", tmp_path / "nested.parquet", out, DataContractError, r"has column candidates\.item_id twice"),
        ("9", good, out, UsageError, "--model 9 is no registered version"),
        ("shadow", good, out, UsageError, "no alias"),
    ]
    for model, source, output, kind, said in cases:
        with pytest.raises(kind, match=said):
            score(world, source, output, model)
    assert not out.exists()


def test_aliases_are_the_journals_and_a_persons_own(world: World, tmp_path: Path) -> None:
    """champion, previous and challenger come from the journal, whatever MLflow says; other aliases from MLflow."""
    home = str(world.home)
    registry = MlflowStore(tracking_uri(home), artifact_root(home), "tiny")
    was = registry.aliases()
    registry.set_alias("shadow", 1)
    registry.set_alias("champion", None)
    source = write(tmp_path / "in.parquet", world.requests[:2])
    found = {
        name: score(world, source, tmp_path / f"{name}.parquet", name)["model_version"]
        for name in ("champion", "challenger", "shadow", "1")
    }
    registry.set_alias("shadow", None)
    registry.set_alias("champion", was["champion"])

    assert found == {"champion": was["champion"], "challenger": 2, "shadow": 1, "1": 1}


def test_long_files_go_through_in_pieces(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces change nothing, progress tells them, and ids keep their type; no row at all gives an empty file."""
    rows = [{**row, "request_id": n} for n, row in enumerate(world.requests[:7])]
    whole, pieces = tmp_path / "whole.parquet", tmp_path / "pieces.parquet"
    score(world, write(tmp_path / "in.jsonl", rows), whole)
    monkeypatch.setattr(request_files, "PIECE", 3)
    told: list[tuple[int, int | None]] = []
    settings = load_config(world.config, list(LONG))
    source = write(tmp_path / "in.parquet", rows)
    serving.score(settings, str(world.home), "2", str(source), str(pieces), progress=lambda *one: told.append(one))

    assert told == [(3, 7), (6, 7), (7, 7)]
    assert pq.read_schema(whole) == pq.read_schema(pieces)
    assert pq.read_schema(whole).field("request_id").type == pa.int64()
    for a, b in zip(read(whole), read(pieces), strict=True):
        np.testing.assert_allclose(a["scores_click"], b["scores_click"], atol=1e-5)
    write(tmp_path / "in.jsonl", [])
    assert score(world, tmp_path / "in.jsonl", whole)["rows"] == 0
    assert pq.read_table(whole).num_rows == 0
    write(tmp_path / "mixed.jsonl", [{**rows[0]}, {**rows[1], "request_id": "text"}])
    with pytest.raises(DataContractError, match="not of one type"):
        score(world, tmp_path / "mixed.jsonl", whole)


def test_the_command_prints_one_object(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`daybreak score`: exit 0 and the object of example 7; exit 2 and the error where a row is bad; a line for a person."""
    source, output = write(tmp_path / "in.parquet", world.requests[:2]), tmp_path / "out.jsonl"
    words = ["score", "--config", str(world.config), "--home", str(world.home), "--output", str(output)]
    words += [word for override in LONG for word in ("--set", override)]

    assert main([*words, "--model", "challenger", "--input", str(source), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": 2, "model_version": 2, "output": str(output)}
    bad = write(tmp_path / "bad.jsonl", [{**world.requests[0], "shown_at": None}])
    assert main([*words, "--model", "2", "--input", str(bad), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["where"] == f"{bad}:1:shown_at"
    assert main([*words, "--model", "2", "--input", str(source)]) == 0
    assert capsys.readouterr().out == f"scored 2 rows by version 2: {output}\n"


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_both_files_may_lie_on_an_object_store(world: World, bucket: str, tmp_path: Path, suffix: str) -> None:
    """Read and written at s3:// URIs as locally; a missing one is named."""
    local = write(tmp_path / f"in{suffix}", world.requests[:3])
    store.write_bytes(f"{bucket}/in{suffix}", local.read_bytes())
    settings, model = load_config(world.config, list(LONG)), (str(world.home), "2")

    told = serving.score(settings, *model, f"{bucket}/in{suffix}", f"{bucket}/out{suffix}")
    serving.score(settings, *model, str(local), str(tmp_path / f"out{suffix}"))

    assert told == {"rows": 3, "model_version": 2, "output": f"{bucket}/out{suffix}"}
    assert store.read_bytes(f"{bucket}/out{suffix}") == (tmp_path / f"out{suffix}").read_bytes()
    with pytest.raises(UsageError, match="does not exist"):
        serving.score(settings, *model, f"{bucket}/absent{suffix}", f"{bucket}/out{suffix}")


def test_a_version_whose_checkpoint_is_gone_is_named(world: World, tmp_path: Path) -> None:
    """The message says which version and where its checkpoint was."""
    source = write(tmp_path / "in.parquet", world.requests[:1])
    manifest = world.checkpoint / "manifest.json"
    manifest.rename(tmp_path / "kept.json")
    try:
        with pytest.raises(FormatError, match="version 2 cannot be loaded"):
            score(world, source, tmp_path / "out.parquet", "2")
    finally:
        (tmp_path / "kept.json").rename(manifest)
