"""Figures with goals and the conditions they were measured under; the standard library alone (see `_report`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured figure."""

    value: float | None
    """None where it is not defined; misses every goal."""
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    baseline: float | None = None

    @property
    def goal(self) -> float | None:
        """The bound, whichever side it is on."""
        return self.at_least if self.at_least is not None else self.at_most

    @property
    def is_missed(self) -> bool:
        """Tell whether there is a goal and the value does not reach it."""
        if self.goal is None:
            return False
        if self.value is None:
            return True
        return self.value < self.goal if self.at_least is not None else self.value > self.goal


@dataclass(kw_only=True, slots=True)
class Report:
    """Figures and conditions, as they are measured."""

    figures: dict[str, Figure] = field(default_factory=dict)
    conditions: dict[str, Any] = field(default_factory=dict)

    def to_json(self, *, enforce: bool = True) -> dict[str, Any]:
        """Return the benchmark's one object (design section 7); without `enforce` no figure has a goal."""
        figures = {
            name: {
                "value": figure.value,
                "goal": figure.goal if enforce else None,
                "baseline": figure.baseline,
                "unit": figure.unit,
            }
            for name, figure in self.figures.items()
        }
        sides = {
            name: "at least" if figure.at_least is not None else "at most"
            for name, figure in self.figures.items()
            if figure.goal is not None and enforce
        }
        return {"figures": figures, "conditions": {**self.conditions, "goals": sides}}

    def missed(self) -> list[str]:
        """Return the names of the figures that miss their goal."""
        return [name for name, figure in self.figures.items() if figure.is_missed]
