"""JSON records of conversions, evaluations, comparisons and rollouts, from which their pages can be rendered again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo._io import atomic_write
from octavo.train.metrics import as_json

CONVERSION = "conversion.json"
EVALUATION = "evaluation.json"
COMPARISON = "comparison.json"
ROLLOUTS = "rollouts.json"
_FIELDS = {
    CONVERSION: ("name", "before", "after", "values", "tensors"),
    EVALUATION: ("model", "tokens", "perplexity", "loss"),
    COMPARISON: ("steps", "runs", "table"),
    ROLLOUTS: ("task", "runs"),
}


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record atomically; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, json.dumps(as_json(record), allow_nan=False))


def read_record(path: Path, kind: str) -> dict[str, Any]:
    """Read a record at a path or in a directory, and check that it has the fields of its kind."""
    path = path / kind if path.is_dir() else path
    try:
        record = json.loads(path.read_text("utf8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; run the command that wrote it again") from error
    lacking = [name for name in _FIELDS[kind] if not isinstance(record, dict) or name not in record]
    if lacking:
        raise ValueError(f"{path} is damaged: it has no {lacking[0]!r}; run the command that wrote it again")
    return record
