"""The weights of a run's last checkpoint that fit their number format worst."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.qarray.histogram import WORST, histogram
from octavo.report.heat import place
from octavo.report.run import Run

_MOST = 1 << 25
"""Without telemetry every weight is quantized to find the worst, unless they are more values than this."""


def worst_weights(run: Run) -> tuple[list[dict[str, Any]], str]:
    """Histograms of the worst weights, and a sentence about where they come from or why there are none."""
    if run.precision == "float":
        return [], "The run was in float."
    if not (run.directory / "checkpoints").is_dir():
        return [], "There is no checkpoint to take weights from."
    # Here and not above: a page about metrics alone needs neither flax nor orbax.
    from octavo.pretrained import open_model
    from octavo.pretrained.convert import param_quantizers, quantize_array
    from octavo.qarray import QArray

    try:
        source = open_model(str(run.directory))
        hows = param_quantizers(source.config, source.rules)
        chosen = _chosen(run.telemetry, hows, {path: leaf.shape for path, leaf in source.leaves.items()})
        found = []
        for path in chosen:
            x = source.leaves[path].load()
            if not isinstance(x, QArray):
                codes, db = quantize_array(np.asarray(x), hows[path])
                found.append((db, path, x, codes))
                found = sorted(found, key=lambda entry: entry[0])[:WORST]
    except (ValueError, OSError, ImportError) as error:
        return [], f"The weights of the last checkpoint cannot be read: {error}"
    if not found:
        return [], "The rules quantize no weight of the last checkpoint, or there are too many weights to look at."
    drawn = [histogram(path, np.asarray(x), q, sqnr_db=db) for db, path, x, q in found]
    step = source.origin.get("step")
    return drawn, f"Weights with the lowest signal to noise, from the checkpoint of step {step}."


def _chosen(telemetry: Sequence[Mapping[str, Any]], hows: Mapping[str, Any], shapes: Mapping[str, Any]) -> list[str]:
    """The paths to look at: the worst by telemetry, or all where there is none and they are not too many."""
    quantized = {place(path): path for path in hows if path in shapes}
    ranked = []
    for site, operands in (telemetry[-1].get("sites") or {}).items() if telemetry else ():
        for turn, db in turns(operands.get("rhs", {}).get("sqnr_db")):
            if (path := quantized.get(place(site, turn))) is not None:
                ranked.append((db, path))
    if ranked:
        return list(dict.fromkeys(path for _, path in sorted(ranked)))[: 2 * WORST]
    total = sum(math.prod(shapes[path]) for path in quantized.values())
    return list(quantized.values()) if total <= _MOST else []


def turns(value: Any) -> list[tuple[tuple[int, ...], float]]:
    """The finite numbers in nested lists, each with its place: one for each turn of the loops around a product.

    >>> turns([1.5, None]), turns(2.0)
    ([((0,), 1.5)], [((), 2.0)])
    """
    if isinstance(value, list):
        return [((i, *at), x) for i, part in enumerate(value) for at, x in turns(part)]
    return [((), float(value))] if isinstance(value, int | float) and math.isfinite(value) else []
