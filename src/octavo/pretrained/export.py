"""Writing converted models: a registry of file formats, and the model card."""

import dataclasses
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo._io import atomic_write
from octavo._names import did_you_mean
from octavo.pretrained.budgeted import budget_formats, budget_options, budget_rules
from octavo.pretrained.calibrated import CalibrationData, calibrated_codes, distilled, split_method
from octavo.pretrained.card import model_card
from octavo.pretrained.convert import Summary, convert_model
from octavo.pretrained.model import PretrainedModel
from octavo.pretrained.weight_rules import TRAINED, weight_rules
from octavo.rules import QuantizationRule


@dataclasses.dataclass(frozen=True)
class Request:
    """What to convert a model to.

    Args:
      recipe: The format of weights, a recipe or a file of rules: see `weight_rules`.
      head: The format of the embedding table and the logits; by default what suits the file format.
      scale_dtype: The dtype of scales; by default what suits the file format.
      command: The command line, for the model card.
      replace: Whether to replace what is at the destination.
      log: Called with a line for each parameter.
      progress: Called with the progress of a calibration.
      data: The calibration text, for a recipe with a method such as `int4:gptq`.
      imatrix: An importance matrix for K-quants in GGUF: read, or with `data` written.
      bits: The mean of bits per weight of the layers, for a recipe of several formats such as `int3,int4,int8:gptq`, or
        `mixed:gptq`.
      mebibytes: Instead of `bits`, the size of all parameters in MiB.
      checkpoint: A directory for the statistics of the calibration, from which an interrupted one resumes.
      distill: Steps of training scales and norms on `data` for the outputs of the float model.
    """

    recipe: str
    head: str = ""
    scale_dtype: str = ""
    command: str = ""
    replace: bool = False
    log: Callable[[str], None] | None = None
    progress: Callable[[str], None] | None = None
    data: CalibrationData | None = None
    imatrix: Path | None = None
    bits: float | None = None
    mebibytes: float | None = None
    checkpoint: Path | None = None
    distill: int = 0


@dataclasses.dataclass(frozen=True)
class Export:
    """A converted model: a summary, its parameters by path as they are stored, and the rules if there are any."""

    summary: Summary
    params: Any
    """A mapping, or a function of the path for parameters that are read back from the file."""
    rules: tuple[QuantizationRule, ...] = ()
    command: str = ""
    costs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The predicted divergence by path, if formats were chosen by it."""


type Exporter = Callable[[PretrainedModel, Path, Request], Export]

_exporters: dict[str, Exporter] = {}


def register_exporter(name: str, exporter: Exporter) -> None:
    """Register a file format: a function that converts a model, writes it, and returns an `Export`."""
    if name in _exporters:
        raise ValueError(f"an exporter named {name!r} exists")
    _exporters[name] = exporter


def exporters() -> tuple[str, ...]:
    """The names of all file formats, sorted."""
    return tuple(sorted(_exporters))


def converting(
    write: Callable[[PretrainedModel, Export, Path], None], *, head: str = "", scale_dtype: str | None = None
) -> Exporter:
    """An exporter that converts all parameters by rules, and then writes them.

    Args:
      write: Writes the model.
      head: The format of the embedding table and the logits where the request has none.
      scale_dtype: The dtype of scales where the request has none. Trained rules keep their own.
    """

    def export(source: PretrainedModel, out: Path, request: Request) -> Export:
        recipe, method = split_method(request.recipe)
        trained = recipe == TRAINED or recipe.startswith("recipe:")
        scales = request.scale_dtype or (None if trained else scale_dtype)
        budget = {"bits": request.bits, "mebibytes": request.mebibytes}
        has_budget = request.bits is not None or request.mebibytes is not None
        if (method or has_budget or request.distill) and request.data is None:
            raise ValueError(
                f"{'--distill' if request.distill else request.recipe} needs text that the model would read: pass "
                "--data FILE"
            )
        if request.data is not None and not (method or request.distill):
            raise ValueError(
                f"--data is for a recipe with a method, such as {request.recipe}:gptq, and for --distill STEPS"
            )
        if request.imatrix is not None:
            raise ValueError("--imatrix is for K-quants in GGUF files: add --format gguf")
        options: dict[str, Any] = {"scale_dtype": scales, "log": request.log}
        costs: dict[str, float] = {}
        if has_budget:
            assert request.data is not None
            kept = {"scale_dtype": scales, "progress": request.progress, "checkpoint": request.checkpoint}
            choices = budget_options(source, budget_formats(recipe), request.data, **kept)
            rules, costs = budget_rules(source, choices, head=request.head or head, **budget, **options)
        else:
            rules = weight_rules(recipe, source.config, head=request.head or head, trained=source.rules)
        codes = None
        if method:
            assert request.data is not None
            options |= {"progress": request.progress, "checkpoint": request.checkpoint}
            codes = calibrated_codes(source, rules, request.data, method=method, **options)
        params, summary = convert_model(source, rules, scale_dtype=scales, log=request.log, codes=codes)
        if request.distill:
            assert request.data is not None
            params = distilled(source, params, rules, request.data, steps=request.distill, log=request.log)
        if request.replace and out.exists():
            shutil.rmtree(out) if out.is_dir() else out.unlink()
        done = Export(summary, params, rules, request.command, costs)
        try:
            write(source, done, out)
        except BaseException as error:
            shutil.rmtree(out, ignore_errors=True)  # not complete, as on a full disk
            if isinstance(error, (ValueError, OSError)) or not isinstance(error, Exception):
                raise
            first = str(error).partition("\n")[0]
            raise OSError(f"{out} could not be written: {first or type(error).__name__}") from error
        return done

    return export


def export_model(name: str, source: PretrainedModel, out: Path, request: Request) -> Export:
    """Convert a model and write it in a file format, with a model card.

    Args:
      name: One of `exporters()`.
      source: The model.
      out: A directory, or a file for formats that have one.
      request: What to convert it to.
    """
    if name not in _exporters:
        raise ValueError(f"--format {name}: {did_you_mean(name, _exporters)}one of {', '.join(exporters())}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not request.replace:
        raise FileExistsError(f"{out} is there already: choose another place, or pass --force to replace it")
    done = _exporters[name](source, out, request)
    card = out / "README.md" if out.is_dir() else out.with_name(f"{out.name}.README.md")
    atomic_write(card, model_card(source, done.rules, done.summary, command=request.command))
    return done
