"""Conversations for supervised fine-tuning: written by the model's chat template, with a loss on the answers only."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from octavo.data.dataset import BatchConfig, Dataset
from octavo.data.packing import KEYS, Batch
from octavo.data.shuffle import shuffle_epochs
from octavo.data.text import held_out_names
from octavo.data.tokenizer import Message, Tokenizer, make_tokenizer, render_chat

_HELP = "a line is {'messages': [{'role': 'user', 'content': ...}, {'role': 'assistant', 'content': ...}]}"


class Chat(Dataset):
    """Packed conversations. Rows hold whole ones, which do not attend to each other; long ones are truncated.

    Args:
      conversations: For each, its tokens and which of them the loss counts.
      config: The shape of batches.
      tokenizer: The tokenizer.
      details: The description of the data.
    """

    def __init__(
        self,
        conversations: Sequence[tuple[np.ndarray, np.ndarray]],
        config: BatchConfig,
        *,
        tokenizer: Tokenizer,
        details: dict[str, Any],
    ):
        self.config, self.tokenizer = config, tokenizer
        self.vocab_size = config.resolve_vocab_size(tokenizer.vocab_size, f"tokenizer_type={tokenizer.name}")
        most = config.length + 1
        truncated = sum(len(tokens) > most for tokens, _ in conversations)
        kept = [(tokens[:most], counts[:most]) for tokens, counts in conversations]
        kept = [(tokens, counts) for tokens, counts in kept if counts[1:].any()]
        if not kept:
            raise ValueError(
                f"dataset_type=chat: no answer of {len(conversations)} conversations fits into max_target_length="
                f"{config.length}: raise it"
            )
        self._conversations = kept
        sizes = [len(tokens) - 1 for tokens, _ in kept]
        self._packed = pack(sizes, config.length) if config.packing else [[i] for i in range(len(kept))]
        self._details = {**details, "conversations": len(kept), "truncated": truncated, "rows": len(self._packed)}

    @property
    def num_batches(self) -> int:
        return -(-len(self._packed) // self.config.batch_size)

    def _rows(self, index: int, start: int, stop: int) -> Batch:
        size, rows = self.config.batch_size, len(self._packed)
        numbers = index * size + np.arange(start, stop)
        if self.config.shuffle:
            numbers = shuffle_epochs(numbers, rows, self.config.seed)
        else:
            numbers = index % self.num_batches * size + np.arange(start, stop)
        batch = {name: np.zeros((len(numbers), self.config.length), np.int32) for name in KEYS}
        for row, number in enumerate(numbers.tolist()):
            at = 0
            for segment, member in enumerate(self._packed[number] if number < rows else (), 1):
                tokens, counts = self._conversations[member]
                here = row, slice(at, at := at + len(tokens) - 1)
                batch["inputs"][here], batch["targets"][here] = tokens[:-1], tokens[1:]
                for side in ("inputs", "targets"):
                    batch[f"{side}_position"][here] = np.arange(len(tokens) - 1)
                batch["inputs_segmentation"][here] = segment
                batch["targets_segmentation"][here] = np.where(counts[1:], segment, 0)
        return batch

    def describe(self) -> dict[str, Any]:
        return self._describe(self._details)


def make_chat(config: Any, split: str, batch_config: BatchConfig) -> Chat:
    """The conversations of the JSON lines at `dataset_path`; for evaluation `eval_dataset_path`, or a twentieth."""
    path, other = config.dataset_path, getattr(config, "eval_dataset_path", "")
    lines = list(_read(other if other and split == "eval" else path))
    if not other:
        held_out = held_out_names([digest for digest, _, _ in lines])
        lines = [line for line in lines if (line[0] in held_out) == (split == "eval")]
    if not lines:
        raise ValueError(f"dataset_type=chat: {path} has no conversation for the {split} split")
    tokenizer = make_tokenizer(config, lambda: (m["content"] for _, _, messages in lines for m in messages))
    if tokenizer.template is None:
        raise ValueError(
            f"dataset_type=chat needs a chat template, and tokenizer_type={tokenizer.name} has none: start from an "
            "instruct model (load_parameters_path), or put its chat_template.jinja next to its tokenizer.json; "
            "dataset_type=text needs none"
        )
    answers_only = getattr(config, "sft_train_on_completion_only", True)
    encoded = []
    for _, where, messages in lines:
        try:
            encoded.append(encode_conversation(tokenizer, messages, answers_only=answers_only))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    digest = hashlib.sha256("".join(digest for digest, _, _ in lines).encode()).hexdigest()
    details = {"name": "chat", "split": split, "path": str(path), "sha256": digest, "tokenizer": tokenizer.name}
    return Chat(encoded, batch_config, tokenizer=tokenizer, details=details)


def encode_conversation(
    tokenizer: Tokenizer, messages: Sequence[Message], *, answers_only: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a conversation, and which of them are the model's answers.

    A prompt is tokenized up to where the model answers, as when the model is served, and an answer by itself.

    Args:
      tokenizer: A tokenizer with a chat template.
      messages: Messages with a role and a content.
      answers_only: Whether only answers count; otherwise all tokens do.
    """
    assert tokenizer.template is not None

    def text(count: int, add_generation_prompt: bool) -> str:
        return render_chat(tokenizer.template or "", messages[:count], tokenizer.special, add_generation_prompt)

    tokens: list[int] = []
    counts: list[bool] = []
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, whole = text(number, True), text(number + 1, False)
        if not prompt.startswith(done) or not whole.startswith(prompt):
            raise ValueError(
                "the chat template changes earlier messages when later ones follow, so answers cannot be separated "
                "from prompts: set sft_train_on_completion_only=false, or split the conversation at its answers"
                if answers_only
                else "the chat template changes earlier messages when later ones follow: split the conversation"
            )
        for piece, is_answer in ((prompt[len(done) :], False), (whole[len(prompt) :], True)):
            ids = tokenizer.tokenize(piece).tolist()
            tokens += ids
            counts += [is_answer or not answers_only] * len(ids)
        done = whole
    return np.asarray(tokens, np.int32), np.asarray(counts, bool)


def pack(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Which items share a row of a length: each goes to the fullest row that has room (best fit, longest first).

    >>> pack([3, 5, 2, 8], 8)
    [[3], [1, 0], [2]]
    """
    rows: list[list[int]] = []
    room: dict[int, list[int]] = {}  # rows by what is left of them
    for item in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        left = min((r for r, found in room.items() if r >= sizes[item] and found), default=None)
        if left is None:
            rows.append([])
            row, left = len(rows) - 1, length
        else:
            row = room[left].pop()
        rows[row].append(item)
        room.setdefault(left - sizes[item], []).append(row)
    return rows


def _read(path: str) -> Iterator[tuple[str, str, list[Message]]]:
    """A hash, the place and the messages of each line."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"dataset_path={path!r} is no file; dataset_type=chat reads JSON lines: {_HELP}")
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path}, line {number}"
                yield hashlib.sha256(f"{number} {line}".encode()).hexdigest(), place, _messages(line, place)


def _messages(line: str, place: str) -> list[Message]:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} is not JSON: {error}; {_HELP}") from None
    if isinstance(found, dict) and {"prompt", "completion"} <= set(found):
        roles = (("user", found["prompt"]), ("assistant", found["completion"]))
        found = {"messages": [{"role": role, "content": content} for role, content in roles]}
    messages = found.get("messages") if isinstance(found, dict) else None
    is_valid = isinstance(messages, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    )
    if not is_valid:
        raise ValueError(f"{place} has no messages; {_HELP}, or {{'prompt': ..., 'completion': ...}}")
    assert messages is not None
    if not any(m["role"] == "assistant" for m in messages):
        raise ValueError(f"{place} has no message of the role 'assistant', so there is no answer to learn")
    return messages
