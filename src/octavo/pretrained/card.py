"""The model card (README.md) of a converted model: what it is, how it was converted, and its error."""

from collections.abc import Sequence
from typing import Any

from octavo._optional import installed_version
from octavo.pretrained.convert import Summary
from octavo.pretrained.model import PretrainedModel
from octavo.rules import QuantizationRule, rules_to_yaml

_PACKAGES = ("octavo", "jax", "jaxlib", "numpy", "ml_dtypes")


def model_card(source: PretrainedModel, rules: Sequence[QuantizationRule], summary: Summary, *, command: str) -> str:
    """The text of the card, in Markdown."""
    config = source.config
    kinds = sorted(summary.kinds.items(), key=lambda item: -item[1])
    lines = [
        f"# {source.name}, converted",
        "",
        f"From {_origin(source)}. {source.size:,} parameters: {config.num_layers} layers of {config.emb_dim}, "
        f"{config.num_query_heads} heads ({config.num_kv_heads} for keys and values), a vocabulary of "
        f"{config.vocab_size:,}.",
        "",
        "| | |",
        "|---|---|",
        f"| size | {summary.before / 2**20:.1f} MiB before, {summary.after / 2**20:.1f} MiB after |",
        f"| bits per weight | {summary.bits_per_weight:.3f} |",
        *(f"| stored as {kind} | {count:,} parameters ({count / summary.values:.1%}) |" for kind, count in kinds),
        "",
        "## How it was made",
        "",
        "```",
        command,
        "```",
        "",
        *_rules_section(rules),
        *_worst_section(summary),
        "## Use",
        "",
        "```",
        "octavo generate . --prompt 'Once upon a time'",
        "octavo eval . --text FILE [--against THE_FLOAT_MODEL]",
        "octavo serve .",
        "```",
        "",
        f"Made with {', '.join(f'{name} {found}' for name in _PACKAGES if (found := installed_version(name)))}.",
        "",
    ]
    return "\n".join(lines)


def _rules_section(rules: Sequence[QuantizationRule]) -> list[str]:
    if not rules:
        return []
    return [
        "The rules, of which the first that matches a matmul counts:",
        "",
        "```yaml",
        rules_to_yaml(rules).rstrip(),
        "```",
        "",
    ]


def _worst_section(summary: Summary) -> list[str]:
    if not summary.worst:
        return []
    return [
        "## Lowest signal to noise",
        "",
        "Signal to noise ratio of the parameters themselves, lowest first. The effect on the model's output is "
        "measured by `octavo eval`.",
        "",
        "| parameter | dB |",
        "|---|---|",
        *(f"| {path} | {ratio:.1f} |" for path, ratio in summary.worst),
        "",
    ]


def _origin(source: PretrainedModel) -> str:
    known: dict[str, Any] = {k: v for k, v in source.origin.items() if k in ("kind", "path", "step") and v is not None}
    step = f", step {known['step']}" if "step" in known else ""
    return f"{known.get('path', source.name)} ({known.get('kind', 'unknown')}{step})"
