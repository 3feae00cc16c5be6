"""Where each array of a run lies: logical names for the axes of parameters and activations, and rules that map them.

The model stays plain: what the axes of a parameter are called is looked up by its path.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from octavo._sharding import names as names_of
from octavo.models import ModelConfig, abstract_params
from octavo.train.axes import DEFAULT_RULES, split_axes
from octavo.train.keys import ConfigError, Problem
from octavo.train.mesh import batch_rows

if TYPE_CHECKING:
    from octavo.train.config import Config

type Rules = Mapping[str, tuple[str, ...]]
"""The mesh axes that each logical axis is cut along."""

_PARTS: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"token_embedder/embedding", ("vocab", "embed")),
    (r".*/logits_dense/kernel", ("embed", "vocab")),
    (r".*/self_attention/query/kernel", ("embed", "heads")),
    (r".*/self_attention/(key|value)/kernel", ("embed", "kv_heads")),
    (r".*/self_attention/query/bias", ("heads",)),
    (r".*/self_attention/(key|value)/bias", ("kv_heads",)),
    (r".*/self_attention/(query|key)_norm/scale", ("kv",)),
    (r".*/self_attention/out/kernel", ("heads", "embed")),
    (r".*/moe_block/router/kernel", ("embed", None)),
    (r".*/moe_block/wi_[01]/kernel", ("exp", "embed_moe", "mlp_moe")),
    (r".*/moe_block/wo/kernel", ("exp", "mlp_moe", "embed_moe")),
    (r".*/(mlp|shared_experts)/wi_[01]/kernel", ("embed", "mlp")),
    (r".*/(mlp|shared_experts)/wo/kernel", ("mlp", "embed")),
    (r".*norm/scale", ("norm",)),
)
_STACK = re.compile(r"decoder/(dense_)?layers/.*")
_UNITS = {"heads": "num_query_heads", "kv_heads": "num_kv_heads"}
# Axes that copy the parameters rather than cut them.
_COPIES = ("data",)


def rules_of(config: "Config") -> dict[str, tuple[str, ...]]:
    """The rules of a configuration: its own in place of the defaults of the same name.

    >>> from octavo.train.config import Config
    >>> rules_of(Config(logical_axis_rules=("embed:fsdp", "vocab:")))["embed"]
    ('fsdp',)
    """
    given = {
        name.strip(): split_axes(axes) for name, _, axes in (rule.partition(":") for rule in config.logical_axis_rules)
    }
    return {name: tuple(a for a in axes if a in config.mesh_axes) for name, axes in {**DEFAULT_RULES, **given}.items()}


def logical_axes(path: str, ndim: int) -> tuple[str | None, ...]:
    """What the axes of a parameter are called; those of one that is not known have no names.

    >>> logical_axes("decoder/layers/mlp/wo/kernel", 3)
    ('layers', 'mlp', 'embed')
    """
    names = next((names for pattern, names in _PARTS if re.fullmatch(pattern, path)), (None,) * ndim)
    if _STACK.fullmatch(path) and len(names) == ndim - 1:
        names = ("layers", *names)
    return names if len(names) == ndim else (None,) * ndim


def spec_of(names: tuple[str | None, ...], mesh: Any, rules: Rules) -> PartitionSpec:
    """The mesh axes for named axes: of each rule those that are longer than one and that no axis before it took."""
    taken: set[str] = set()
    parts: list[Any] = []
    for name in names:
        axes = tuple(a for a in rules.get(name or "", ()) if mesh.shape.get(a, 1) > 1 and a not in taken)
        taken.update(axes)
        parts.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def param_specs(model: ModelConfig, mesh: Any, rules: Rules) -> Any:
    """The PartitionSpec of each parameter, as a tree of the parameters' structure."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return spec_of(logical_axes(name, len(leaf.shape)), mesh, rules)

    return jax.tree_util.tree_map_with_path(spec, abstract_params(model))


def tree_shardings(tree: Any, params: Any, specs: Any, mesh: Any) -> Any:
    """The shardings of a tree beside the parameters, such as an optimizer's state: those of the parameter whose path a
    leaf's ends with and whose shape it has; all else is on every device."""
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): (tuple(leaf.shape), spec)
        for (path, leaf), spec in zip(
            jax.tree_util.tree_leaves_with_path(params),
            jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)),
            strict=True,
        )
    }

    def sharding(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        parts = name.split("/")
        for start in range(len(parts)):
            shape, spec = named.get("/".join(parts[start:]), ((), None))
            if spec is not None and shape == tuple(leaf.shape):
                return NamedSharding(mesh, spec)
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, tree)


def batch_spec(config: "Config", mesh: Any) -> PartitionSpec:
    """How a batch [rows, length] is cut."""
    rules = {**rules_of(config), "rows": config.data_sharding}
    return spec_of(("rows", "activation_length"), mesh, rules)


def placement(config: "Config", mesh: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The rules for activations and experts, without axes of the mesh that are one long: what a model is told."""
    told = ("exp", "embed_moe", "mlp_moe")
    found = {name: axes for name, axes in rules_of(config).items() if name.startswith("activation_") or name in told}
    return tuple((name, tuple(a for a in axes if mesh.shape.get(a, 1) > 1)) for name, axes in found.items())


# What is refused.


def check_fits(config: "Config", model: ModelConfig, mesh: Any) -> None:
    """Refuse, with the numbers, sizes that do not divide and parameters that are largely on every device."""
    problems = [*_undivided(config, model, mesh), *_undivided_batch(config, mesh)]
    if not problems:
        problems = list(_unsharded(config, model, mesh))
    if problems:
        raise ConfigError([Problem((), text) for text in problems])


def _undivided(config: "Config", model: ModelConfig, mesh: Any) -> Iterator[str]:
    rules, found = rules_of(config), dict[tuple[str, int, str], list[str]]()
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(model)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        names = logical_axes(name, len(leaf.shape))
        spec = spec_of(names, mesh, rules)
        for logical, size, part in zip(names, leaf.shape, spec, strict=False):
            count = getattr(model, _UNITS[logical]) if logical in _UNITS else size
            axes = names_of(part)
            if logical is not None and count % math.prod(mesh.shape[a] for a in axes):
                found.setdefault((logical, count, _shown(axes, mesh)), []).append(name)
    for (logical, count, axes), names in found.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"{logical}={count} of {names[0]}{more} does not divide by {axes}: choose other sizes, or another rule for "
            f"it in logical_axis_rules"
        )


def _undivided_batch(config: "Config", mesh: Any) -> Iterator[str]:
    rows = batch_rows(config, mesh.size)
    spec = (*batch_spec(config, mesh), None, None)
    parts, axes = config.gradient_accumulation_steps, names_of(spec[0])
    if rows % parts:
        yield f"{rows} rows cannot be cut into equal parts by gradient_accumulation_steps={parts}"
    elif rows // parts % math.prod(mesh.shape[a] for a in axes):
        micro = f" in each of gradient_accumulation_steps={parts} parts" if parts > 1 else ""
        yield (
            f"per_device_batch_size={config.per_device_batch_size:g} on {mesh.size} devices makes {rows // parts} rows"
            f"{micro}, which do not divide by {_shown(axes, mesh)}"
        )
    if config.max_target_length % math.prod(mesh.shape[a] for a in names_of(spec[1])):
        yield f"max_target_length={config.max_target_length} does not divide by {_shown(names_of(spec[1]), mesh)}"


def _unsharded(config: "Config", model: ModelConfig, mesh: Any) -> Iterator[str]:
    found = load_of(model, mesh, rules_of(config))
    if found.excess > config.sharding_tolerance:
        copies = "; ".join(f"{name} {list(shape)} is there {count} times" for name, shape, count in found.copied[:3])
        yield (
            f"a device holds {found.held:,} of {found.total:,} parameters, {100 * found.excess:.1f} % more than an "
            f"even share of {found.total / found.parts:,.0f} over {found.axes}, and sharding_tolerance="
            f"{config.sharding_tolerance:g}: {copies}"
        )


@dataclasses.dataclass(frozen=True)
class Load:
    """How evenly parameters are spread: of `total` a device holds `held`, and would `total / parts` at best.

    `copied` are those that are more than once among the devices of a copy of the model, the largest first.
    """

    total: int
    held: int
    parts: int
    axes: str
    copied: tuple[tuple[str, tuple[int, ...], int], ...]

    @property
    def excess(self) -> float:
        """By which share a device holds more than it need."""
        return self.held * self.parts / self.total - 1


def load_of(model: ModelConfig, mesh: Any, rules: Rules) -> Load:
    """How evenly the parameters of a model are spread."""
    cutting = tuple(a for a in mesh.axis_names if a not in _COPIES and mesh.shape[a] > 1)
    parts = math.prod(mesh.shape[a] for a in cutting)
    total, held, copied = 0, 0, []
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(model)):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        spec = spec_of(logical_axes(name, len(leaf.shape)), mesh, rules)
        cut = math.prod(mesh.shape[a] for part in spec for a in names_of(part))
        size = math.prod(leaf.shape)
        total, held = total + size, held + size // cut
        if cut < parts:
            copied.append((name, tuple(leaf.shape), parts // cut))
    copied.sort(key=lambda entry: -math.prod(entry[1]))
    return Load(total, held, parts, _shown(cutting, mesh), tuple(copied))


def _shown(axes: tuple[str, ...], mesh: Any) -> str:
    words = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
    return f"{words} = {math.prod(mesh.shape[a] for a in axes)}" if len(axes) > 1 else words or "1"
