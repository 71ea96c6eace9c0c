"""From sequences to segments of a pack: features become embedding rows, frames become flat numpy columns.

In: one bucket's `Sequences` and the vocabulary. Out: `packfile.Segments`; packfile makes batches of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from gr_core.data.packfile import Segments
from gr_core.data.sequences import Sequences
from gr_core.data.vocabulary import Vocabulary, encode
from gr_core.schema import pack_schema


def to_segments(
    sequences: Sequences, vocabulary: Vocabulary, features: Sequence[str], item_features: Sequence[str]
) -> Segments:
    """Encode one bucket's sequences.

    Args:
        sequences: Tokens with features as text, and their segments.
        vocabulary: Rows of all features.
        features: Feature columns in table order.
        item_features: Those of them that history tokens have too.

    Returns:
        Segments in the sequences' order.
    """
    tokens = encode(sequences.tokens, vocabulary, features, item_features)
    return Segments(
        columns={name: tokens[name].to_numpy() for name in pack_schema(features).names},
        lengths=sequences.segments["length"].to_numpy(),
        users=sequences.segments["user_id"].to_list(),
        event_ids=tokens["event_id"].drop_nulls().to_arrow(),
    )
