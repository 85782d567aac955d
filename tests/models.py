"""Tiny random models in float32, saved as transformers folders: a moment to make, milliseconds to run.

Their greedy text is neither constant nor soon a loop, their best two logits are far apart, and their first layer alone
is right often but not always, so that speculation has something to accept and something to reject.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.utils import logging

ARCHITECTURES = ("llama", "qwen3", "gemma3_text", "gpt2")
END = "</s>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_model(
    folder: str | Path,
    *,
    vocab: int = 256,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    context: int = 512,
    seed: int = 0,
    arch: str = "llama",
    sliding_window: int | None = None,
    eos: int | None = None,
    peak: float = 6.0,
    later: float = 0.3,
) -> str:
    """Write a model and its tokenizer (a token is a character) into `folder`; returns the folder.

    arch: one of ARCHITECTURES. sliding_window: of qwen3 and gemma3_text; every other layer slides, the last one never.
    eos: id of the end token; without one an answer has the length that was asked for. peak: standard deviation of the
    logits. later: weight of what the layers after the first add, so how seldom an early exit after the first is right.
    """
    if sliding_window is not None and arch not in ("qwen3", "gemma3_text"):
        raise ValueError(f"{arch} has no sliding window; use qwen3 or gemma3_text")
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": eos,
    }
    if arch != "gpt2":
        sizes |= {"intermediate_size": 2 * hidden, "num_key_value_heads": kv_heads, "head_dim": hidden // heads}
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(_config(arch, sizes, sliding_window), dtype=torch.float32).eval()
    _fill(model, seed, peak, later)
    model.save_pretrained(folder)
    _write_tokenizer(Path(folder), vocab, context, eos)
    return str(folder)


def _config(arch: str, sizes: dict[str, Any], sliding_window: int | None) -> PretrainedConfig:
    last = sizes["num_hidden_layers"] - 1
    kinds = ["sliding_attention" if (last - at) % 2 else "full_attention" for at in range(last + 1)]
    if arch == "llama":
        return LlamaConfig(**sizes)
    if arch == "gpt2":
        return GPT2Config(**sizes)
    if arch == "qwen3":
        if sliding_window is None:
            return Qwen3Config(**sizes)
        return Qwen3Config(**sizes, use_sliding_window=True, sliding_window=sliding_window, layer_types=kinds)
    if arch == "gemma3_text":
        window = sliding_window or sizes["max_position_embeddings"]
        return Gemma3TextConfig(
            **sizes, query_pre_attn_scalar=sizes["head_dim"], sliding_window=window, layer_types=kinds
        )
    raise ValueError(f"arch {arch!r} is none of {', '.join(ARCHITECTURES)}")


@torch.no_grad()
def _fill(model: PreTrainedModel, seed: int, peak: float, later: float) -> None:
    """Weights from `seed` alone, whatever transformers' own initialisation; norms and biases stay."""
    draw = torch.Generator().manual_seed(seed)
    transposed = model.config.model_type == "gpt2"  # Conv1D keeps inputs x outputs
    for name, weight in model.named_parameters():
        is_later = ".0." not in name
        if "post_attention_layernorm" in name or "post_feedforward_layernorm" in name:
            if model.config.model_type == "gemma3_text" and is_later:
                weight.fill_(later - 1.0)  # its norms, which follow the layer's output, multiply by 1 + weight
        elif weight.ndim > 1:
            fan_in = weight.shape[0 if transposed else 1]
            if "embed_tokens" in name:
                scale = fan_in**-0.5 if model.config.model_type == "gemma3_text" else 1.0  # Gemma multiplies it back
            elif "wte" in name or "wpe" in name:
                scale = 1.0 if "wte" in name else 0.3
            elif "lm_head" in name:
                scale = peak * weight.shape[1] ** -0.5
            else:
                adds = any(part in name for part in ("o_proj", "down_proj", "c_proj"))
                scale = 1.5 * fan_in**-0.5 * (later if adds and is_later else 1.0)
            weight.copy_(torch.randn(weight.shape, generator=draw) * scale)


def _write_tokenizer(folder: Path, vocab: int, context: int, eos: int | None) -> None:
    """Any id is a character, or END; any text encodes, what is not in the vocabulary as id 0 (1 if 0 is END)."""
    characters = string.ascii_lowercase + " " + string.ascii_uppercase + string.digits + string.punctuation + "\n"
    characters += "".join(chr(code) for code in range(0x100, 0x2000) if chr(code).isalpha())
    tokens = [END if at == eos else characters[at] for at in range(vocab)]
    unknown = tokens[1 if eos == 0 else 0]
    tokenizer = Tokenizer(WordLevel(vocab={token: at for at, token in enumerate(tokens)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    described: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    if eos is not None:
        tokenizer.add_special_tokens([END])
        described |= {"eos_token": END, "pad_token": END}
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(described, indent=2))
