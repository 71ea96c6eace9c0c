"""What a logit may depend on: example 2's flips, the as-of rule, other users, the place in a pack; and that it learns."""

import dataclasses

import numpy as np
import pytest
import torch

from gr_core.model.losses import batch_loss, token_losses


@pytest.fixture
def example_2(tokens):
    """Return users A and B of example 2; features are made up, everything else stands there."""

    def user(name, items, actions, known, time, num_targets, labels, label_known):
        total = len(items)
        history = total - num_targets
        return tokens.User(
            name=name,
            rows={
                "item_id": np.asarray(items),
                "kind": np.asarray(items) % 5 + 3,
                "surface": np.asarray([0] * history + [3] * num_targets),
            },
            actions=np.asarray(actions),
            known=np.asarray(known),
            labels=np.asarray(labels),
            label_known=np.asarray(label_known),
            time=np.asarray(time) * tokens.US,
            supervise=np.asarray([0] * history + [1] * num_targets, np.uint8),
            weight=np.ones(total),
        )

    a = user(
        "A",
        [6, 7, 8, 6, 7, 7, 9],
        [1, 0, 2, 2, 1, 0, 0],
        [3, 3, 3, 3, 3, 0, 0],
        [2800, 2900, 3000, 4000, 6800, 5000, 7000],
        2,
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 3, 3],
    )
    b = user("B", [6, 9, 10], [0, 0, 0], [3, 0, 0], [3800, 3000, 4000], 2, [0, 1, 0], [0, 3, 1])
    return [a, b]


def test_example_2_intervals(tokens, example_2):
    """The users' intervals are those of the table, counted from the first token of the batch."""
    batch = tokens.make_batch(example_2)

    assert batch.lo.tolist() == [0, 0, 0, 0, 0, 0, 0, 7, 7, 7]
    assert batch.hi.tolist() == [0, 1, 2, 3, 4, 4, 5, 7, 7, 8]


FLIPS = {
    "a1's click": (0, 0, 0b01, {0, 1}),
    "a1's late like": (0, 3, 0b10, {0, 1}),
    "a2": (0, 1, 0b11, {0, 1}),
    "a3": (0, 2, 0b11, {0, 1}),
    "a4": (0, 4, 0b11, {1}),
    "b1": (1, 0, 0b11, {3}),
}


@pytest.mark.parametrize(("user", "token", "bits", "changed"), FLIPS.values(), ids=FLIPS.keys())
def test_example_2_flips(tokens, example_2, user, token, bits, changed):
    """Flipping the actions of an event changes exactly the target logits of the table."""
    net = tokens.Net()
    before = net.logits(example_2)
    value = int(example_2[user].actions[token]) ^ bits
    flipped = [u.change("actions", token, value) if i == user else u for i, u in enumerate(example_2)]

    moved = (net.logits(flipped) != before).any(dim=1)

    assert set(moved.nonzero().squeeze(1).tolist()) == changed


@pytest.mark.parametrize(("user", "token"), [(0, 5), (0, 6), (1, 1), (1, 2)], ids=["a4", "a5", "b2", "b3"])
def test_example_2_labels_and_other_targets_change_nothing(tokens, example_2, user, token):
    """A target's own labels reach no logit, and its item reaches its own logit only."""
    net = tokens.Net()
    before = net.logits(example_2)
    relabelled = [
        u.change("labels", token, 3 - int(u.labels[token])) if i == user else u for i, u in enumerate(example_2)
    ]
    other = example_2[user]
    rows = {**other.rows, "item_id": other.rows["item_id"].copy()}
    rows["item_id"][token] = 20
    replaced = [dataclasses.replace(u, rows=rows) if i == user else u for i, u in enumerate(example_2)]

    assert torch.equal(net.logits(relabelled), before)
    moved = (net.logits(replaced) != before).any(dim=1).nonzero().squeeze(1).tolist()
    assert moved == [{(0, 5): 0, (0, 6): 1, (1, 1): 2, (1, 2): 3}[user, token]]


def test_as_of(tokens):
    """200 targets, each rebuilt from only what was visible before it was shown: the same logits within 1e-5."""
    people = [tokens.random_user(f"u{i}", 20 + i, 10, seed=i, max_history=25) for i in range(20)]
    net = tokens.Net()
    together = net.logits(people)

    alone = []
    for user in people:
        for target in np.flatnonzero(user.supervise):
            keep = (user.supervise == 0) & (user.time < user.time[target])
            keep[target] = True
            cut = {f.name: getattr(user, f.name) for f in dataclasses.fields(user) if f.name not in ("name", "rows")}
            cut = {name: value[keep] if isinstance(value, np.ndarray) else value for name, value in cut.items()}
            alone.append(tokens.User(name="x", rows={k: v[keep] for k, v in user.rows.items()}, **cut))
    rebuilt = torch.cat([net.logits([user]) for user in alone])

    assert len(rebuilt) == 200
    assert torch.allclose(rebuilt, together, atol=1e-5)


@pytest.mark.parametrize("changed", range(9))
def test_f1_other_users_values_change_nothing_at_equal_lengths(tokens, users, changed):
    """Another user with other rows, actions and times but equal lengths moves no logit, exactly (case F1).

    Whoever it is, the first included; and one's times lie before the next one's, so that a gap over the border shows.
    """
    net = tokens.Net()
    days = 86_400 * tokens.US
    users = [dataclasses.replace(user, time=user.time + (10 + 2 * i) * days) for i, user in enumerate(users)]
    targets = int(users[changed].supervise.sum())
    other = tokens.random_user("other", len(users[changed].time) - targets, targets, seed=100 + changed)
    mine = np.repeat(np.arange(len(users)) == changed, [int(user.supervise.sum()) for user in users])

    before = net.logits(users)
    after = net.logits([other if i == changed else user for i, user in enumerate(users)])

    assert torch.equal(before[~mine], after[~mine])
    assert not torch.allclose(before[mine], after[mine], atol=1e-3)


def test_f1_other_users_lengths_change_at_most_rounding(tokens, users):
    """Another user of another length moves no logit by more than 1e-5 (case F1)."""
    net = tokens.Net()
    count = int(users[-1].supervise.sum())
    longer = tokens.random_user("longer", 90, 3, seed=5)

    before, after = net.logits(users)[:-count], net.logits([*users[:-1], longer])[:-3]

    assert torch.allclose(before, after, atol=1e-5)


def test_f1_the_loss_of_a_pack_is_the_weighted_sum_of_its_parts(tokens, users):
    """loss(all) * weight = loss(some) * weight + loss(rest) * weight, within 1e-5 (case F1)."""
    net = tokens.Net()

    def total(some):
        inputs = net.builder.build(tokens.make_batch(some))
        losses = token_losses(net.logits(some), inputs.labels, inputs.known, torch.tensor([1.0, 0.5]))
        weight = float(inputs.weights.sum())
        return float(batch_loss(losses, inputs.weights, weight)), weight

    (loss, weight), first, rest = total(users), total(users[:4]), total(users[4:])

    assert loss * weight == pytest.approx(first[0] * first[1] + rest[0] * rest[1], rel=1e-5)


def test_f17_the_place_in_a_pack_changes_nothing(tokens, users):
    """The same user alone, second and third in a pack has equal logits within 1e-5 (case F17)."""
    net = tokens.Net()
    user, others = users[6], [users[3], users[8]]
    alone = net.logits([user])
    second = net.logits([others[0], user])[2:]
    third = net.logits([*others, user])[12:]

    assert torch.allclose(alone, second, atol=1e-5)
    assert torch.allclose(alone, third, atol=1e-5)


def test_order_of_history_matters(tokens):
    """The same history in another order gives other logits: the model reads sequences, not bags."""
    net = tokens.Net()
    user = tokens.random_user("a", 20, 1, seed=4)
    user = dataclasses.replace(user, time=np.append(np.arange(20), 100) * tokens.US)
    order = np.append(np.random.default_rng(0).permutation(20), 20)
    moved = {name: getattr(user, name)[order] for name in ("actions", "known")}
    shuffled = dataclasses.replace(user, rows={k: v[order] for k, v in user.rows.items()}, **moved)

    assert not torch.allclose(net.logits([user]), net.logits([shuffled]), atol=1e-4)
