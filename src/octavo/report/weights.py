"""The weights of a run's last checkpoint with the largest quantization error."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from octavo.qarray.histogram import WORST, histogram
from octavo.report.layers import indexed, layer_and_op
from octavo.report.run import FLOAT, Run

# Without telemetry every weight is quantized to find the worst, unless they have more values than this.
_MOST_VALUES = 1 << 25


def worst_weights(run: Run) -> tuple[list[dict[str, Any]], str]:
    """Histograms of the worst weights, and a sentence about their source, or why there are none."""
    if run.precision == FLOAT:
        return [], "The run was in float."
    if not (run.directory / "checkpoints").is_dir():
        return [], "There is no checkpoint to take weights from."
    # Imported here: a page about metrics alone needs neither flax nor orbax.
    from octavo.pretrained import open_model
    from octavo.pretrained.convert import param_quantizers, quantize_array
    from octavo.qarray import QArray

    try:
        source = open_model(str(run.directory))
        quantizers = param_quantizers(source.config, source.rules)
        found = []
        for path in _candidates(run.telemetry, quantizers, {path: leaf.shape for path, leaf in source.leaves.items()}):
            x = source.leaves[path].load()
            if not isinstance(x, QArray):
                q, db = quantize_array(np.asarray(x), quantizers[path])
                found = sorted([*found, (db, path, np.asarray(x), q)], key=lambda entry: entry[0])[:WORST]
    except (ValueError, OSError, ImportError) as error:
        return [], f"The weights of the last checkpoint cannot be read: {error}"
    if not found:
        return [], "The rules quantize no weight of the last checkpoint, or there are too many weights to look at."
    step = source.origin.get("step")
    about = f"Weights with the lowest signal to noise, from the checkpoint of step {step}."
    return [histogram(path, x, q, sqnr_db=db) for db, path, x, q in found], about


def _candidates(
    telemetry: Sequence[Mapping[str, Any]], quantizers: Mapping[str, Any], shapes: Mapping[str, Any]
) -> list[str]:
    """The paths to look at: the worst by telemetry, or all if there is none and they are not too large."""
    quantized = {layer_and_op(path): path for path in quantizers if path in shapes}
    ranked = []
    for site, operands in (telemetry[-1].get("sites") or {}).items() if telemetry else ():
        for index, db in indexed(operands.get("rhs", {}).get("sqnr_db")):
            if (path := quantized.get(layer_and_op(site, index))) is not None:
                ranked.append((db, path))
    if ranked:
        return list(dict.fromkeys(path for _, path in sorted(ranked)))[: 2 * WORST]
    total = sum(math.prod(shapes[path]) for path in quantized.values())
    return list(quantized.values()) if total <= _MOST_VALUES else []
