"""What a run refuses of its pack before anything trains."""

from __future__ import annotations

import dataclasses

import pytest

from gr_core.data.batches import PackReader
from gr_core.errors import ConfigError
from gr_core.model.settings import AttentionConfig
from gr_core.train.belonging import check_pack


def test_fa3_is_refused_where_interleaved_segments_are_not_causal(packs, users):
    """One segment that plain causal attention would read too much of is enough; causal ones and no demand are not."""
    pack = packs.pack("p", users)
    index = PackReader(pack).index
    run = dataclasses.replace(packs.run(pack, "c"), attention=AttentionConfig(require="fa3"))

    check_pack(run, {**index, "tokens": "interleaved", "segment_causal": [True, True]})
    check_pack(packs.run(pack, "c"), {**index, "tokens": "interleaved", "segment_causal": [True, False]})
    with pytest.raises(ConfigError, match=r"1 of 2 in .* are not") as raised:
        check_pack(run, {**index, "tokens": "interleaved", "segment_causal": [True, False]})
    assert raised.value.where == "attention.require"
