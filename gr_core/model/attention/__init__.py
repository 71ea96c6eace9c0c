"""Attention paths behind one plan a batch: `Layout` in, an `AttentionPlan` of the chosen path out."""

from __future__ import annotations

from gr_core.model.attention.bucketed import BucketedPlan, bucketed_planner, plan_bucketed
from gr_core.model.attention.choose import ChosenAttention, Circumstances, choose_attention
from gr_core.model.attention.dense import DensePlan, plan_dense
from gr_core.model.attention.plan import AttentionPlan, Layout, Planner, Pointwise

__all__ = [
    "AttentionPlan",
    "BucketedPlan",
    "ChosenAttention",
    "Circumstances",
    "DensePlan",
    "Layout",
    "Planner",
    "Pointwise",
    "bucketed_planner",
    "choose_attention",
    "plan_bucketed",
    "plan_dense",
]
