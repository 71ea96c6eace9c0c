"""A night: digests, warm start, splits into micro-batches, empty batches, bad numbers, finished runs."""

import contextlib
import dataclasses
import threading

import numpy as np
import pytest
import torch

from gr_core.errors import ConfigError, FormatError, TrainingError
from gr_core.model.embeddings import TableSpec
from gr_core.refs import Bound
from gr_core.train import loop
from gr_core.train.state import load_checkpoint, read_state


def quiet(line):
    del line


def without_labels(user):
    """Return the user as pure history: nothing is supervised."""
    return dataclasses.replace(user, label_known=user.label_known * 0, labels=user.labels * 0)


def test_a_night_writes_all_that_the_next_one_needs(packs, users):
    """The checkpoint has watermark, known rows, steps, newest supervised times, metrics; progress was told."""
    lines = []
    pack = packs.pack("p", users, token_budget=120)

    state = loop.train(packs.run(pack, "c"), lines.append)

    newest = {
        name: int(max(u.time[(u.label_known >> bit & 1) == 1].max(initial=0) for u in users))
        for bit, name in enumerate(("click", "like"))
    }
    assert state["newest_supervised_us"] == newest
    assert state["watermark"]["commit"] == 1
    assert state["vocabulary"]["tables"]["item_id"]["known_rows"] == 40
    assert state["step"] == lines[-1]["steps"] == lines[-1]["step"] > 1
    assert state["metrics"]["train/count/click"] == sum(int((u.label_known & 1).sum()) for u in users)
    assert state["metrics"]["train/loss"] == pytest.approx(lines[-1]["loss"])
    assert {"train/auc/click", "train/ne/like", "perf/seconds/data_wait"} <= state["metrics"].keys()


def test_same_seed_same_digest_and_another_seed_another(packs, users):
    """Two runs in one process give the same digest; another seed gives another."""
    pack = packs.pack("p", users, token_budget=120)
    digests = [loop.train(packs.run(pack, f"c{i}", seed=s), quiet)["digest"] for i, s in enumerate((3, 3, 4))]

    assert digests[0] == digests[1] != digests[2]


def prefetch_threads():
    """Return the read-ahead threads that run now."""
    return [thread for thread in threading.enumerate() if thread.name == "daybreak-prefetch"]


def test_reading_ahead_changes_nothing(packs, users, monkeypatch):
    """The digest is that of a night whose micro-batches are made on the spot, and no thread is left behind."""
    pack = packs.pack("p", [without_labels(users[0]), *users[1:]], token_budget=70)
    settings = {"micro_batches": 2}
    digest = loop.train(packs.run(pack, "ahead", settings=settings), quiet)["digest"]
    assert prefetch_threads() == []
    monkeypatch.setattr(loop, "Prefetched", contextlib.nullcontext)

    assert loop.train(packs.run(pack, "plain", settings=settings), quiet)["digest"] == digest


def test_an_error_while_reading_ahead_stops_the_night(packs, users, monkeypatch):
    """It surfaces in the night as it was raised; no checkpoint and no thread is left."""
    run = packs.run(packs.pack("p", users, token_budget=70), "c")
    read = loop.PackReader.batch

    def broken(reader, number):
        if number == 2:
            raise FormatError("batch 2 has nulls", where="pack.arrow")
        return read(reader, number)

    monkeypatch.setattr(loop.PackReader, "batch", broken)

    with pytest.raises(FormatError, match="batch 2 has nulls"):
        loop.train(run, quiet)
    assert not (packs.root / "c").exists()
    assert prefetch_threads() == []


@pytest.mark.parametrize("normalize", ["token", "segment", "event_weight"])
def test_a_step_is_the_same_for_any_split_into_micro_batches(packs, users, normalize):
    """One batch, or two or more micro-batches of one step: the same parameters within rounding (case F7)."""
    model = dataclasses.replace(packs.run(packs.root, "x").model, id_drop_fraction=0.0)
    settings = {"normalize": normalize, "micro_batches": 10, "clip_norm": 0.0}
    seen = []
    for budget in (256, 110):
        pack = packs.pack(f"p{budget}", users, token_budget=budget)
        night = loop.Night(packs.run(pack, f"c{budget}", settings=settings, model=model))
        night.step(range(len(night.reader)), 1.0, loop.Attribution(night.device, budget))
        # after one step from zero, the first moment is a tenth of the gradient
        moments = {name: t for name, t in night.dense.state().items() if name.endswith("exp_avg")}
        seen.append((len(night.reader), night.mean_loss, moments, night.tables.accumulator))

    (few, loss_one, one, sparse_one), (many, loss_two, two, sparse_two) = seen
    assert few < many
    assert loss_one == pytest.approx(loss_two, rel=1e-5)
    assert torch.allclose(sparse_one, sparse_two, rtol=1e-3, atol=1e-9)
    for name, moment in one.items():
        assert torch.allclose(moment, two[name], atol=1e-6), name


def test_warm_start_continues_everything(packs, users):
    """With nothing due, a night's tensors, step and newest times are the parent's bit for bit, under the new bound."""
    first = loop.train(packs.run(packs.pack("p", users), "a"), quiet)
    nothing = packs.pack("q", [without_labels(u) for u in users], bound=Bound(commit=9, cutoff_us=3))

    second = loop.train(packs.run(nothing, "b", parent=packs.root / "a", seed=77), quiet)

    assert second["digest"] == first["digest"]
    assert (second["step"], second["newest_supervised_us"]) == (first["step"], first["newest_supervised_us"])
    assert second["watermark"]["commit"] == 9
    assert second["parent_digest"] == first["digest"]
    assert second["metrics"]["train/loss"] is None
    assert second["metrics"]["train/learning_rate/dense/last"] is None


def test_two_nights_are_reproducible_and_count_on(packs, users):
    """The second night starts from the first's parameters and both optimizers' states; its steps count on."""
    pack = packs.pack("p", users, token_budget=120)
    first = loop.train(packs.run(pack, "a"), quiet)
    runs = [packs.run(pack, name, parent=packs.root / "a", seed=1) for name in ("b", "c")]

    second, again = (loop.train(run, quiet) for run in runs)

    tensors, _ = load_checkpoint(packs.root / "b")
    assert second["digest"] == again["digest"] != first["digest"]
    assert second["step"] == 2 * first["step"] == float(tensors["optimizer.dense.norm.weight.step"])
    assert bool((tensors["optimizer.sparse.item_id.accumulator"] >= 0).all())


def test_growth_keeps_old_rows_and_dense_state(packs, users):
    """A grown table takes the parent's rows bit for bit (case F5), and the first night step works."""
    loop.train(packs.run(packs.pack("p", users), "a"), quiet)
    grown = tuple(
        dataclasses.replace(t, rows=t.rows + 5) if t.name == "item_id" else t for t in packs.run(packs.root, "x").tables
    )
    nothing = packs.pack("q", [without_labels(u) for u in users])
    loop.train(packs.run(nothing, "b", parent=packs.root / "a", tables=grown), quiet)
    loop.train(packs.run(packs.pack("r", users), "c", parent=packs.root / "a", tables=grown), quiet)

    old, _ = load_checkpoint(packs.root / "a")
    new, state = load_checkpoint(packs.root / "b")
    for name in ("sparse.item_id.weight", "optimizer.sparse.item_id.accumulator"):
        assert torch.equal(new[name][:40], old[name])
        assert torch.equal(new[name][40:], old[name][2].expand_as(new[name][40:]))
    assert state["vocabulary"]["tables"]["item_id"]["known_rows"] == 45


def test_pad_rows_are_zero_after_training(packs, users):
    """Every table's pad row is zero in the checkpoint, and an item with row 0 pads nothing but itself (case E16)."""
    loop.train(packs.run(packs.pack("p", users, token_budget=120), "a"), quiet)
    tensors, _ = load_checkpoint(packs.root / "a")
    for table in ("item_id", "kind", "surface"):
        assert not tensors[f"sparse.{table}.weight"][0].any()
        assert float(tensors[f"optimizer.sparse.{table}.accumulator"][0]) == 0.0
        assert tensors[f"sparse.{table}.weight"][1:].any(dim=1).all()


def test_f25_batches_without_targets_contribute_nothing(packs, users):
    """A step whose other micro-batch is empty equals the step without it; an all-empty step is skipped (case F25)."""
    blank = [dataclasses.replace(without_labels(u), name=f"x{i}") for i, u in enumerate(users)]
    settings = {"micro_batches": 100}
    alone = loop.train(packs.run(packs.pack("p", users[:3], token_budget=64), "a", settings=settings), quiet)
    mixed_pack = packs.pack("q", users[:3] + blank[3:], token_budget=64)
    mixed = loop.train(packs.run(mixed_pack, "b", settings=settings), quiet)
    empty = loop.train(packs.run(packs.pack("r", blank), "c"), quiet)

    assert mixed["step"] == alone["step"] == 1
    assert mixed["metrics"]["train/count/click"] == alone["metrics"]["train/count/click"]
    assert np.isfinite(mixed["metrics"]["train/loss"])
    assert (empty["step"], empty["metrics"]["train/loss"], empty["metrics"]["train/auc/click"]) == (0, None, None)


def test_f25_an_empty_micro_batch_changes_no_tensor(packs, users):
    """A step with an empty micro-batch moves every tensor to where the step without it does, exactly (case F25)."""
    blank = [dataclasses.replace(without_labels(users[8]), name=name) for name in ("x", "y")]
    pack = packs.pack("p", [*users[6:8], *blank], token_budget=64)
    nights = [loop.Night(packs.run(pack, "c")) for _ in range(3)]
    weights = nights[0].reader.index["batch_weights"]["token"]
    due, empty = ([i for i, w in enumerate(weights) if (w > 0) == wanted] for wanted in (True, False))
    assert (len(due), len(empty)) == (2, 2)

    for night, numbers in zip(nights, (due, [empty[0], *due], [due[0], *empty, due[1]]), strict=True):
        night.step(numbers, 1.0, loop.Attribution(night.device, 64))

    alone, *others = (
        dict(night.model.named_parameters()) | night.dense.state() | night.tables.state() for night in nights
    )
    for other in others:
        assert all(torch.equal(tensor, other[name]) for name, tensor in alone.items())
    assert {(night.mean_loss, night.global_step) for night in nights} == {(nights[0].mean_loss, 1)}


def test_f24_the_loss_is_divided_by_an_exact_count(packs, tokens, monkeypatch):
    """5,001 loss tokens, which half precision cannot count (case F24): divided by 5001, in the step and in the mean."""
    seen = []

    def noted(losses, weights, step_weight):
        seen.append((step_weight, float((losses.detach() * weights).sum() / 5001)))
        return original(losses, weights, step_weight)

    original = loop.batch_loss
    monkeypatch.setattr(loop, "batch_loss", noted)
    sizes = [(1, 50)] * 100 + [(1, 1)]
    crowd = [tokens.random_user(f"u{i}", *size, seed=i) for i, size in enumerate(sizes)]

    state = loop.train(packs.run(packs.pack("p", crowd, token_budget=6000), "c"), quiet)

    ((step_weight, mean),) = seen
    assert step_weight == 5001
    assert state["metrics"]["train/loss"] == pytest.approx(mean, rel=1e-6)


def test_f8_every_night_runs_through_the_configured_schedule(packs, tokens, monkeypatch):
    """Two nights of 10 steps (case F8): the same rates step by step, told in every line and kept in the state."""
    monkeypatch.setattr(loop, "_PROGRESS_SECONDS", 0.0)
    pack = packs.pack("p", [tokens.random_user(f"u{i}", 30, 4, seed=i) for i in range(10)], token_budget=60)
    rates = {"dense_learning_rate": 0.02, "sparse_learning_rate": 0.4}
    settings = {**rates, "warmup_fraction": 0.2, "final_fraction": 0.1}
    lines = [[], []]

    one = loop.train(packs.run(pack, "a", settings=settings), lines[0].append)
    two = loop.train(packs.run(pack, "b", settings=settings, parent=packs.root / "a"), lines[1].append)

    assert (one["step"], two["step"], len(lines[0])) == (10, 20, 10)
    for kind in ("dense", "sparse"):
        peak = rates[f"{kind}_learning_rate"]
        first_night, second_night = ([line[f"{kind}_learning_rate"] for line in night] for night in lines)
        assert first_night == second_night
        assert [second_night[i] for i in (0, 1, -1)] == pytest.approx([0.5 * peak, peak, 0.1 * peak])
        for state in (one, two):
            kept = [state["metrics"][f"train/learning_rate/{kind}/{key}"] for key in ("first", "peak", "last")]
            assert kept == pytest.approx([0.5 * peak, peak, 0.1 * peak])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_f4_bad_numbers_stop_before_anything_moves(packs, users, monkeypatch, where):
    """A non-finite loss or gradient at step 2 (case F4): TrainingError with the batch, parameters unmoved, no file."""
    pack = packs.pack("p", users, token_budget=120)
    night = loop.Night(packs.run(pack, "c"))
    clock = loop.Attribution(night.device, 120)
    night.step([0], 1.0, clock)
    before = {name: p.detach().clone() for name, p in night.model.named_parameters()}
    rows = night.tables.weight.clone()
    if where == "loss":
        monkeypatch.setattr(loop, "batch_loss", lambda *args: args[0].sum() * torch.inf)
    else:
        original = night.sparse.collect
        monkeypatch.setattr(night.sparse, "collect", lambda r, g: original(r, g * torch.inf))

    with pytest.raises(TrainingError, match=rf"{where}.*step 1, batch"):
        night.step([1], 1.0, clock)

    assert all(torch.equal(before[name], p) for name, p in night.model.named_parameters())
    assert torch.equal(rows, night.tables.weight)
    assert not (packs.root / "c").exists()


def test_nothing_non_finite_is_saved(packs, users):
    """A parameter that became NaN is refused at the save."""
    night = loop.Night(packs.run(packs.pack("p", users), "c"))
    night.tables.weight[7] = torch.nan
    with pytest.raises(TrainingError, match="not finite"):
        night.save(loop.Attribution(night.device, 1))


def test_a_finished_run_trains_nothing(packs, users, monkeypatch):
    """The same fingerprint returns the checkpoint untouched; another one, or resume = false, trains again (case F12)."""
    pack = packs.pack("p", users)
    first = loop.train(packs.run(pack, "c"), quiet)
    stamp = (packs.root / "c/manifest.json").stat().st_mtime_ns

    assert loop.train(packs.run(pack, "c", seed=9), quiet) == first
    assert (packs.root / "c/manifest.json").stat().st_mtime_ns == stamp
    assert loop.train(packs.run(pack, "c", seed=9, fingerprint="g"), quiet)["digest"] != first["digest"]
    assert loop.train(packs.run(pack, "c", seed=0, fingerprint="g", resume=False), quiet)["digest"] == first["digest"]
    assert read_state(packs.root / "c")["seed"] == 0


def test_what_does_not_belong_together_is_refused(packs, users):
    """Another role, vocabulary, feature set, model or action list than this run's: each is named."""
    pack = packs.pack("p", users)
    loop.train(packs.run(pack, "a"), quiet)
    other = dataclasses.replace(packs.run(pack, "x").model, width=32)
    cases = [
        (ConfigError, "role next_day", packs.run(packs.pack("q", users, role="next_day"), "x")),
        (FormatError, "vocabulary v2", packs.run(packs.pack("s", users, vocabulary="v2"), "x")),
        (ConfigError, "features", packs.run(pack, "x", tables=(TableSpec(name="item_id", rows=40, capacity=40),))),
        (ConfigError, "full retrain", packs.run(pack, "x", parent=packs.root / "a", model=other)),
        (
            ConfigError,
            "actions",
            packs.run(packs.pack("t", users, actions=("click", "like")), "x", parent=packs.root / "a"),
        ),
    ]
    for error, match, run in cases:
        with pytest.raises(error, match=match):
            loop.train(run, quiet)


def test_dropout_is_deterministic_and_off_when_scoring(packs, users):
    """Dropout follows seed and step alone: equal digests, others than without."""
    pack = packs.pack("p", users, token_budget=120)
    model = dataclasses.replace(packs.run(pack, "x").model, dropout=0.2)
    torch.manual_seed(1)
    first = loop.train(packs.run(pack, "a", model=model), quiet)["digest"]
    torch.manual_seed(2)
    again = loop.train(packs.run(pack, "b", model=model), quiet)["digest"]

    assert first == again != loop.train(packs.run(pack, "c"), quiet)["digest"]
