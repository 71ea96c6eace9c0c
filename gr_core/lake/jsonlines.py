"""Lines of JSON: their keys, which of them are records, and numbers that are not what the line says."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence

import polars as pl

_SCALAR = r':\s*(?:"(?:[^"\\]|\\.)*"|[-+.0-9eE]+|true|false|null)'  # a key's value, where it is no list and no record
# a number from about 2^53 on that is written as a float, so that not every integer is its own (case C7)
_INEXACT = r"-?(?:(?:9\d{15}|\d{17,})(?:\.\d|[eE]\+?\d)|\d+(?:\.\d+)?[eE]\+?(?:1[5-9]|[2-9]\d|\d{3,}))"


def keys(lines: list[str]) -> list[str]:
    """Return the keys of any record, parsing one line of each shape: lines differ in values more than in keys."""
    texts = pl.Series("line", [line for line in lines if is_utf8(line)], dtype=pl.String)
    shape = pl.col("line").str.replace_all(_SCALAR, ":")
    found: dict[str, None] = {}
    for line in texts.to_frame().unique(shape, keep="first", maintain_order=True)["line"]:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            found |= dict.fromkeys(record if isinstance(record, dict) else [])
    return list(found)


def rounded(lines: pl.Series, names: Sequence[str]) -> list[int]:
    """Return the places of JSON lines that give one of the names a float beyond the integers that floats tell apart."""
    if not names:
        return []
    quoted = "|".join(re.escape(json.dumps(name, ensure_ascii=False)) for name in names)
    found = []
    for place in lines.str.contains(rf"(?:{quoted})\s*:\s*{_INEXACT}").arg_true():
        with contextlib.suppress(ValueError, RecursionError):
            values = map(json.loads(lines[place]).get, names)
            if any(isinstance(value, float) and abs(value) >= 2**53 for value in values):
                found.append(place)
    return found


def is_utf8(text: str) -> bool:
    """Tell whether text that was decoded with surrogate escapes was UTF-8 throughout."""
    return text.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in text)


def is_object(line: str) -> bool:
    """Tell whether a line is a JSON object by the standard: NaN and Infinity are none of its numbers."""
    try:
        return is_utf8(line) and isinstance(json.loads(line, parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(token: str) -> None:
    raise ValueError(f"{token} is no JSON")


def decodable(lines: list[str], record: pl.Struct) -> list[bool]:
    """Tell which lines Polars decodes, by halves: it refuses some that Python reads, such as a list for text."""
    try:
        pl.Series(lines, dtype=pl.String).str.json_decode(record)
    except pl.exceptions.ComputeError:
        if len(lines) == 1:
            return [False]
        half = len(lines) // 2
        return decodable(lines[:half], record) + decodable(lines[half:], record)
    return [True] * len(lines)
