"""Conversations: tokens as in serving, a loss on answers only, packing, and errors that name the line."""

import json

import numpy as np
import pytest

from octavo.data import ByteTokenizer, make_dataset, tokenizer
from octavo.data.chat import encode_conversation, pack

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<assistant>{% endif %}"


class Chatty(ByteTokenizer):
    name = "chatty"
    template = TEMPLATE


TALK = [{"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yo"), ("user", "so"))]
TALK.append({"role": "assistant", "content": "ok"})


@pytest.fixture(autouse=True)
def chatty(monkeypatch):
    monkeypatch.setitem(tokenizer._makers, "chatty", lambda config, texts: Chatty())


@pytest.fixture
def chat(config, tmp_path):
    def make(lines, split="train", **changes):
        path = tmp_path / "talk.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        given = {"dataset_type": "chat", "dataset_path": str(path), "tokenizer_type": "chatty", **changes}
        return make_dataset(config(**given), split)

    return make


def test_prompts_are_tokenized_as_in_serving_and_answers_count():
    tokens, counts = encode_conversation(Chatty(), TALK)
    assert bytes(tokens.tolist()).decode() == "<user>hi|<assistant>yo|<user>so|<assistant>ok|"
    assert bytes(tokens[counts].tolist()).decode() == "yo|ok|"
    first = tokens[: np.argmax(counts)].tolist()
    assert first == Chatty().chat(TALK[:1])
    assert encode_conversation(Chatty(), TALK, answers_only=False)[1].all()


def test_batches_pack_whole_conversations_and_mask_prompts(chat):
    lines = [{"prompt": "q", "completion": f"{i:02}"} for i in range(40)]
    data = chat(lines, max_target_length=52, per_device_batch_size=3)
    seen = []
    for index in range(data.num_batches):
        batch = data.batch(index)
        for row in range(3):
            starts = np.flatnonzero((batch["inputs_position"][row] == 0) & (batch["inputs_segmentation"][row] > 0))
            assert len(starts) <= 2  # of 22 tokens each
            answers = batch["targets"][row][batch["targets_segmentation"][row] > 0]
            seen += bytes(answers.tolist()).decode().split("|")[:-1]
            text = bytes(batch["inputs"][row, :22].tolist()).decode()
            assert text.startswith("<user>q|<assistant>")
    train = {line["completion"] for line in lines} - set(seen)
    held_out = chat(lines, "eval", max_target_length=52, per_device_batch_size=3)
    assert held_out.describe()["conversations"] == len(train) >= 1
    assert data.describe()["conversations"] == 40 - len(train)
    again = chat(lines, max_target_length=52, per_device_batch_size=3)
    np.testing.assert_array_equal(again.batch(5)["inputs"], data.batch(5)["inputs"])


def test_long_conversations_are_truncated_and_counted(chat):
    data = chat([{"messages": TALK}, {"prompt": "x", "completion": "y" * 99}, *[{"messages": TALK}] * 2], packing=False,
                max_target_length=40)  # fmt: skip
    assert data.describe()["truncated"] >= 1
    assert (data.batch(0)["targets_segmentation"] > 0).any(axis=1).all()


def test_packing_fills_rows_best_fit():
    sizes = np.random.default_rng(0).integers(1, 60, 200).tolist()
    rows = pack(sizes, 64)
    assert sorted(i for row in rows for i in row) == list(range(200))
    assert max(sum(sizes[i] for i in row) for row in rows) <= 64
    assert len(rows) <= 1.05 * sum(sizes) / 64 + 1


def test_errors_name_the_line_and_the_fix(chat, config, tmp_path):
    good = {"messages": TALK}
    with pytest.raises(ValueError, match=r"tokenizer_type=byte has none: start from an instruct model"):
        chat([good, good], tokenizer_type="byte")
    for line, message in (
        ("{", r"line 2 is not JSON"),
        ({"text": "x"}, r"line 2 has no messages; a line is \{'messages'"),
        ({"messages": TALK[:1]}, r"line 2 has no message of the role 'assistant'"),
    ):
        with pytest.raises(ValueError, match=message):
            chat([good, line, good])
    with pytest.raises(ValueError, match=r"no answer of 1 conversations fits into max_target_length=4: raise it"):
        chat([good, good], max_target_length=4)
    with pytest.raises(FileNotFoundError, match="dataset_type=chat reads JSON lines"):
        make_dataset(config(dataset_type="chat", dataset_path=str(tmp_path / "none"), tokenizer_type="chatty"))
    Chatty.template = "{{ messages | length }}"
    try:
        with pytest.raises(ValueError, match=r"line 1: the chat template changes earlier messages"):
            chat([good, good, good])
    finally:
        Chatty.template = TEMPLATE
