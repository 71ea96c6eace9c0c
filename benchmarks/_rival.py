"""The loop most teams write: users padded to the longest of a batch, dense embeddings, default AdamW. The baseline of `training`.

The same model as ours (pre-LN, RoPE, softmax attention, SwiGLU, one hidden layer above) in plain torch, less the history
counts, on the same tokens. Kind to the rival: features, action states and gaps are computed beforehand, the head runs on
targets alone, and where no mask is needed (padding on the right, causal) none is given.
Dims: `B` users, `L` padded length, `D` width, `H` heads, `K` head dim, `F` features, `N` targets, `A` actions, `T` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gr_core.data.batches import PackReader

Longs = npt.NDArray[np.int64]
Batching = Literal["random", "bucketed", "equal"]

_NUM_GAPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Users:
    """A pack's tokens end to end and where each user's begin."""

    rows: Longs
    """Table rows, [T, F]."""
    states: npt.NDArray[np.float32]
    """Per action set, unset, unknown, and whether it is a target, [T, 3 A + 1]."""
    gaps: Longs
    """Log-bucketed gap to the token before, [T]."""
    is_target: npt.NDArray[np.bool_]
    """[T]."""
    labels: npt.NDArray[np.float32]
    """[T, A]."""
    starts: Longs
    """First token of each user, [S]."""
    lengths: Longs
    """[S]."""

    def cut(self, length: int) -> Users:
        """Return the same tokens as users of one length each; the last ten of each are its targets."""
        starts = np.arange(0, len(self.gaps) - length + 1, length)
        is_target = np.zeros(len(self.gaps), np.bool_)
        for back in range(1, min(10, length) + 1):
            is_target[starts + length - back] = True
        return Users(
            rows=self.rows,
            states=self.states,
            gaps=self.gaps,
            is_target=is_target,
            labels=self.labels,
            starts=starts,
            lengths=np.full(len(starts), length),
        )


def read_users(reader: PackReader) -> Users:
    """Copy a pack into memory as users."""
    batches = list(reader)
    actions = np.concatenate([batch.actions.numpy() for batch in batches])
    known = np.concatenate([batch.known.numpy() for batch in batches])
    labels = np.concatenate([batch.labels.numpy() for batch in batches])
    time = np.concatenate([batch.time.numpy() for batch in batches])
    bits = np.arange(len(reader.index["actions"]), dtype=np.int32)
    is_target = np.concatenate([batch.supervise.numpy() for batch in batches]) == 1
    is_set, is_known = (actions[:, None] >> bits & 1) == 1, (known[:, None] >> bits & 1) == 1
    states = np.stack([is_known & is_set, is_known & ~is_set, ~is_known], axis=2).reshape(len(actions), -1)
    states[is_target] = False
    gap = np.diff(time, prepend=time[:1]).clip(0) / 1e6
    starts = np.asarray(reader.index["segment_starts"], np.int64)
    return Users(
        rows=np.stack(
            [np.concatenate([batch.rows[name].numpy() for batch in batches]) for name in reader.features], axis=1
        ).astype(np.int64),
        states=np.concatenate([states, is_target[:, None]], axis=1).astype(np.float32),
        gaps=np.minimum(1 + (2 * np.log2(1 + gap)).astype(np.int64), _NUM_GAPS - 1),
        is_target=is_target,
        labels=(labels[:, None] >> bits & 1).astype(np.float32),
        starts=starts[:-1],
        lengths=np.diff(starts),
    )


class _Block(nn.Module):
    """Pre-LN transformer block on [B, L, D]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention, self.norm_feedforward = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor | None) -> Tensor:
        size = (x.shape[0], x.shape[1], 3, self.heads, -1)
        q, k, v = self.qkv(self.norm_attention(x)).view(size).permute(2, 0, 3, 1, 4)
        q, k = _rotate(q, angles), _rotate(k, angles)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        gate, up = self.gate_up(self.norm_feedforward(x)).chunk(2, dim=-1)
        return x + F.dropout(self.down(F.silu(gate) * up), self.dropout, self.training)


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(-2)


class PaddedModel(nn.Module):
    """The recommender on padded users.

    Args:
        width: D.
        layers: Blocks.
        heads: H.
        num_rows: Rows of each feature's table, [F].
        num_actions: A.
        dropout: After attention and feed-forward.
        one_table: All features' rows end to end in one table, read by one lookup.
    """

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        num_rows: list[int],
        num_actions: int,
        dropout: float,
        *,
        one_table: bool = False,
    ) -> None:
        super().__init__()
        self.one_table = one_table
        self.register_buffer("offsets", torch.tensor([0, *num_rows[:-1]]).cumsum(0))
        num_rows = [sum(num_rows)] if one_table else num_rows
        self.tables = nn.ModuleList(nn.Embedding(rows, width, padding_idx=0) for rows in num_rows)
        self.states = nn.Linear(3 * num_actions + 1, width, bias=False)
        self.gap = nn.Embedding(_NUM_GAPS, width)
        self.blocks = nn.ModuleList(_Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.bottom = nn.Linear(2 * width, 2 * width)
        self.logits = nn.Linear(2 * width, num_actions)
        half = width // heads // 2
        self.register_buffer("frequency", 10_000.0 ** (-torch.arange(half) / half))

    def forward(self, rows: Tensor, states: Tensor, gaps: Tensor, targets: Tensor, mask: Tensor | None) -> Tensor:
        """Return logits, [N, A].

        Args:
            rows: [B, L, F].
            states: [B, L, 3 A + 1].
            gaps: [B, L].
            targets: Flat places of the targets, [N].
            mask: [B, 1, L, L] bool, true = attends; None: plainly causal.
        """
        if self.one_table:
            item = self.tables[0](rows + self.offsets).sum(dim=-2)
        else:
            item = sum(table(rows[..., place]) for place, table in enumerate(self.tables))
        x = item + self.states(states) + self.gap(gaps)
        angle = torch.arange(rows.shape[1])[:, None] * self.frequency
        angles = torch.complex(angle.cos(), angle.sin())
        for block in self.blocks:
            x = block(x, angles, mask)
        taken = torch.cat([self.norm(x).flatten(0, 1)[targets], item.flatten(0, 1)[targets]], dim=1)
        logits: Tensor = self.logits(F.silu(self.bottom(taken)))
        return logits


class Rival:
    """Trains the padded model on users, batch after batch.

    Args:
        users: What to train on.
        model: The model.
        batching: random: users as they come, masked as most teams do (key padding and causal); bucketed: users of like
            lengths (all users sorted by length, cut, the batches shuffled); equal: users of one length.
        batch_users: B.
        seed: Of the shuffles.
        masked: Key padding and causal mask for attention; None: for random batches only.
        fused: AdamW(fused=True); False: torch's default.
    """

    def __init__(
        self,
        users: Users,
        model: PaddedModel,
        batching: Batching,
        *,
        batch_users: int = 64,
        seed: int = 0,
        masked: bool | None = None,
        fused: bool = False,
    ) -> None:
        self.users, self.model = users, model
        self.masked = batching == "random" if masked is None else masked
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)
        order = np.random.default_rng(seed).permutation(len(users.lengths))
        if batching == "bucketed":
            order = order[np.argsort(users.lengths[order], kind="stable")]
        self._batches = np.split(order, np.arange(batch_users, len(order), batch_users))
        self._rng = np.random.default_rng(seed + 1)
        self._next = self._numbers()

    @property
    def num_batches(self) -> int:
        """Batches of all users."""
        return len(self._batches)

    def _numbers(self) -> Iterator[int]:
        while True:
            yield from self._rng.permutation(len(self._batches)).tolist()

    def spread(self, count: int) -> Callable[[], int]:
        """Return work that trains `count` batches spread evenly over all lengths, others at each call; its real tokens."""
        places = np.arange(count) * len(self._batches) / count
        calls = iter(range(1 << 30))

        def work() -> int:
            shift = int(0.618 * next(calls) * len(self._batches) / count)
            return sum(self.step(self._batches[(int(place) + shift) % len(self._batches)]) for place in places)

        return work

    def some(self, count: int) -> Callable[[], int]:
        """Return work that trains the next `count` batches in random order; it returns their real tokens."""
        return lambda: sum(self.step(self._batches[next(self._next)]) for _ in range(count))

    def step(self, numbers: Longs) -> int:
        """Train one batch of users; returns what `amount` says of it."""
        given, labels = self.inputs(numbers)
        logits = self.model(*given)
        self._optimizer.zero_grad()
        F.binary_cross_entropy_with_logits(logits, labels).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.after_step(logits.detach(), labels)
        return self.amount(numbers)

    def amount(self, numbers: Longs) -> int:
        """Return the real tokens of a batch."""
        return int(self.users.lengths[numbers].sum())

    def after_step(self, logits: Tensor, labels: Tensor) -> None:
        """Do what a loop does besides: nothing here."""

    def inputs(self, numbers: Longs) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]:
        """Return what the model takes for a batch of users, and the labels of its targets."""
        users = self.users
        lengths = users.lengths[numbers]
        column = np.arange(int(lengths.max()))
        valid = column < lengths[:, None]
        place = np.where(valid, users.starts[numbers][:, None] + column, 0)
        targets = np.flatnonzero(users.is_target[place] & valid)
        labels = torch.from_numpy(users.labels[place.ravel()[targets]])
        mask = None
        if self.masked:
            causal = np.tri(len(column), dtype=np.bool_)
            mask = torch.from_numpy((causal & valid[:, None, :])[:, None])
        rows, states, gaps = self.gather(numbers, place, valid)
        return (rows, states, gaps, torch.from_numpy(targets), mask), labels

    def gather(self, numbers: Longs, place: Longs, valid: npt.NDArray[np.bool_]) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, states and gaps of a batch, [B, L, ...], by one fancy index each."""
        del numbers
        rows = self.users.rows[place]
        rows[~valid] = 0
        return (
            torch.from_numpy(rows),
            torch.from_numpy(self.users.states[place]),
            torch.from_numpy(self.users.gaps[place]),
        )
