"""What ranks send: HSDP less across machines than FSDP, and what DDP and FSDP send by calculation."""

import torch

from benchmarks import _ours
from benchmarks._figures import Report
from benchmarks._links import measure_links
from gr_core.model.recommender import new_recommender
from gr_core.model.settings import ModelConfig


def test_hsdp_sends_less_across_than_fsdp(tmp_path):
    """Four ranks, two and two near: HSDP's traffic stays inside; FSDP gathers twice and scatters once over all four."""
    report = Report()
    found = measure_links(report, tmp_path, steps=1, width=32, layers=2)

    fsdp, hsdp, ddp = found["fsdp_1x4"], found["hsdp_2x2"], found["ddp_4"]
    assert hsdp.across < fsdp.across
    assert report.figures["links/across_share_of_fsdp"].value < 1
    features = {"item_features": _ours.ITEM_FEATURES, "context_features": _ours.CONTEXT_FEATURES}
    model = new_recommender(ModelConfig(width=32, num_layers=2, **features), 2, 2, seed=0)
    size = sum(parameter.numel() for parameter in model.parameters()) * torch.float32.itemsize
    # a ring over four: an all-reduce hands 2 * 3/4 of the gradients on at each of its four places, two of them across
    assert 0.9 < (ddp.across - ddp.tables_across) / (2 * 2 * 0.75 * size) < 1.1
    # the root's parameters stay gathered between forward and backward, so two to three passes over all of them
    assert 2 * 2 * 0.75 * size * 0.95 < fsdp.across - fsdp.tables_across < 3 * 2 * 0.75 * size * 1.3
    assert hsdp.tables_across > 0
