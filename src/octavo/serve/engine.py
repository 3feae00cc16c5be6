"""Generation with continuous batching: prompts are prefilled in chunks, then every step decodes all slots."""

import dataclasses
import functools
import itertools
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo._config import check_least
from octavo.serve.cache import FLOAT, KVConfig
from octavo.serve.constraint import Constraint, Matcher, Vocabulary
from octavo.serve.engine_programs import STEPS, Output
from octavo.serve.engine_source import Source
from octavo.serve.sampling import DEFAULT, SamplingParams, Settings
from octavo.serve.speculative import SpeculativePrograms, programs_of
from octavo.serve.text import TextStream


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt of token ids, its sampling parameters, and what its answer must conform to."""

    request_id: str | int
    prompt: tuple[int, ...]
    params: SamplingParams = DEFAULT
    constraint: Constraint | None = None


@dataclasses.dataclass(frozen=True)
class Event:
    """A token of a request, or its end.

    `text` is what the token adds to the text: complete characters only, so it may be empty and part of a later event.
    The last event of a request has a `finish`: "stop" (an end-of-text token or a stop text), "length" (`max_tokens`, or
    the cache is full), "cancelled" (without a token: -1), or "error" (the logits were NaN).
    """

    request_id: str | int
    token: int
    text: str = ""
    logprob: float = 0.0
    finish: str | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The most probable tokens and their log probabilities, `logprobs` of them."""
    prompt: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] = ()
    """In the first event with `prompt_logprobs`: of each token of the prompt but the first, its log probability, and
    the most probable tokens."""


class ContextLengthError(ValueError):
    """A prompt that leaves no room for an answer."""


@dataclasses.dataclass
class _Slot:
    """A running request."""

    request: Request
    stream: TextStream
    seed: int
    matcher: Matcher | None = None
    """Recognizes the answer, if it is constrained."""
    order: int = 0
    """How many requests have started before this one."""
    done: int = 0
    """Tokens of the prompt in the cache."""
    generated: int = 0
    """The number of generated tokens."""
    scores: list[Any] = dataclasses.field(default_factory=list)
    """Log probabilities of the prompt's chunks."""

    @property
    def prefilling(self) -> bool:
        return self.done < len(self.request.prompt)


class Engine:
    """Generates text for a fixed number of requests at a time, one in each slot; further requests are queued.

    One program prefills `chunk` tokens of a prompt into a slot, another decodes the next token of each slot; both are
    compiled once. The tokens of a request do not depend on other requests. A request starts in the slot whose last
    prompt has the longest common prefix with its own, and whole chunks of that are not prefilled again. An engine is
    not thread-safe.

    Args:
        source: A model of `octavo.pretrained.open_model`, or a `ModelConfig`.
        params: With a config, the parameters: arrays or QArrays.
        rules: Quantization rules for the matmuls; those of the source by default.
        slots: The number of requests that run at a time.
        max_length: The most tokens of a prompt and its answer.
        kv: The precision of the key and value cache; by default that of the source, if it was trained with
            `quantize_kvcache`, else float32. "int8" is `KVConfig.of("int8")`, and "auto" that where it is not slower:
            where CPU kernels decode.
        chunk: The tokens of a prompt per prefill step.
        prefill: The activations of prefill, where CPUs multiply codes: "float", "int8" (a scale for each 32 values), or
            "auto", which is "int8" where it is possible. Prompts whose log probabilities are asked for are in float.
        tokenizer: Decodes tokens; that of the source by default.
        eos_ids: Tokens that end a text; those of the tokenizer by default.
        cache_dir: A directory for compiled programs: another engine of the same model, sizes and versions loads them
            from there. It is trusted, as they are machine code. None to keep none.
        draft: A model that proposes tokens, of which each step generates those that the engine's own model would have:
            "int4" or another number format for that model's weights, or a smaller model of the same vocabulary.
        draft_tokens: How many tokens the draft proposes in each step.

    >>> import jax
    >>> from octavo.models import ModelConfig, init_params
    >>> sizes = dict(emb_dim=16, num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    >>> config = ModelConfig(vocab_size=50, scan_layers=False, **sizes)
    >>> engine = Engine(config, init_params(config, jax.random.key(0)), slots=2, max_length=32, chunk=8)
    >>> prompts = [[3, 14, 15], [9, 2, 6]]
    >>> events = list(engine.generate(prompts, SamplingParams(temperature=0, max_tokens=4)))
    >>> sorted(e.request_id for e in events if e.finish == "length")
    [0, 1]
    """

    def __init__(
        self,
        source: Any,
        params: Any = None,
        *,
        rules: Any = None,
        slots: int = 1,
        max_length: int = 2048,
        kv: KVConfig | str | None = None,
        chunk: int = 64,
        prefill: str = "float",
        tokenizer: Any = None,
        eos_ids: Sequence[int] | None = None,
        cache_dir: str | Path | None = None,
        draft: Any = None,
        draft_tokens: int = 4,
    ):
        model = Source.of(source, params, rules, tokenizer)
        kv = model.kv if kv is None or (kv == "auto" and model.kv != FLOAT) else kv
        self.config, self.tokenizer = model.config, (tokenizer := model.tokenizer)
        self.slots, self.max_length, self.chunk, self.draft_tokens = slots, max_length, chunk, draft_tokens
        check_least(self, 1, "slots", "max_length", "chunk", "draft_tokens")
        self.eos_ids = frozenset(getattr(tokenizer, "eos_ids", ()) if eos_ids is None else eos_ids)
        directory = None if cache_dir is None else Path(cache_dir)
        options: dict[str, Any] = {
            "slots": slots,
            "max_length": max_length,
            "kv": kv,
            "chunk": chunk,
            "prefill": prefill,
        }
        self.programs = programs_of(model, draft, draft_tokens=draft_tokens, directory=directory, **options)
        """The compiled programs, with the sizes of their parameters and cache."""
        self.kv = self.programs.kv
        """The precision of the cache."""
        self._running: list[_Slot | None] = [None] * slots
        self._waiting: deque[Request] = deque()
        self._ended: list[Event] = []
        self._orders = itertools.count()
        self._prefilled: list[tuple[int, ...]] = [()] * slots
        """The tokens of the last prompt of each slot that are in the cache."""
        self.reused = 0
        """Tokens of prompts that were in the cache already."""
        self.proposed = self.accepted = 0
        """Tokens that the draft proposed, and those of them that were generated."""

    @property
    def busy(self) -> bool:
        """Whether there are unfinished requests or undelivered events."""
        return bool(self._waiting or self._ended or any(self._running))

    @property
    def active(self) -> int:
        """Requests in slots."""
        return self.slots - self._running.count(None)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request, which starts when a slot is free."""
        self.check(request.prompt)
        if request.request_id in self._ids():
            raise ValueError(f"there is a request {request.request_id!r} already, which has not ended")
        if request.params.stop and self.tokenizer is None:
            raise ValueError("stop texts need a tokenizer: Engine(..., tokenizer=...)")
        if request.constraint is not None and request.constraint.vocabulary.size != self.config.vocab_size:
            raise ValueError(
                f"the constraint is for a vocabulary of {request.constraint.vocabulary.size} tokens, and the model has "
                f"{self.config.vocab_size}: make it with engine.vocabulary"
            )
        self._waiting.append(request)
        self._admit()

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The bytes of each token, for constraints."""
        if self.tokenizer is None:
            raise ValueError("a constraint needs a tokenizer: Engine(..., tokenizer=...)")
        return Vocabulary(self.tokenizer.token_bytes(), size=self.config.vocab_size, eos_ids=self.eos_ids)

    def check(self, prompt: Sequence[int]) -> None:
        """Raise a ValueError for a prompt that is empty, too long, or has unknown token ids."""
        if not len(prompt):
            raise ValueError("the prompt is empty: give it at least one token, such as the tokenizer's bos_id")
        if len(prompt) >= self.max_length:
            raise ContextLengthError(
                f"the prompt has {len(prompt)} tokens, and with max_length={self.max_length} there is no room for an "
                "answer: shorten it, or use a larger max_length"
            )
        if min(prompt) < 0 or max(prompt) >= self.config.vocab_size:
            last = self.config.vocab_size - 1
            raise ValueError(f"the prompt has a token id outside of the vocabulary: ids are from 0 to {last}")

    def cancel(self, request_id: str | int) -> None:
        """Cancel a request; its last event comes with the next step. No effect on one that has ended."""
        if request_id not in self._ids():
            return
        for number, slot in enumerate(self._running):
            if slot is not None and slot.request.request_id == request_id:
                self._running[number] = None
        self._waiting = deque(r for r in self._waiting if r.request_id != request_id)
        self._ended.append(Event(request_id, -1, finish="cancelled"))

    def step(self, most: int = 1) -> list[Event]:
        """Prefill a chunk of the oldest prompt, if there is one, and decode a token for each prefilled request.

        Without a prompt to prefill or a request that waits for a slot, up to `most` tokens are decoded, and no more
        than 4: one call costs less than four. Those after the end of a text are discarded. With a draft, up to
        `draft_tokens` + 1 of them are decoded.
        """
        events, self._ended = self._ended, []
        self._admit()
        decoding = [n for n, slot in enumerate(self._running) if slot is not None and not slot.prefilling]
        prefilling = [(slot.order, n) for n, slot in enumerate(self._running) if slot is not None and slot.prefilling]
        if prefilling:
            events += self._prefill(min(prefilling)[1])
        if decoding:
            events += self._decode(decoding, 1 if prefilling or self._waiting else most)
        return events

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams] = DEFAULT
    ) -> Iterator[Event]:
        """Generate answers to prompts.

        Args:
            prompts: Token ids of each prompt.
            params: Sampling parameters, for all or for each prompt.

        Yields:
            Events as they come; the request ids are the indices of the prompts. Closing the iterator cancels the rest.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but sampling parameters for {len(each)}")
        if self.busy:
            raise RuntimeError("generate needs the engine to itself; use add and step while other requests run")
        for prompt in prompts:
            self.check(prompt)
        for number, (prompt, sampling) in enumerate(zip(prompts, each, strict=True)):
            self.add(Request(number, tuple(prompt), sampling))
        try:
            while self.busy:
                yield from self.step(STEPS)
        finally:
            for number in range(len(prompts)):
                self.cancel(number)
            self._ended.clear()

    def update(self, params: Any) -> None:
        """Replace the parameters, as after a step of training.

        One compiled program quantizes floats as the engine's codes are, by its rules or in their layout, fuses weights
        again, and writes into the engine's own buffers. Nothing else is compiled again.

        Args:
            params: Parameters of the same model: stacked or not, floats or codes.

        Raises:
            RuntimeError: Requests are running, whose caches are of the old parameters.

        >>> import jax, octavo
        >>> from octavo.models import ModelConfig, init_params
        >>> sizes = dict(emb_dim=16, num_layers=1, num_query_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
        >>> config = ModelConfig(vocab_size=50, **sizes)
        >>> old, new = (init_params(config, jax.random.key(i)) for i in range(2))
        >>> engine = Engine(config, old, max_length=16, chunk=8)
        >>> before = engine.logprobs([[3, 14, 15]])[0]
        >>> engine.update(new)
        >>> bool((engine.logprobs([[3, 14, 15]])[0] != before).all())
        True
        """
        if self.busy:
            raise RuntimeError("requests are running, whose caches are of the old parameters: finish or cancel them")
        self._prefilled = [()] * self.slots
        self.programs.update(params)

    def logprobs(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The log probability of each token of a text but the first, given those before it, at temperature 1.

        Texts are run like a batch of training: without the cache, `slots` at a time, padded to a multiple of `chunk`.

        Args:
            texts: Token ids of each text, at least two and at most `max_length`.

        Returns:
            An array for each text, shorter than it by one.
        """
        for text in texts:
            self.check(text[:-1])
            self.check(text[1:])
        found: list[np.ndarray] = []
        for start in range(0, len(texts), self.slots):
            part = texts[start : start + self.slots]
            tokens = np.zeros((self.slots, -(-max(map(len, part)) // self.chunk) * self.chunk), np.int32)
            for row, text in zip(tokens, part, strict=False):
                row[: len(text)] = text
            scores = np.asarray(self.programs.score(tokens))
            found += [scores[i, : len(text) - 1] for i, text in enumerate(part)]
        return found

    def warm_up(self) -> None:
        """Load or compile both programs."""
        self.programs.prepare()
        for _ in self.generate([[0]], SamplingParams(temperature=0, max_tokens=2)):
            pass
        self._prefilled = [()] * self.slots  # an engine whose programs were stored starts like this one

    def _ids(self) -> set[str | int]:
        """The ids of unfinished requests."""
        running = (slot.request for slot in self._running if slot is not None)
        return {request.request_id for request in (*self._waiting, *running)}

    def _admit(self) -> None:
        while self._waiting and None in self._running:
            request = self._waiting.popleft()
            seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
            decode = self.tokenizer.decode if self.tokenizer is not None else lambda ids: ""
            stream = TextStream(decode, request.params.stop, prompt=request.prompt)
            matcher = None if request.constraint is None else request.constraint.start()
            free = [n for n, slot in enumerate(self._running) if slot is None]
            # A prefix that another request may have is overwritten last.
            number = max(free, key=lambda n: (self._reusable(n, request), -len(self._prefilled[n]), -n))
            done = self._reusable(number, request)
            self.reused += done
            self._prefilled[number] = request.prompt[:done]
            self._running[number] = _Slot(request, stream, seed, matcher, next(self._orders), done)

    def _reusable(self, number: int, request: Request) -> int:
        """How many tokens of a prompt a slot has in its cache, in whole chunks and without the last token.

        Only what prefill has written is reused, in the same chunks: so the results are bit-exact.
        """
        if request.params.prompt_logprobs or self.kv.axis == "kivi":  # whose cache depends on a text's length
            return 0
        pairs = zip(self._prefilled[number], request.prompt[:-1], strict=False)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        return common - common % self.chunk

    def _prefill(self, number: int) -> list[Event]:
        slot = self._running[number]
        assert slot is not None
        prompt, params = slot.request.prompt, slot.request.params
        settings = Settings.of([params.replace(seed=slot.seed)])
        allowed = None if slot.matcher is None else slot.matcher.mask()
        out = self.programs.prefill(number, prompt, slot.done, settings, allowed=allowed, score=params.prompt_logprobs)
        start, slot.done = slot.done, min(slot.done + self.chunk, len(prompt))
        self._prefilled[number] = prompt[: slot.done]
        if params.prompt_logprobs:
            slot.scores += out.fetch_prompt(min(slot.done, len(prompt) - 1) - start, params.logprobs)
        if slot.prefilling:
            return []
        event = self._event(number, *out.fetch(0, params.logprobs))
        return [dataclasses.replace(event, prompt=tuple(slot.scores))]

    def _decode(self, numbers: list[int], most: int) -> list[Event]:
        slots = [(n, slot) for n in numbers if (slot := self._running[n]) is not None]
        limits = np.zeros(self.slots, np.int32)
        for n, slot in slots:
            # What may follow a token of a constrained answer is known when the token is.
            limits[n] = 1 if slot.matcher else self._remaining(slot)
        allowed = None
        if any(slot.matcher for _, slot in slots):
            allowed = self.programs.all_allowed()
            for n, slot in slots:
                if slot.matcher is not None:
                    allowed[n] = slot.matcher.mask()
        top = any(slot.request.params.logprobs for _, slot in slots)
        out, counts = self._run(limits, most, top=top, allowed=allowed)
        return [
            self._event(n, *out.fetch(n, slot.request.params.logprobs, step))
            for step in range(max(counts))
            for n, slot in slots
            if self._running[n] is slot and step < counts[n]
        ]

    def _run(self, limits: np.ndarray, most: int, **options: Any) -> tuple[Output, np.ndarray]:
        """Decode at least one and at most `limits[i]` tokens of slot i, and count them."""
        active = limits > 0
        if not isinstance(self.programs, SpeculativePrograms):
            steps = int(min(most, STEPS, *limits[active]))
            return self.programs.decode(active, steps, **options), np.where(active, steps, 0)
        limits = np.minimum(limits, self.draft_tokens + 1)
        out, found = self.programs.speculate(limits, **options)
        counts = np.asarray(found)
        self.proposed += int(np.sum(limits[active] - 1))
        self.accepted += int(np.sum(counts[active] - 1))
        return out, counts

    def _remaining(self, slot: _Slot) -> int:
        """How many more tokens a request may have."""
        room = self.max_length - len(slot.request.prompt) - slot.generated
        return min(room, slot.request.params.max_tokens - slot.generated)

    def _event(self, number: int, token: int, logprob: float, top: tuple[tuple[int, float], ...]) -> Event:
        slot = self._running[number]
        assert slot is not None
        slot.generated += 1
        request = slot.request
        finish, text = None, ""
        if np.isnan(logprob):
            finish, token = "error", -1
        elif token in self.eos_ids:
            finish = "stop"
        elif slot.matcher is not None and not slot.matcher.push(token):
            finish, token = "error", -1
        else:
            text = slot.stream.push(token)
            if slot.stream.stopped or (slot.matcher is not None and slot.matcher.is_finished):
                finish = "stop"
            elif self._remaining(slot) <= 0:
                finish = "length"
        if finish is not None:
            text += slot.stream.finish()
            self._running[number] = None
        return Event(request.request_id, token, text, logprob, finish, top)
