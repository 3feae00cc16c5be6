"""What other people's code computes with the same weights: the .npz files beside this script.

Nothing of Octavo is imported here. After `make data ARGS="stories15m smollm2 gemma3 minilm"`, in an environment
of its own:

    python3.11 -m venv oracle
    oracle/bin/pip install torch transformers numpy safetensors gguf accelerate
    oracle/bin/python tests/pretrained/golden/make.py [stories15m] [smollm2] [gemma3] [minilm]

Made with torch 2.13.0 and transformers 5.22.2, in float32; stories15m.npz from the original model.bin and tokenizer.bin
of llama2.c, which the directory that `make data` writes is a conversion of. Files of language models hold, without
pickles:

    text            what was read (a string)
    tokens          [length] its ids
    logsumexp       [length] of the logits at each token, which predict the next one
    nll             the mean over length - 1 predictions of -log p(next token), in nats
    positions       [16] tokens of which logits are kept
    top_ids, top_logits        [16, 64] the largest, in falling order
    random_ids, random_logits  [16, 64] any others

`smollm2.npz` has also `messages` (JSON), `chat` (the text its template makes of them) and `chat_tokens`. `minilm.npz`
has `sentences`, `tokens` and `mask` [sentences, length], and `embeddings` [sentences, 384]: means over tokens, of
length one.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertModel,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).parent
DATA = HERE.parents[2] / ".cache" / "data"

STORY = """Once upon a time, there was a little boy named Ben. Ben had a small red boat. He liked to play with his \
boat in the pond behind his house. One sunny day, Ben saw a big frog sitting on a rock. The frog looked very sad.
"Why are you sad, frog?" asked Ben. The frog said, "I want to go to the other side of the pond, but the water is too \
cold for me." Ben thought for a moment. Then he had an idea. He put his red boat next to the rock and said, "You can \
sit in my boat, and I will push you."
The frog was so happy. It jumped into the boat, and Ben pushed it slowly with a long stick. When they got to the \
other side, the frog jumped out and said, "Thank you, Ben! You are a good friend." Ben smiled and waved. From that \
day on, Ben and the frog played together every day, and they were never sad again."""

ESSAY = """The lighthouse at the end of the harbour was built in 1874, after a winter in which three ships were lost \
on the rocks within sight of the town. For almost a century a keeper lived there with his family, and every evening \
he climbed the ninety-two steps to light the lamp. Today the light is switched on by a computer, and nobody sleeps \
in the small white house. In summer, however, visitors can still climb to the top. On a clear day they see the \
islands, the fishing boats coming home, and, far to the north, the mountains. Many of them ask the same question: \
was it lonely to live here? The last keeper, who is now eighty years old, always gives the same answer. He says that \
the sea was never silent."""

MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant that answers briefly."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And how do you say \u201cthank you\u201d there?"},
]

SENTENCES = [
    "A dog runs across the beach.",
    "A puppy is running along the shore of the sea.",
    "The central bank raised its interest rate by a quarter of a percentage point.",
    "Rain.",
    "How do I reverse a list in Python without copying it?",
    "Quantization stores the weights of a neural network in fewer bits, which saves memory and, with the right "
    "kernels, time.",
    "Caf\u00e9 cr\u00e8me, na\u00efve d\u00e9j\u00e0 vu: accents are stripped before words are split.",
    "E = mc\u00b2; 3.14159 < 22/7!? (#42, 50 %)",
    "\u6771\u4eac is the capital of Japan, \u041c\u043e\u0441\u043a\u0432\u0430 that of Russia.",
    "supercalifragilisticexpialidocious antidisestablishmentarianism",
    STORY.replace("\n", " "),
    " ".join([ESSAY, STORY, ESSAY]),
]


@torch.no_grad()
def of_logits(model: torch.nn.Module, tokens: list[int]) -> dict[str, np.ndarray]:
    logits = model(torch.tensor([tokens])).logits[0].double()
    whole = torch.logsumexp(logits, -1)
    right = logits[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    positions = np.linspace(0, len(tokens) - 1, 16).round().astype(np.int32)
    some = logits[torch.from_numpy(positions).long()]
    top_logits, top_ids = torch.topk(some, 64)
    random = np.random.default_rng(0)
    others = np.stack([random.choice(logits.shape[1], 64, replace=False) for _ in positions]).astype(np.int32)
    return {
        "tokens": np.asarray(tokens, np.int32),
        "logsumexp": whole.float().numpy(),
        "nll": (whole[:-1] - right).mean().numpy(),
        "positions": positions,
        "top_ids": top_ids.int().numpy(),
        "top_logits": top_logits.float().numpy(),
        "random_ids": others,
        "random_logits": some.gather(1, torch.from_numpy(others).long()).float().numpy(),
    }


def stories15m(folder: Path) -> dict[str, np.ndarray]:
    tokens = AutoTokenizer.from_pretrained(folder)(STORY)["input_ids"]
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return {"text": np.asarray(STORY), **of_logits(model, tokens)}


def smollm2(folder: Path) -> dict[str, np.ndarray]:
    name = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    print(model.config)
    tokens = tokenizer(ESSAY, add_special_tokens=False)["input_ids"][:128]
    text = tokenizer.decode(tokens)
    assert ESSAY.startswith(text), text
    chat = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
    return {
        "text": np.asarray(text),
        **of_logits(model, tokens),
        "messages": np.asarray(json.dumps(MESSAGES)),
        "chat": np.asarray(chat),
        "chat_tokens": np.asarray(ids, np.int32),
    }


def gemma3(folder: Path) -> dict[str, np.ndarray]:
    name = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = tokenizer(ESSAY)["input_ids"][:96]
    return {"text": np.asarray(ESSAY), **of_logits(model, tokens)}


@torch.no_grad()
def minilm(folder: Path) -> dict[str, np.ndarray]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]")
    batch = tokenizer(SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt")
    model = BertModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weight = mask[..., None].float()
    mean = (hidden * weight).sum(1) / weight.sum(1)
    return {
        "sentences": np.asarray(SENTENCES),
        "tokens": ids.numpy().astype(np.int32),
        "mask": mask.numpy().astype(bool),
        "embeddings": torch.nn.functional.normalize(mean, dim=-1).numpy(),
    }


MAKERS = {"stories15m": stories15m, "smollm2": smollm2, "gemma3": gemma3, "minilm": minilm}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the golden outputs again.")
    parser.add_argument("names", nargs="*", choices=[*MAKERS, []], help="all of them, unless named")
    parser.add_argument("--data", type=Path, default=DATA, help="where scripts/data has put the weights")
    given = parser.parse_args()
    for name in given.names or MAKERS:
        arrays = MAKERS[name](given.data / name)
        path = HERE / f"{name}.npz"
        np.savez_compressed(path, **arrays)
        shapes = {key: (array.shape, str(array.dtype)) for key, array in arrays.items()}
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB", shapes, "nll", arrays.get("nll"))
