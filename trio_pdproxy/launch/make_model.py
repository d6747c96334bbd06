"""Write a tiny Llama with random weights. Run by the engine environment's interpreter, never imported.

    python make_model.py FOLDER

2.5 M parameters, 5 MB, a byte-level tokenizer without merges: every prompt is legal, one byte is one
token. The weights' spread is wide on purpose: with Llama's usual 0.02 half of all prompts continue alike,
and a test could not see that one request got another one's KV. Seeded: the same model everywhere.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

SEED = 20
SPREAD = 0.2
SPECIALS = ("<unk>", "<s>", "</s>", "<pad>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tokenizer() -> Any:
    tokenizers = import_module("tokenizers")
    transformers = import_module("transformers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIALS, *alphabet])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(size: int) -> Any:
    torch = import_module("torch")
    transformers = import_module("transformers")
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        vocab_size=size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=SPREAD,
        bos_token_id=SPECIALS.index("<s>"),
        eos_token_id=SPECIALS.index("</s>"),
        pad_token_id=SPECIALS.index("<pad>"),
    )
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def main(folder: Path) -> None:
    tokenizer = make_tokenizer()
    make_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
