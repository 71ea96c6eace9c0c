"""What a night refuses before anything is written: settings that this machine cannot honour."""

from __future__ import annotations

from pathlib import Path

import pytest

from gr_core.config import load_config
from gr_core.errors import ConfigError
from gr_core.stages import ingesting

WORLD = Path(__file__).parents[3] / "conf" / "world.toml"


@pytest.mark.parametrize("override", ["attention.require=fa3", "attention.require=varlen", "attention.path=flex"])
def test_an_attention_path_that_cannot_run_here_is_refused_by_name(
    override: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a CUDA device the key, the value and the remedy are named at preflight."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    key, _, value = override.partition("=")

    with pytest.raises(ConfigError, match=f"{key} = '{value}' cannot be met: .*on cpu; set attention"):
        ingesting.check_supported(load_config(WORLD, [override]))


@pytest.mark.parametrize("override", ["attention.path=dense", "attention.require=bucketed", "model.block=hstu"])
def test_what_runs_here_passes(override: str) -> None:
    """Paths of the CPU and every block are supported."""
    ingesting.check_supported(load_config(WORLD, [override]))
