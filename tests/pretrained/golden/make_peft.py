"""An adapter by Hugging Face's PEFT, and the logits of its model: what `octavo.pretrained` is compared with.

python tests/pretrained/golden/make_peft.py                  writes golden/peft: needs torch, transformers and peft
python tests/pretrained/golden/make_peft.py ADAPTER          prints the logits of that model with an adapter, as JSON
"""

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

FOLDER = Path(__file__).with_name("peft")
TOKENS = [[i * 5 % 32 for i in range(12)]]


def logits(model) -> list:
    with torch.no_grad():
        return model.eval()(torch.tensor(TOKENS)).logits.double().numpy().round(6).tolist()


def make() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    model.save_pretrained(FOLDER / "base")
    names = ["q_proj", "v_proj", "o_proj", "down_proj"]
    rank = {"r": 2, "rank_pattern": {"down_proj": 3}, "lora_alpha": 6, "use_rslora": True}
    tuned = get_peft_model(
        model, LoraConfig(**rank, target_modules=names, task_type="CAUSAL_LM", init_lora_weights=False)
    )
    tuned.save_pretrained(FOLDER / "adapter")
    (FOLDER / "logits.json").write_text(json.dumps(logits(tuned)))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        base = LlamaForCausalLM.from_pretrained(FOLDER / "base")
        print(json.dumps(logits(PeftModel.from_pretrained(base, sys.argv[1]))))
    else:
        make()
