"""Shardings: logical names for the axes of parameters and activations, and rules from them to mesh axes.

The model is independent of them: the logical axes of a parameter are looked up by its path.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from octavo._sharding import names as names_of
from octavo._tree import flatten_paths, path_str
from octavo.models import ModelConfig, abstract_params
from octavo.models.functional import STACK
from octavo.models.sharding import mesh_axes
from octavo.optim import ExpandedMoment, is_moment
from octavo.qarray import shardings
from octavo.train.config import Config, ConfigError
from octavo.train.config.checks import DEFAULT_RULES, split_axes
from octavo.train.mesh import format_sizes, global_batch_size

type Rules = Mapping[str, tuple[str, ...]]
"""The mesh axes that each logical axis is sharded along."""

_LOGICAL_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"token_embedder/embedding", ("vocab", "embed")),
    (r".*/logits_dense/kernel", ("embed", "vocab")),
    (r".*/self_attention/query/kernel", ("embed", "heads")),
    (r".*/self_attention/(key|value)/kernel", ("embed", "kv_heads")),
    (r".*/self_attention/query/bias", ("heads",)),
    (r".*/self_attention/(key|value)/bias", ("kv_heads",)),
    (r".*/self_attention/(query|key)_norm/scale", ("kv",)),
    (r".*/self_attention/w(q|kv)_a/kernel", ("embed", None)),
    (r".*/self_attention/w(q|kv)_b/kernel", ("embed", "heads")),
    (r".*/self_attention/out/kernel", ("heads", "embed")),
    (r".*/moe_block/router/kernel", ("embed", None)),
    (r".*/moe_block/wi_[01]/kernel", ("exp", "embed_moe", "mlp_moe")),
    (r".*/moe_block/wo/kernel", ("exp", "mlp_moe", "embed_moe")),
    (r".*/(mlp|shared_experts)/wi_[01]/kernel", ("embed", "mlp")),
    (r".*/(mlp|shared_experts)/wo/kernel", ("mlp", "embed")),
    (r".*norm/scale", ("norm",)),
)
_UNITS = {"heads": "num_query_heads", "kv_heads": "num_kv_heads"}
# Mesh axes along which parameters are replicated.
_REPLICATED = ("data",)


def axis_rules(config: Config) -> dict[str, tuple[str, ...]]:
    """The axis rules of a configuration: the defaults, some replaced by `logical_axis_rules`.

    >>> axis_rules(Config(logical_axis_rules=("embed:fsdp", "vocab:")))["embed"]
    ('fsdp',)
    """
    given = {
        name.strip(): split_axes(axes) for name, _, axes in (rule.partition(":") for rule in config.logical_axis_rules)
    }
    return {name: tuple(a for a in axes if a in config.mesh_axes) for name, axes in {**DEFAULT_RULES, **given}.items()}


def logical_axes(path: str, ndim: int) -> tuple[str | None, ...]:
    """The logical axes of a parameter; None for those of an unknown one.

    >>> logical_axes("decoder/layers/mlp/wo/kernel", 3)
    ('layers', 'mlp', 'embed')
    """
    names = next((names for pattern, names in _LOGICAL_AXES if re.fullmatch(pattern, path)), (None,) * ndim)
    if STACK.fullmatch(path) and len(names) == ndim - 1:
        names = ("layers", *names)
    return names if len(names) == ndim else (None,) * ndim


def partition_spec(names: tuple[str | None, ...], mesh: Any, rules: Rules) -> PartitionSpec:
    """The spec of named axes. A mesh axis of size > 1 shards the first array axis whose rule names it."""
    sharded = tuple((name, tuple(a for a in axes if mesh.shape.get(a, 1) > 1)) for name, axes in rules.items())
    parts = [axes if len(axes) > 1 else axes[0] if axes else None for axes in mesh_axes(sharded, *names)]
    while parts and parts[-1] is None:
        parts.pop()
    return PartitionSpec(*parts)


def param_specs(model: ModelConfig, mesh: Any, rules: Rules) -> Any:
    """The PartitionSpec of each parameter, as a tree of the parameters' structure."""

    def spec(path: Any, leaf: Any) -> PartitionSpec:
        return partition_spec(logical_axes(path_str(path), len(leaf.shape)), mesh, rules)

    return jax.tree_util.tree_map_with_path(spec, abstract_params(model))


def tree_shardings(tree: Any, params: Any, specs: Any, mesh: Any) -> Any:
    """The shardings of a tree such as an optimizer's state.

    A leaf is sharded as the parameter that its path ends with, if it has that parameter's shape, and so are the arrays
    of a quantized moment, the scales along axes whose blocks divide among the devices; others are replicated.
    """
    by_path = flatten_paths(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    named = {name: (tuple(leaf.shape), by_path[name]) for name, leaf in flatten_paths(params).items()}

    def sharding(path: Any, leaf: Any) -> Any:
        moment = leaf.codes if isinstance(leaf, ExpandedMoment) else leaf
        parts = path_str(path).split("/")
        found = (named.get("/".join(parts[start:]), ((), None)) for start in range(len(parts)))
        spec = next((spec for shape, spec in found if spec is not None and shape == tuple(moment.shape)), None)
        like_param = NamedSharding(mesh, spec if spec is not None else PartitionSpec())
        if not is_moment(leaf):
            return like_param
        codes = shardings(moment, like_param)
        return codes if moment is leaf else ExpandedMoment(codes, codes.scale)

    return jax.tree_util.tree_map_with_path(sharding, tree, is_leaf=is_moment)


def batch_spec(config: Config, mesh: Any) -> PartitionSpec:
    """The spec of a batch [rows, length]."""
    rules = {**axis_rules(config), "rows": config.data_sharding}
    return partition_spec(("rows", "activation_length"), mesh, rules)


def model_axis_rules(config: Config, mesh: Any) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The rules for activations and experts that a model needs, without mesh axes of size 1."""
    experts = ("exp", "embed_moe", "mlp_moe")
    found = {
        name: axes for name, axes in axis_rules(config).items() if name.startswith("activation_") or name in experts
    }
    return tuple((name, tuple(a for a in axes if mesh.shape.get(a, 1) > 1)) for name, axes in found.items())


# Checks.


def check_fits(config: Config, model: ModelConfig, mesh: Any) -> None:
    """Raise a ConfigError for sizes that do not divide, and for parameters that are mostly replicated."""
    problems = [*_indivisible(config, model, mesh), *_indivisible_batch(config, mesh)]
    if not problems:
        problems = list(_poorly_sharded(config, model, mesh))
    if problems:
        raise ConfigError(problems)


def _indivisible(config: Config, model: ModelConfig, mesh: Any) -> Iterator[str]:
    rules, found = axis_rules(config), dict[tuple[str, int, str], list[str]]()
    for name, leaf in flatten_paths(abstract_params(model)).items():
        names = logical_axes(name, len(leaf.shape))
        spec = partition_spec(names, mesh, rules)
        for logical, size, part in zip(names, leaf.shape, spec, strict=False):
            count = getattr(model, _UNITS[logical]) if logical in _UNITS else size
            axes = names_of(part)
            if logical is not None and count % math.prod(mesh.shape[a] for a in axes):
                found.setdefault((logical, count, _format_axes(axes, mesh)), []).append(name)
    for (logical, count, axes), names in found.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"{logical}={count} of {names[0]}{more} does not divide by {axes}: choose other sizes, or another rule for "
            f"it in logical_axis_rules"
        )


def _indivisible_batch(config: Config, mesh: Any) -> Iterator[str]:
    rows = global_batch_size(config, mesh.size)
    spec = (*batch_spec(config, mesh), None, None)
    parts, axes = config.gradient_accumulation_steps, names_of(spec[0])
    if rows % parts:
        yield f"{rows} rows do not divide into gradient_accumulation_steps={parts} microbatches"
    elif rows // parts % math.prod(mesh.shape[a] for a in axes):
        micro = f" in each of gradient_accumulation_steps={parts} microbatches" if parts > 1 else ""
        yield (
            f"per_device_batch_size={config.per_device_batch_size:g} on {mesh.size} devices makes {rows // parts} rows"
            f"{micro}, which do not divide by {_format_axes(axes, mesh)}"
        )
    if config.max_target_length % math.prod(mesh.shape[a] for a in names_of(spec[1])):
        yield f"max_target_length={config.max_target_length} does not divide by {_format_axes(names_of(spec[1]), mesh)}"


def _poorly_sharded(config: Config, model: ModelConfig, mesh: Any) -> Iterator[str]:
    found = shard_balance(model, mesh, axis_rules(config))
    if found.excess > config.sharding_tolerance:
        largest = sorted(found.replicated, key=lambda entry: -math.prod(entry[1]))[:3]
        copies = "; ".join(f"{name} {list(shape)} is replicated {n} times" for name, shape, n in largest)
        yield (
            f"a device holds {found.held:,} of {found.total:,} parameters, {100 * found.excess:.1f} % more than an "
            f"even share of {found.total / found.num_shards:,.0f} over {found.axes}, and sharding_tolerance="
            f"{config.sharding_tolerance:g}: {copies}"
        )


class ShardBalance(NamedTuple):
    """How evenly parameters are sharded: of `total` a device holds `held`, at best `total / num_shards`.

    `replicated` are the parameters that several devices of a replica hold.
    """

    total: int
    held: int
    num_shards: int
    axes: str
    replicated: list[tuple[str, tuple[int, ...], int]]

    @property
    def excess(self) -> float:
        """The share by which a device holds more than an even part."""
        return self.held * self.num_shards / self.total - 1


def shard_balance(model: ModelConfig, mesh: Any, rules: Rules) -> ShardBalance:
    """How evenly the parameters of a model are sharded."""
    sharding = tuple(a for a in mesh.axis_names if a not in _REPLICATED and mesh.shape[a] > 1)
    num_shards = math.prod(mesh.shape[a] for a in sharding)
    total, held, replicated = 0, 0, []
    for name, leaf in flatten_paths(abstract_params(model)).items():
        spec = partition_spec(logical_axes(name, len(leaf.shape)), mesh, rules)
        shards = math.prod(mesh.shape[a] for part in spec for a in names_of(part))
        size = math.prod(leaf.shape)
        total, held = total + size, held + size // shards
        if shards < num_shards:
            replicated.append((name, tuple(leaf.shape), num_shards // shards))
    return ShardBalance(total, held, num_shards, _format_axes(sharding, mesh), replicated)


def _format_axes(axes: tuple[str, ...], mesh: Any) -> str:
    return format_sizes({axis: mesh.shape[axis] for axis in axes})
