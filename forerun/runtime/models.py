"""Finds a model, loads it, and names the bits that it computes.

MODEL is a transformers folder, a hub id, `demo` or `sim:...`. Importing this module, `resolve` and `revision` import
neither torch nor transformers, so that the coordinator can find a tokenizer; loading does. What a worker cannot
serve exactly is refused here, at start.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun import __version__
from forerun.core.errors import ModelRefused
from forerun.runtime.demo_model import demo_folder
from forerun.runtime.folders import check_depth, check_present, check_shapes, header_bytes, read_entries, weight_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = ("float32", "bfloat16", "float16")
CUTTABLE_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Layers whose state is keys and values by position, so that a rejected token can be cut off again."""

COMPANY_ROPE = frozenset({"longrope", "dynamic"})
"""Rotary embeddings that transformers derives from the longest sequence of a pass: others would change a text."""

SAMPLES, SAMPLE_BYTES = 64, 16 * 1024
NOT_IDENTITY = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"})
"""Keys of config.json that say how a folder came about, not which model it is."""
NUMERIC_ENVIRONMENT = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
)


def resolve(model: str, *, weights: bool = True) -> str:
    """The folder of MODEL, fetched or converted into a cache if need be; `sim:...` is returned as it is.

    weights: False fetches from the hub only what describes the model (configuration and tokenizer).
    Raises ModelRefused if there is no such model.
    """
    if model.startswith("sim:"):
        return model
    if model == "demo":
        return str(demo_folder())
    folder = Path(os.path.expanduser(model))  # leaves an unknown ~user as it is
    if model and folder.exists():
        if not (folder / "config.json").is_file():
            raise ModelRefused(f"{model!r} is no transformers folder: it holds no config.json")
        return str(folder.resolve())
    if not model or model.startswith((".", "~", os.sep)) or model.count("/") > 1:
        raise ModelRefused(
            f"there is no folder {model!r}; MODEL is a transformers folder, a hub id, `demo` or `sim:...`"
        )
    return _from_hub(model, weights)


def _from_hub(repo: str, weights: bool) -> str:
    from huggingface_hub import snapshot_download

    described = ["*.json", "*.jinja", "*.model", "*.txt"]
    others = ["original/*", "onnx/*", "consolidated*"]  # the same weights once more
    try:
        folder = snapshot_download(
            repo, allow_patterns=[*described, *(["*.safetensors"] if weights else [])], ignore_patterns=others
        )
    except Exception as error:  # its errors share no base class
        reason = str(error).strip().partition("\n")[0]
        raise ModelRefused(
            f"{repo!r} is neither a folder here nor to be had from the model hub ({type(error).__name__}: {reason}); "
            "MODEL is a transformers folder, a hub id, `demo` or `sim:...`"
        ) from error
    if not (Path(folder) / "config.json").is_file():
        raise ModelRefused(f"{repo!r} on the model hub is no transformers model: it holds no config.json")
    if weights and not any(Path(folder).glob("*.safetensors")):
        raise ModelRefused(
            f"{repo!r} on the model hub holds no .safetensors files; weights in pickles (.bin) are never fetched or "
            "read, since reading one runs the code in it"
        )
    return folder


def load_causal_lm(folder: str, dtype: str, layers: int | None = None, attention: str = "forerun") -> PreTrainedModel:
    """The decoder-only model of `folder`, on the CPU, ready for inference.

    dtype: float32, bfloat16 or float16. layers: only the first so many, with the model's own norm and head (early
    exit); the weights of the others are not read. attention: a name registered with transformers' AttentionInterface.
    Raises ModelRefused for what cannot be served: encoders, layers with a recurrent state, missing weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config, outline = described(folder, dtype, layers, attention)
    shapes = {name: tuple(weight.shape) for name, weight in outline.state_dict().items()}
    entries = read_entries(folder)
    if layers is None:
        check_depth(folder, entries, shapes, outline._keys_to_ignore_on_load_unexpected or ())
    check_shapes(folder, entries, shapes)
    with _quiet_transformers():
        try:
            found: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=attention,
                output_loading_info=True,
                local_files_only=True,
                use_safetensors=True,
            )
        except Exception as error:  # its errors, safetensors' and torch's share no base class
            reason = str(error).strip().partition("\n")[0]
            raise ModelRefused(f"{folder} cannot be loaded: {type(error).__name__}: {reason}") from error
    model: PreTrainedModel = found[0]
    if missing := sorted(found[1]["missing_keys"]):
        raise ModelRefused(f"{folder} lacks {len(missing)} weights of its model, {missing[0]!r} the first")
    model.eval().requires_grad_(False)
    for weight in model.parameters():
        weight.data = weight.data.clone()  # out of the mapped file: one view would keep all of it in memory
    return model


def described(
    folder: str, dtype: str, layers: int | None, attention: str = "forerun"
) -> tuple[PretrainedConfig, PreTrainedModel]:
    """The configuration, and the model it describes without a byte of weights (torch's meta device)."""
    import torch
    from transformers import AutoModelForCausalLM

    import forerun.runtime.attention  # noqa: F401  makes the name "forerun" known

    if dtype not in DTYPES:
        raise ModelRefused(f"dtype {dtype!r} is not known; one of: {', '.join(DTYPES)}")
    config = read_config(folder)
    if layers is not None:
        keep_layers(config, layers)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelRefused(f"{folder} holds quantised weights; only plain float32, bfloat16 and float16 are served")
    with _quiet_transformers(), torch.device("meta"):
        try:
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=attention
            )
        except Exception as error:  # whatever a configuration can make a model's code raise
            reason = str(error).strip().partition("\n")[0]
            raise ModelRefused(f"{folder}/config.json describes no model: {type(error).__name__}: {reason}") from error
    return config, model


def read_config(folder: str) -> PretrainedConfig:
    """The configuration of a model that can be served; ModelRefused says why it cannot."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, AutoConfig

    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a missing file, broken JSON and an unknown type come as unrelated types
        told = " ".join(str(error).split())
        raise ModelRefused(f"{folder} has no configuration that transformers knows: {told}") from error
    kind = f"{folder} is of type {config.model_type!r}, which"
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise ModelRefused(f"{kind} is an encoder with a decoder; only decoder-only models are served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelRefused(f"{kind} is no causal language model; only decoder-only models are served")
    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    if masked or getattr(text, "use_bidirectional_attention", None) is True:
        raise ModelRefused(
            f"{kind} is an encoder: its tokens see those that follow; only decoder-only models are served"
        )
    if (layers := getattr(text, "num_hidden_layers", None)) is not None and layers < 1:
        raise ModelRefused(f"{folder}/config.json states {layers} layers; a model has at least 1")
    other = sorted(set(getattr(text, "layer_types", None) or ()) - CUTTABLE_LAYERS)
    if other or getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_is_stateful", False):
        kinds = f"layers of type {', '.join(other)}" if other else "recurrent layers"
        raise ModelRefused(f"{kind} has {kinds}: their state cannot be cut back to a length when a draft is rejected")
    ropes = _rope_types(getattr(text, "rope_parameters", None)) & COMPANY_ROPE
    if ropes:
        raise ModelRefused(
            f"{kind} has rotary embeddings of type {', '.join(sorted(ropes))}: they depend on the longest sequence "
            "of a pass, so one request would change the text of another"
        )
    return config


def _rope_types(parameters: object) -> set[str]:
    """`rope_type` of a model, or of each of its kinds of layers."""
    if not isinstance(parameters, dict):
        return set()
    nested = (_rope_types(value) for value in parameters.values())
    return {str(parameters.get("rope_type", "default"))}.union(*nested)


def keep_layers(config: PretrainedConfig, layers: int) -> None:
    """Shorten `config` to the first `layers` layers, its lists with an entry per layer too."""
    text = config.get_text_config(decoder=True)
    total: int = text.num_hidden_layers
    if not 1 <= layers <= total:
        raise ModelRefused(f"{layers} layers were asked of a model with {total}; 1 to {total} are possible")
    if layers == total:
        return
    if getattr(text, "num_kv_shared_layers", None):
        raise ModelRefused(
            f"a model of type {text.model_type!r} cannot exit early: its last layers share keys and values"
        )
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == total and not name.endswith(("token_id", "token_ids")):
            setattr(text, name, value[:layers])
    text.num_hidden_layers = layers


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Its load report lists the weights of dropped layers as unexpected; what matters of it is checked here."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def revision(folder: str) -> str:
    """Which model this is: 12 hex digits of its configuration and samples of its weights, wherever the folder lies."""
    return _digest(_identity(folder))[:12]


def numerics_id(folder: str, dtype: str, device: str, parallelism: str, layers: int | None) -> str:
    """16 hex digits of all that decides the bits of a logit: between workers of equal ids an answer moves exactly.

    parallelism: ranks and threads of a rank, in any words that are equal if and only if they are.
    """
    return _digest(
        {
            "model": _identity(folder),
            "dtype": dtype,
            "layers": layers,
            "parallelism": parallelism,
            "device": _device(device),
            "versions": {"forerun": __version__} | {name: metadata.version(name) for name in ("torch", "transformers")},
            "environment": {name: os.environ.get(name) for name in NUMERIC_ENVIRONMENT},
        }
    )[:16]


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _identity(folder: str) -> dict[str, Any]:
    check_present(folder)
    try:
        config = dict(json.loads((Path(folder) / "config.json").read_bytes()))
    except (ValueError, TypeError) as error:
        raise ModelRefused(f"{folder}/config.json is no JSON object: {error}") from error
    return {
        "config": {key: value for key, value in config.items() if key not in NOT_IDENTITY},
        "weights": [[file.name, file.stat().st_size, _sampled(file)] for file in weight_files(folder)],
    }


def _sampled(path: Path) -> str:
    """Hash of the header and of evenly spaced samples: a second for hundreds of gigabytes."""
    size = path.stat().st_size
    samples = hashlib.sha256()
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            length = header_bytes(path)
            file.seek(8)
            samples.update(file.read(length))
        for at in range(SAMPLES):
            file.seek(max(0, size - SAMPLE_BYTES) * at // (SAMPLES - 1))
            samples.update(file.read(SAMPLE_BYTES))
    return samples.hexdigest()


def _device(device: str) -> list[Any]:
    import torch

    kind = torch.device(device).type
    if kind == "cpu":  # libraries pick kernels and block sizes by the processor
        return [kind, platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor()]
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return [kind, properties.name, properties.major, properties.minor, torch.version.cuda]
    return [kind]


@lru_cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
