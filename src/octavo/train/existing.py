"""Whether the files that a configuration names are there and can be read.

Apart from the checks of `Config` itself, which stays what it is when a file has moved.
"""

import glob
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from octavo.rules import as_rules, mixed_precision
from octavo.train.keys import Problem

_PATHS = ("load_parameters_path", "quant_cfg_path", "quantization_rules_path")
_READERS: dict[str, Callable[[Path], Any]] = {"quant_cfg_path": mixed_precision, "quantization_rules_path": as_rules}


def missing_files(values: Mapping[str, Any]) -> list[Problem]:
    """What is wrong with the files of checked values; remote paths (`gs://...`) are not looked at."""
    names = list(_PATHS)
    if values["dataset_type"] in ("text", "tokens"):
        names += ["dataset_path", "eval_dataset_path"]
    if values["tokenizer_type"] == "huggingface":
        names.append("tokenizer_path")
    problems = []
    for name in names:
        path = values[name]
        if not path or "://" in path:
            continue
        # A pattern is a path too: data may be many files.
        if not Path(path).expanduser().exists() and not glob.glob(str(Path(path).expanduser()), recursive=True):
            problems.append(Problem((name,), f"{name}={path}: there is no such file or directory"))
        elif name in _READERS:
            try:
                _READERS[name](Path(path).expanduser())
            except (ValueError, OSError, yaml.YAMLError) as error:
                problems.append(Problem((name,), f"{name}={path}: {error}"))
    return problems
