"""The denominators of steps, and the corrections that training applies to a pack."""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
import torch

from gr_core.errors import ConfigError
from gr_core.refs import Bound
from gr_core.train import loop
from gr_core.train.denominators import BatchWeights, logit_offset, weighting_of

DAY_US = 86_400_000_000
BOUND = Bound(commit=1, cutoff_us=2 * 10**11)


def quiet(line):
    del line


def vocabulary_file(folder, table, rows):
    """Write a vocabulary table's ids."""
    path = folder / f"{table}.arrow"
    frame = pl.DataFrame(
        {"id": list(rows), "row": list(rows.values()), "fallback": [2] * len(rows)},
        schema={"id": pl.String, "row": pl.Int32, "fallback": pl.Int32},
    )
    frame.write_ipc(path, compression="uncompressed", compat_level=pl.CompatLevel.oldest())
    return path


@pytest.mark.parametrize("normalize", ["token", "segment", "event_weight"])
def test_sums_read_off_the_rows_equal_those_of_the_index(packs, users, normalize):
    """A half-life too long to matter gives the index's own denominators, batch by batch."""
    pack = packs.pack("p", users, token_budget=110, bound=BOUND)
    night = loop.Night(packs.run(pack, "c", settings={"normalize": normalize, "half_life_days": 1e9}))
    weighting = weighting_of(night.run, night.reader.index)
    assert not weighting.is_plain

    sums = [BatchWeights(night.reader, weighting).of(number) for number in range(len(night.reader))]

    assert len(sums) > 1
    assert sums == pytest.approx(night.reader.index["batch_weights"][normalize], rel=1e-6)


def test_a_night_with_half_life_is_the_same_for_any_split(packs, users):
    """One batch or several micro-batches of a step give the same loss and gradient under a half-life (case F7)."""
    seen = []
    for budget in (256, 110):
        pack = packs.pack(f"p{budget}", users, token_budget=budget, bound=BOUND)
        settings = {"half_life_days": 0.3, "micro_batches": 10, "clip_norm": 0.0}
        run = packs.run(pack, f"c{budget}", settings=settings)
        object.__setattr__(run.model, "id_drop_fraction", 0.0)
        night = loop.Night(run)
        night.step(range(len(night.reader)), 1.0, loop.Attribution(night.device, budget))
        moments = {name: t for name, t in night.dense.state().items() if name.endswith("exp_avg")}
        seen.append((len(night.reader), night.mean_loss, moments))

    (few, loss_one, one), (many, loss_two, two) = seen
    assert few < many
    assert loss_one == pytest.approx(loss_two, rel=1e-5)
    for name, moment in one.items():
        assert torch.allclose(moment, two[name], atol=1e-6), name


def test_position_weights_come_from_the_vocabulary(packs, users, tmp_path):
    """Named values weigh what the config says, an unnamed or unknown one weighs 1; the night trains with them."""
    file = vocabulary_file(tmp_path, "surface", {"0": 3, "1": 4, "9": -1})
    settings = {"position_feature": "surface", "position_weights": {"0": 0.5, "1": 2.0, "9": 7.0, "none": 8.0}}
    pack = packs.pack("p", users, bound=BOUND)
    run = packs.run(pack, "c", settings=settings, vocabulary_files={"surface": file})

    weighting = weighting_of(run, {"bound": None})

    assert weighting.position_weights[:6].tolist() == [1, 1, 1, 0.5, 2, 1]
    targets = np.concatenate([u.rows["surface"][u.supervise == 1][u.label_known[u.supervise == 1] > 0] for u in users])
    night = loop.Night(run)
    total = sum(night._step_weight([number]) for number in range(len(night.reader)))
    assert total == pytest.approx(float(weighting.position_weights[targets].sum()))
    assert loop.train(run, quiet)["step"] > 0


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"half_life_days": 2.0}, "train.half_life_days"),
        ({"position_feature": "slot", "position_weights": {"0": 2.0}}, "train.position_feature"),
    ],
    ids=["no-bound", "no-table"],
)
def test_what_cannot_be_weighted_is_refused_by_name(packs, users, settings, key):
    """A half-life without a cutoff, or a position that the model has no table of, is a config error."""
    run = packs.run(packs.pack("p", users, bound=BOUND), "c", settings=settings)

    with pytest.raises(ConfigError) as raised:
        weighting_of(run, {"bound": None})
    assert raised.value.where == key


def test_negative_sampling_is_undone_by_a_constant():
    """Kept share f: the log-odds fitted on the sample, less the offset, are those of the whole data, for every action."""
    assert logit_offset({}) == 0.0
    assert logit_offset({"negative_fraction": 1.0}) == 0.0
    offset = logit_offset({"negative_fraction": 0.1})
    positives, negatives = 40, 9000
    fitted = math.log(positives / (negatives * 0.1))

    assert fitted - offset == pytest.approx(math.log(positives / negatives))


def test_the_offset_moves_the_loss_and_not_the_model(packs, users):
    """A pack that says it was sampled is trained with shifted logits: the first loss is that of the shifted model."""
    whole = packs.pack("whole", users)
    sampled = packs.edit(packs.pack("sampled", users), negative_fraction=0.1)
    losses = []
    for pack in (whole, sampled):
        night = loop.Night(packs.run(pack, f"c-{pack.name}"))
        with torch.no_grad():
            for name, parameter in night.model.named_parameters():
                if name.startswith("head.logits"):
                    parameter.zero_()
        night.step([0], 1.0, loop.Attribution(night.device, 256))
        losses.append((night.mean_loss, night))

    batch = losses[0][1].reader.batch(0)
    target = batch.supervise.numpy() != 0
    bits = np.stack([batch.label_known.numpy()[target] >> b & 1 for b in (0, 1)])
    labels = np.stack([batch.labels.numpy()[target] >> b & 1 for b in (0, 1)])
    for (loss, _), logit in zip(losses, (0.0, math.log(10)), strict=True):
        bce = np.logaddexp(0, logit) - labels * logit
        assert loss == pytest.approx(float((bce * bits).sum(axis=0).mean()), rel=1e-5)
    assert all(a != b for a, b in pairwise([loss for loss, _ in losses]))


def test_replayed_targets_are_trained_on_and_left_out_of_the_metrics(packs, users):
    """They change the weights and the denominator; train/count counts the due ones alone, as the index does."""
    again = [dataclasses.replace(u, supervise=u.supervise * (1 + i % 2)) for i, u in enumerate(users)]
    pack = packs.pack("p", again, bound=BOUND)

    state = loop.train(packs.run(pack, "c"), quiet)

    index = loop.PackReader(pack).index
    due = [u for i, u in enumerate(users) if i % 2 == 0]
    assert state["metrics"]["train/count/click"] == sum(int((u.label_known & 1).sum()) for u in due)
    assert index["num_supervised"] == sum(int((u.label_known > 0).sum()) for u in due)
    assert index["num_replayed"] > 0
    assert sum(index["batch_weights"]["token"]) == index["num_supervised"] + index["num_replayed"]
    alone = loop.train(packs.run(packs.pack("q", due, bound=BOUND), "d"), quiet)
    assert alone["digest"] != state["digest"]


def test_f25_batches_without_a_due_event_leave_no_trace(packs, users):
    """Half-life on: a batch without a due event adds 0 loss and 0 gradient; a step of such batches is skipped (F25)."""
    empty = [dataclasses.replace(u, label_known=u.label_known * 0, labels=u.labels * 0) for u in users]
    pack = packs.pack("p", empty, bound=BOUND)
    night = loop.Night(packs.run(pack, "c", settings={"half_life_days": 1.0}))
    before = {name: p.clone() for name, p in night.model.named_parameters()}

    night.step(range(len(night.reader)), 1.0, loop.Attribution(night.device, 256))

    assert night.global_step == 0
    assert night.mean_loss is None
    assert all(torch.equal(p, before[name]) for name, p in night.model.named_parameters())
