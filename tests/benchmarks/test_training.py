"""The training benchmark: rivals that compute what they should, FLOP as torch counts them, arms that train, the object."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import _child, _device, _mfu, _others, _parts, _rollout, _speed, _steps, _tables, training
from benchmarks._ours import ITEM_FEATURES, ROWS, Ours, night_of, pack_of
from benchmarks._pairs import interleave, medians, ratio
from benchmarks._rival import PaddedModel, Rival, Users, read_users
from gr_core.train.attribution import PARTS

TINY = {"width": 16, "num_layers": 2, "num_heads": 4}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of a few batches."""
    return pack_of(tmp_path_factory.mktemp("training") / "pack", "ads", 6_000, token_budget=2048)


@pytest.fixture(scope="module")
def users(pack: Path) -> Users:
    """The same tokens, for rivals."""
    return read_users(night_of(pack, TINY).reader)


def padded(num_features: int) -> PaddedModel:
    torch.manual_seed(0)
    return PaddedModel(16, 2, 4, [10_003] * num_features, 3, 0.0)


def test_rivals_read_every_token_and_target(pack: Path, users: Users) -> None:
    """Tokens, users and targets are the pack's; a cut has users of one length and their last ten tokens as targets."""
    index = night_of(pack, TINY).reader.index
    cut = users.cut(50)

    assert len(users.gaps) == index["num_tokens"]
    assert int(users.is_target.sum()) == index["num_supervised"]
    assert len(users.lengths) == index["num_segments"]
    assert set(cut.lengths) == {50}
    assert int(cut.is_target.sum()) == 10 * len(cut.lengths)
    assert cut.is_target[40:50].all()
    assert not cut.is_target[:40].any()


def test_padding_and_masks_do_not_change_what_a_rival_predicts(users: Users) -> None:
    """A short user's logits are the same alone and padded to a longer one, masked and plainly causal."""
    model = padded(users.rows.shape[1])
    short, long = np.argsort(users.lengths)[[len(users.lengths) // 2, -1]]
    seen: dict[str, torch.Tensor] = {}
    for batching in ("random", "equal"):
        rival = Rival(users, model, batching)  # type: ignore[arg-type]
        for name, numbers in (("alone", [short]), ("padded", [short, long])):
            kept: list[torch.Tensor] = []
            hook = model.logits.register_forward_hook(lambda *given, kept=kept: kept.append(given[2].detach()))
            state = {key: value.clone() for key, value in model.state_dict().items()}
            rival.step(np.asarray(numbers))
            model.load_state_dict(state)
            hook.remove()
            seen[f"{batching} {name}"] = kept[0]

    expected = seen["random alone"]
    assert len(expected) > 0
    for logits in seen.values():
        torch.testing.assert_close(logits[: len(expected)], expected)


def test_bucketed_batches_have_like_lengths_and_cover_all_users(users: Users) -> None:
    """Sorted by length, cut into batches; a round over all batches trains every real token once."""
    rival = Rival(users, padded(users.rows.shape[1]), "bucketed", batch_users=8)

    assert rival.spread(rival.num_batches)() == int(users.lengths.sum())


def test_flop_of_a_token_are_the_packs(pack: Path) -> None:
    """All that the product counts for its batches, over the tokens; a wider model needs more."""
    narrow, wide = (_mfu.flop_per_token(night_of(pack, {**TINY, "width": width})) for width in (16, 32))

    assert 3 * 2 * 4 * 16 * 16 < narrow < wide


def test_ours_trains_and_counts_real_tokens(pack: Path) -> None:
    """Steps move parameters; a pass over the pack counts its tokens; batches come again after the last."""
    ours = Ours(night_of(pack, TINY))
    before = ours.night.model.states.weight.detach().clone()

    assert ours.train(len(ours.night.reader)) == ours.night.reader.index["num_tokens"]
    assert ours.train(1) == ours.night.reader.index["batch_tokens"][0]
    assert not torch.equal(before, ours.night.model.states.weight)


def test_rows_follow_the_tables(users: Users) -> None:
    """Every row lies inside its table, reserved ones left out, and popular rows are popular."""
    items = users.rows[:, 0]

    assert items.min() >= 3
    assert items.max() < ROWS[ITEM_FEATURES[0]] + 3
    assert np.bincount(items).max() > 20 * len(items) / ROWS[ITEM_FEATURES[0]]


def test_pairs_are_interleaved_and_compared_round_by_round() -> None:
    """One warm-up and then every arm in turn; rates are amount over time."""
    order: list[str] = []

    def work(name: str) -> float:
        order.append(name)
        return 1.0

    rates = interleave({"a": lambda: work("a"), "b": lambda: work("b")}, rounds=2)

    assert order == ["a", "b"] * 3
    assert [len(values) for values in rates.values()] == [2, 2]
    assert ratio({"a": [2.0, 6.0, 4.0], "b": [1.0, 2.0, 4.0]}, "a", "b") == 2.0
    assert medians({"a": [2.0, 6.0, 4.0]}) == {"a": 4.0}


def test_a_pair_measures_every_rival(tmp_path: Path) -> None:
    """All four arms have a rate, and ours a ratio to the three others."""
    found = _speed.pair(
        str(tmp_path), "ads", 16, 1, 4_000, {"ours": 1, "padded": 1, "bucketed": 1, "equal": 1}, rounds=1
    )

    assert set(found["rates"]) == {"ours", "padded", "bucketed", "equal"}
    assert set(found["ratios"]) == {"padded", "bucketed", "equal"}
    assert all(rate > 0 for rate in found["rates"].values())


def test_utilisation_and_metrics_are_shares(tmp_path: Path) -> None:
    """Both come out above zero, metrics below the whole of a step."""
    used = _mfu.utilisation(str(tmp_path), "ads", 16, 1, 4_000, batches=1, rounds=1, matrix=32)
    share = _steps.metrics_share(str(tmp_path), "ads", 16, 4_000, steps=1, rounds=1)

    assert used["mfu"] > 0
    assert 0 < share["fraction"] < 1
    assert 0 < share["naive_fraction"] < 1


def test_table_arms_compute_the_same_kind_of_step() -> None:
    """Ours and the dense arms are timed on the same ids; fbgemm's presence is told."""
    found = _tables.compare(rows=500, num_ids=64, steps=2, rounds=1)

    assert {"ours", "adam", "fused_adam"} <= set(found["milliseconds"])
    assert found["fbgemm"] in ("measured", "not installed")
    assert 8 <= found["distinct_ids"] <= 8 * 64


def test_the_roll_out_sets_one_switch_after_the_other() -> None:
    """Naive has none; alone has one; cumulative those of the design's order up to its own, the last one all."""
    arms = _rollout.arms_of()

    assert arms["alone/naive"] == frozenset()
    assert arms["alone/metrics"] == {"metrics"}
    assert arms["cumulative/loader"] == {"incremental", "loader"}
    assert arms["cumulative/fused_lookup"] == set(_rollout.SWITCHES)
    assert len(arms) == 1 + 2 * len(_rollout.SWITCHES)


def test_arms_of_the_roll_out_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds per million events of this night: the padded loop, the product with naive switches, and all of them."""
    arms = _rollout.arms_of()
    some = {name: arms[name] for name in ("alone/naive", "alone/packed", "cumulative/fused_lookup")}
    monkeypatch.setattr(_rollout, "arms_of", lambda: some)
    found = _rollout.roll_out(str(tmp_path), 16, 1, num_tokens=6_000, amount=2_000, rounds=1)

    assert set(found["alone"]) == {"naive", "packed"}
    assert set(found["cumulative"]) == {"fused_lookup"}
    assert all(seconds > 0 for kind in ("alone", "cumulative") for seconds in found[kind].values())


def test_a_week_has_seven_times_the_targets_behind_the_same_history(tmp_path: Path) -> None:
    """Days add targets to a segment and nothing else, so a retrain's events count a seventh."""
    day, week = (night_of(pack_of(tmp_path / f"{days}", "ads", 5_000, days=days), TINY).reader.index for days in (1, 7))

    assert week["num_supervised"] == 7 * day["num_supervised"]
    assert week["num_tokens"] - week["num_supervised"] == day["num_tokens"] - day["num_supervised"]


def test_loops_collate_alike_and_read_one_table_as_many(users: Users) -> None:
    """User by user or by whole columns: the same logits; rows end to end in one table are those of each."""
    model = padded(users.rows.shape[1])
    slow, quick = (_rollout._Loop(users, frozenset(on), model, 1.0) for on in ([], ["loader"]))
    numbers = np.array([3, 0, 5])
    torch.manual_seed(0)
    joined = PaddedModel(16, 2, 4, [10_003] * users.rows.shape[1], 3, 0.0, one_table=True)
    own = {key: value for key, value in model.state_dict().items() if not key.startswith("tables")}
    joined.load_state_dict(own | {"tables.0.weight": torch.cat([table.weight for table in model.tables])})

    given = quick.inputs(numbers)[0]

    torch.testing.assert_close(model(*slow.inputs(numbers)[0]), model(*given))
    torch.testing.assert_close(joined(*given), model(*given))


def test_the_holdout_is_scored_at_its_pace() -> None:
    """One batch of 10 tokens for every 40 trained, whatever the batches."""
    pace = _rollout._Pace(10)

    assert [pace.due(tokens) for tokens in (39, 1, 100, 20)] == [0, 1, 2, 1]


def test_a_library_that_is_not_there_is_told(tmp_path: Path) -> None:
    """Ours is measured all the same; each library that cannot be imported has its reason in the conditions."""
    found = _others.compare(str(tmp_path), "ads", 16, 1, 4_000, {"ours": 1, "padded": 1}, rounds=1, rivals="")
    measured = set(found["rates"]) - {"ours"}

    assert found["rates"]["ours"] > found["ours_supervised_per_second"] > 0
    assert measured | set(found["missing"]) == {"replay_sasrec", "recbole_sasrec"}
    assert set(found["ratios"]) == measured


def test_every_part_can_be_named() -> None:
    """The command knows the names of all parts, and no other, before it imports them."""
    assert tuple(_parts.PARTS) == training.PARTS


def test_a_device_is_measured_without_the_libraries_of_a_night(tmp_path: Path) -> None:
    """`--device` prints one object; rich, polars, pydantic and mlflow are not even looked for."""
    missing = "; ".join(
        f"sys.modules[{name!r}] = None" for name in ("rich", "polars", "pydantic", "mlflow", "deltalake")
    )
    code = (
        f"import sys; {missing}; from benchmarks.training import main; sys.exit(main(['--device', 'cpu', '--quick']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)["figures"]
    assert figures["device/tokens_per_second"]["value"] > 0
    assert {f"device/seconds/{part}" for part in PARTS} <= set(figures)


def test_the_large_model_is_the_configs(tmp_path: Path) -> None:
    """Model and training settings come from the file, for one rank; without it from the module."""
    file = tmp_path / "large.toml"
    file.write_text(
        '[model]\nwidth = 96\nitem_features = ["item_id"]\n[train]\nprecision = "bf16"\nmicro_batches = 8\n'
        "[train.distributed]\nshard = 8\n[pack]\ntoken_budget = 4096\n"
    )

    assert _device.settings_of_file(file) == ({"width": 96}, {"precision": "bf16", "micro_batches": 1}, 4096)
    assert _device.settings_of_file(tmp_path / "none.toml")[0] == _device.MODEL


def test_the_object_has_the_contracts_shape(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object on stdout: figures with four keys, conditions; --quick never misses."""
    monkeypatch.setattr(_tables, "measure", lambda target, **arguments: _child.call(target, arguments))
    status = training.main(["--quick", "--only", "tables", "--json"])
    printed = json.loads(capsys.readouterr().out)

    assert status == 0
    assert list(printed) == ["figures", "conditions"]
    assert set(printed["figures"]) == {"tables/1000/speedup_over_adam", "tables/1000/milliseconds"}
    assert all(list(figure) == ["value", "goal", "baseline", "unit"] for figure in printed["figures"].values())
    assert printed["conditions"]["quick"] is True
