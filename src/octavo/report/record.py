"""What a conversion or an evaluation leaves beside its page, so that the page can be written again."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONVERSION = "conversion.json"
EVALUATION = "evaluation.json"
COMPARISON = "comparison.json"


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record at once; numbers that are not finite become null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(_finite(record), allow_nan=False), encoding="utf8")
    os.replace(draft, path)


def read_record(path: Path, needed: tuple[str, ...]) -> dict[str, Any]:
    """Read a record that has at least these names."""
    try:
        record = json.loads(path.read_text("utf8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; run the command that wrote it again") from error
    lacking = [name for name in needed if not isinstance(record, dict) or name not in record]
    if lacking:
        raise ValueError(f"{path} is damaged: it has no {lacking[0]!r}; run the command that wrote it again")
    return record


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
