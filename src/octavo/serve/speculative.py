"""Speculative decoding: a draft model proposes tokens, and the target checks all of them in one pass.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192. They accept a token x of
the draft's distribution q with the probability min(1, p(x) / q(x)), which preserves the target's distribution p. Here
the target samples a token at each position with the random number that plain decoding would use there, and a proposed
token is accepted if it is that token. So the answer itself is preserved, whatever the sampling parameters. The draft
samples with the same random numbers: where p = q, all of its tokens are accepted.
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from octavo import kernels
from octavo._tree import flatten_paths
from octavo._typing import Array, Shaped
from octavo.models import ModelConfig
from octavo.ops.lowerings import cpu_ffi
from octavo.pretrained import PretrainedModel, convert_model, weight_rules
from octavo.qarray import QArray, is_qarray
from octavo.serve.cache import FLOAT, KVConfig
from octavo.serve.engine_programs import Output, Programs, State, top_if
from octavo.serve.engine_source import Source
from octavo.serve.engine_update import unstacked
from octavo.serve.sampling import Settings, pack_mask, sample_tokens
from octavo.serve.stored_programs import StoredProgram, program_path
from octavo.transform import PtqProvider


class Round(NamedTuple):
    """What a round has decoded: `output` has an axis for steps, of which row i has the first `counts[i]`."""

    output: Output
    counts: Shaped[Array, "slots"]


class SpeculativePrograms(Programs):
    """The programs of a target and its draft: prefill of both, and a round of speculative decoding.

    Both caches have the same tokens in the same slots. A rejected token is dropped by shortening a slot's length: its
    keys and values have no influence, and are overwritten by the next tokens.

    Args:
        target: The model whose tokens are decoded.
        draft: The model that proposes tokens.
        draft_tokens: How many tokens it proposes in a round.
        kv: The precision of the target's cache; that of the draft is float32.
        slots: As in `Programs`, like the following arguments.
        max_length: The most tokens of a text.
        chunk: The tokens per prefill step.
        prefill: The activations of prefill.
        directory: The directory of compiled programs.
        is_copy: Whether the draft has the weights of the target, and is updated with them.
    """

    def __init__(
        self,
        target: Source,
        draft: Source,
        *,
        draft_tokens: int,
        kv: KVConfig | str,
        slots: int,
        max_length: int,
        chunk: int,
        prefill: str = "float",
        directory: Path | None = None,
        is_copy: bool = False,
    ):
        sizes: dict[str, Any] = {"slots": slots, "max_length": max_length, "chunk": chunk, "directory": directory}
        own = {"rules": target.rules, "ranges": target.ranges, "kv": kv, "prefill": prefill}
        super().__init__(target.config, target.load, **own, **sizes)
        if reason := self._rounding_reason(slots * (draft_tokens + 1)):
            raise ValueError(
                "a draft is checked in a pass of several tokens, whose sums XLA rounds unlike those of one, and "
                f"{reason}, which rounds a difference in the last bit to one of a whole code: use float32 (KVConfig(), "
                "--kv float), weights in int8 or int4 on a CPU with kernels, or no draft"
            )
        # The draft may be one that cannot be prefilled in int8.
        other = {"rules": draft.rules, "ranges": draft.ranges, "kv": FLOAT}
        other["prefill"] = "float" if prefill == "float" else "auto"
        self.draft = Programs(draft.config, draft.load, **other, **sizes)
        self.draft_tokens, self._is_copy = draft_tokens, is_copy
        devices, others = ({d for x in p._leaves for d in x.devices()} for p in (self, self.draft))
        if devices != others:
            raise ValueError(
                f"the model is on {len(devices)} devices and its draft on {len(others)} or others: pass a draft whose "
                "parameters are on the devices of the model"
            )
        self.params_nbytes += self.draft.params_nbytes
        self.cache_nbytes += self.draft.cache_nbytes
        self.cache_bytes_per_token += self.draft.cache_bytes_per_token
        path = None
        if self._directory is not None and self.draft._directory is not None:
            path = program_path(directory, "speculate", self._facts(), self.draft._facts(), draft_tokens)
        outputs = Round(self._any_output, self._state[0]), (self._state, self.draft._state)
        self._round = StoredProgram(self._traced_round, path, outputs)

    def prefill(self, slot: int, prompt: tuple[int, ...], start: int, settings: Settings, **options: Any) -> Output:
        """Write a chunk of a prompt into both caches: see `Programs.prefill`."""
        # The draft's last token is the one before the target's, whose keys and values it may lack after a round.
        before = np.zeros(self.config.vocab_size, bool)
        before[prompt[-1]] = True
        self.draft.prefill(slot, prompt, start, settings, allowed=pack_mask(before))
        return super().prefill(slot, prompt, start, settings, **options)

    def speculate(self, limits: np.ndarray, *, top: bool = True, allowed: np.ndarray | None = None) -> Round:
        """Decode up to `limits[i]` tokens of slot i, at least one; those of a slot with limit 0 are none.

        No slot has more than `draft_tokens` + 1 of them. The other arguments are those of `decode`; `allowed` is for
        slots with a limit of at most 1.
        """
        limits = np.minimum(limits, self.draft_tokens + 1).astype(np.int32)
        masks = self._all_on_device if allowed is None else allowed
        leaves, state = (self._leaves, self.draft._leaves), (self._state, self.draft._state)
        out, (self._state, self.draft._state) = self._round(leaves, state, limits, np.asarray(top), masks)
        return out

    def prepare(self) -> None:
        """Load all programs from the directory of compiled programs, or compile them at the same time."""
        leaves, state = (self._leaves, self.draft._leaves), (self._state, self.draft._state)
        limits = np.zeros(len(self._all), np.int32)
        self._round.prepare(leaves, state, limits, np.asarray(True), self._all_on_device)
        for programs in (self, self.draft):
            programs.prepare_prefill()

    @property
    def is_stored(self) -> bool:
        """Whether all programs are in the directory of compiled programs."""
        return self._round.is_stored and self._prefill.is_stored and self.draft._prefill.is_stored

    def update(self, params: Any) -> None:
        """Replace the parameters of the target, and of a draft that is a copy of it."""
        super().update(params)
        if self._is_copy:
            floats = lambda x: x.dequantize() if is_qarray(x) else x  # noqa: E731
            self.draft.update(jax.tree.map(floats, params, is_leaf=is_qarray))

    def _rounding_reason(self, rows: int) -> str | None:
        """Why an answer could differ from that of plain decoding by more than the last bits of float32."""
        if any(rule.act_qtype is not None for rule in PtqProvider(self._rules).rules):
            return "the rules quantize activations"
        params = jax.tree.unflatten(self._tree, self._leaves)
        if rows <= cpu_ffi.MOST_FLOAT_ROWS and _is_by_kernels(self.config, params):
            return None
        if self.config.dtype != "float32":
            return f"activations are in {self.config.dtype}"
        return None if self.kv == FLOAT else "the cache is in low precision"

    def _traced_round(self, leaves: Any, parts: Any, limits: Array, wants_top: Array, allowed: Array) -> Any:
        self.traces["speculate"] += 1
        params, draft_params = (jax.tree.unflatten(p._tree, x) for p, x in zip((self, self.draft), leaves, strict=True))
        target, draft = (p._state_of(x) for p, x in zip((self, self.draft), parts, strict=True))
        steps = jnp.maximum(jnp.max(limits) - 1, 0)
        proposed, draft_cache = self._propose(draft_params, target, draft, limits > 0, steps)
        out, new = self._verify(params, target, proposed, limits, wants_top, allowed)
        # The token before the last one: of this round, or the last of the round before.
        index = jnp.maximum(out.counts - 2, 0)[None]
        before = jnp.take_along_axis(out.output.sample.token, index, axis=0)[0]
        before = jnp.where(out.counts > 1, before, jnp.where(out.counts > 0, target.last, draft.last))
        draft = draft._replace(cache=draft_cache.with_lengths(new.cache.lengths), last=before)
        return out, (tuple(jax.tree.leaves(new)), tuple(jax.tree.leaves(draft)))

    def _propose(
        self, params: Any, target: State, draft: State, active: Array, steps: Array
    ) -> tuple[Shaped[Array, "slots k"], Any]:
        """The draft's next `steps` tokens of each slot, sampled as the target's will be, and its cache."""
        forward, lengths = self.draft.forward, target.cache.lengths
        none = jnp.zeros((lengths.shape[0], self.draft_tokens), jnp.int32)

        def sampled(state: State, logits: Array, cache: Any, tokens: Array, number: Any) -> tuple[State, Array]:
            token = sample_tokens(logits, state.settings, state.num_generated, state.in_context, state.counts).token
            return state.advanced(token, active)._replace(cache=cache), tokens.at[:, number].set(token)

        def step(number: Array, carry: tuple[State, Array]) -> tuple[State, Array]:
            state, tokens = carry
            logits, cache = forward(params, state.last[:, None], state.cache)
            return sampled(state, logits[:, 0], cache, tokens, number)

        def propose() -> tuple[Array, Any]:
            # Two tokens at first: the draft has not seen the last but one if all of its tokens were accepted.
            start = draft.cache.with_lengths(lengths - active.astype(jnp.int32))
            logits, cache = forward(params, jnp.stack([draft.last, target.last], axis=1), start)
            first = sampled(target, logits[:, 1], cache, none, 0)
            state, tokens = jax.lax.fori_loop(1, steps, step, first)
            return tokens, state.cache

        return jax.lax.cond(steps > 0, propose, lambda: (none, draft.cache))

    def _verify(
        self, params: Any, state: State, proposed: Array, limits: Array, wants_top: Array, allowed: Array
    ) -> tuple[Round, State]:
        """Sample the token after the last one and after each proposed one, up to the first that was not proposed."""
        lengths = state.cache.lengths
        every, cache = self.forward(params, jnp.concatenate([state.last[:, None], proposed], axis=1), state.cache)
        # Nothing is compared with the last token.
        proposed = jnp.pad(proposed, ((0, 0), (0, 1)), constant_values=-1)

        def sampled(number: Array, state: State) -> Output:
            logits = jax.lax.dynamic_index_in_dim(every, number, axis=1, keepdims=False)
            arguments = state.settings, state.num_generated, state.in_context, state.counts
            return Output(sample_tokens(logits, *arguments, allowed=allowed), top_if(wants_top, logits))

        def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            number, counts, agree, state, outs = carry
            take = agree & (number < limits)
            out = sampled(number, state)
            outs = jax.tree.map(lambda all, x: all.at[number].set(x), outs, out)
            expected = jax.lax.dynamic_index_in_dim(proposed, number, axis=1, keepdims=False)
            state = state.advanced(out.sample.token, take)
            return number + 1, counts + take.astype(jnp.int32), take & (out.sample.token == expected), state, outs

        def goes_on(carry: tuple[Any, ...]) -> Array:
            return jnp.any(carry[2] & (carry[0] < limits))

        first, state = jnp.zeros((), jnp.int32), state._replace(cache=cache)
        one = jax.eval_shape(sampled, first, state)
        outs = jax.tree.map(lambda x: jnp.zeros((self.draft_tokens + 1, *x.shape), x.dtype), one)
        start = first, jnp.zeros_like(limits), limits > 0, state, outs
        _, counts, _, new, outs = jax.lax.while_loop(goes_on, step, start)
        return Round(outs, counts), new._replace(cache=new.cache.with_lengths(lengths + counts))


def _is_by_kernels(config: ModelConfig, params: Any) -> bool:
    """Whether CPU kernels multiply all matrices, whose sums do not depend on the number of rows."""
    if config.num_experts > 1 or not kernels.available() or jax.default_backend() != "cpu":
        return False
    for path, x in flatten_paths(params, is_qarray).items():
        if x.ndim < 2:
            continue
        if not isinstance(x, QArray) or x.size < cpu_ffi.FEWEST_WEIGHTS:
            return False
        # Packed codes of a table are summed differently for one row.
        is_matrix = path.endswith("kernel") and cpu_ffi.unsupported_matrix(x) is None
        if not is_matrix and (x.qtype.name != "int8" or x.zero_point is not None):
            return False
    return True


def draft_of(draft: Any, target: Source) -> Source:
    """The draft of a target: a model, or the target's own weights in a number format such as "int4" or "int4:g64".

    Raises:
        ValueError: It has another vocabulary, or there is no such format.
        TypeError: It is neither.
    """
    if not isinstance(draft, str):
        source = Source.of(draft)
        if source.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"the draft has a vocabulary of {source.config.vocab_size} tokens, and the model has "
                f"{target.config.vocab_size}: its tokens are proposed to the model, so both need the same tokenizer"
            )
        return source
    try:
        rules = weight_rules(draft, target.config)
    except (ValueError, OSError) as error:
        raise ValueError(f"the draft {draft!r} is neither a model nor a number format: {error}") from None
    if any(rule.act_qtype is not None for rule in rules):
        raise ValueError(f"the draft {draft!r} quantizes activations: name a number format for weights, such as int4")

    def load() -> Any:
        # By parameter, so that memory has the codes and one of the floats.
        model = target.model
        if model is None:
            config = target.config.replace(scan_layers=False, remat="none")
            model = PretrainedModel.from_params(config, unstacked(target.load()))
        params, _ = convert_model(model, rules, scale_dtype="bfloat16")
        return PretrainedModel.from_params(model.config, params).params()

    return dataclasses.replace(target, load=load, rules=(), ranges=None)


def programs_of(target: Source, draft: Any, *, draft_tokens: int, kv: KVConfig | str, **sizes: Any) -> Programs:
    """The programs of an engine: with a draft, those of speculative decoding."""
    if draft is None:
        return Programs(target.config, target.load, rules=target.rules, ranges=target.ranges, kv=kv, **sizes)
    if isinstance(kv, KVConfig) and kv.axis == "kivi":
        raise ValueError(
            "a draft needs a cache that can drop tokens, and axis='kivi' quantizes positions in groups as soon as they "
            "are complete: use axis='dkv' or 'heads_and_dkv', or no draft"
        )
    is_copy, source = isinstance(draft, str), draft_of(draft, target)
    return SpeculativePrograms(target, source, draft_tokens=draft_tokens, kv=kv, is_copy=is_copy, **sizes)
