"""What ranks send: HSDP less across machines than FSDP, and what DDP and FSDP send by calculation."""

import torch

from benchmarks import _ours, _parts
from benchmarks._figures import Report
from benchmarks._links import measure_links
from gr_core.model.recommender import new_recommender
from gr_core.model.settings import ModelConfig


def test_hsdp_sends_less_across_than_fsdp(tmp_path):
    """Four ranks, two and two near: HSDP's traffic stays inside; FSDP gathers twice and scatters once over all four."""
    report = Report()
    measure_links(report, tmp_path, **_parts.QUICK["links"])

    sent = {name.removeprefix("links/"): figure.value for name, figure in report.figures.items()}
    fsdp, hsdp, ddp = (sent[f"{name}/across_bytes"] for name in ("fsdp_1x4", "hsdp_2x2", "ddp_4"))
    fsdp_tables, hsdp_tables, ddp_tables = (
        sent[f"{name}/tables_across_bytes"] for name in ("fsdp_1x4", "hsdp_2x2", "ddp_4")
    )
    assert hsdp < fsdp
    assert report.figures["links/across_share_of_fsdp"].value < 1
    features = {"item_features": _ours.ITEM_FEATURES, "context_features": _ours.CONTEXT_FEATURES}
    model = new_recommender(ModelConfig(width=32, num_layers=2, **features), 2, 2, seed=0)
    size = sum(parameter.numel() for parameter in model.parameters()) * torch.float32.itemsize
    # a ring over four: an all-reduce hands 2 * 3/4 of the gradients on at each of its four places, two of them across
    assert 0.9 < (ddp - ddp_tables) / (2 * 2 * 0.75 * size) < 1.1
    # the root's parameters stay gathered between forward and backward, so two to three passes over all of them
    assert 2 * 2 * 0.75 * size * 0.95 < fsdp - fsdp_tables < 3 * 2 * 0.75 * size * 1.3
    assert hsdp_tables > 0
