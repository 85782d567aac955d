"""Models: finding, converting, loading, refusing, and naming the bits."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BertConfig, MambaConfig, RwkvConfig, T5Config

from forerun.core.errors import ModelRefused
from forerun.runtime import models
from forerun.runtime.folders import weight_files
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm, numerics_id, read_config, resolve, revision
from tests.models import ARCHITECTURES, END, tiny_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("llama"), layers=3)


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return out


# finding


def test_simulated_models_and_folders_resolve_to_themselves(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve("sim:pass_ms=20") == "sim:pass_ms=20"
    assert resolve(llama) == llama
    monkeypatch.chdir(Path(llama).parent)
    assert resolve(Path(llama).name) == llama


@pytest.mark.parametrize("model", ["", "./nothing", "/nothing/here", "~/nothing-here", "a/b/c"])
def test_a_folder_that_is_not_there_is_refused_by_name(model: str) -> None:
    with pytest.raises(ModelRefused, match=r"there is no folder .*`demo`") as refused:
        resolve(model)
    assert repr(model) in str(refused.value)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"holds no config\.json"):
        resolve(str(tmp_path))


def hub(repo: Path, wanted: list[list[str]]) -> Any:
    def snapshot_download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        if name != "org/name":
            raise FileNotFoundError(f"no repository {name}\nand a second line")
        wanted.append(allow_patterns)
        return str(repo)

    return snapshot_download


@pytest.mark.parametrize("weights", [True, False])
def test_a_hub_id_fetches_safetensors_and_no_weights_unless_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: bool
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    wanted: list[list[str]] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub(tmp_path, wanted))
    assert resolve("org/name", weights=weights) == str(tmp_path)
    assert len(wanted) == 1
    assert "*.json" in wanted[0]
    assert ("*.safetensors" in wanted[0]) is weights
    assert not any("bin" in pattern for pattern in wanted[0])


def test_pickles_on_the_hub_are_never_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    wanted: list[list[str]] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub(tmp_path, wanted))
    with pytest.raises(ModelRefused, match=r"holds no \.safetensors files; weights in pickles"):
        resolve("org/name")
    assert len(wanted) == 1
    assert resolve("org/name", weights=False) == str(tmp_path)
    assert not any("bin" in pattern for asked in wanted for pattern in asked)


def test_an_unknown_hub_id_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub(tmp_path, []))
    with pytest.raises(ModelRefused, match=r"'org/other' is neither a folder .*no repository org/other") as refused:
        resolve("org/other")
    assert "\n" not in str(refused.value)
    with pytest.raises(ModelRefused, match="holds no config"):
        resolve("org/name")


# loading


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_architecture_loads_ready_for_inference(tmp_path: Path, arch: str) -> None:
    folder = tiny_model(tmp_path, arch=arch)
    model: Any = load_causal_lm(folder, "float32", attention="eager")
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())
    assert model.config._attn_implementation == "eager"
    assert logits(model, [1, 2, 3]).shape == (3, 256)
    half = load_causal_lm(folder, "bfloat16", attention="eager")
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_an_early_exit_is_the_first_layers_with_the_own_norm_and_head(
    tmp_path: Path, arch: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_model(tmp_path, arch=arch, layers=4, **({"sliding_window": 4} if "gemma" in arch else {}))
    capfd.readouterr()
    whole: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    capfd.readouterr()
    logging.getLogger("transformers").addHandler(caplog.handler)
    exits: Any = load_causal_lm(folder, "float32", layers=2, attention="eager")
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert (caplog.text, *capfd.readouterr()) == ("", "", "")
    base = exits.base_model
    stack = "h" if arch == "gpt2" else "layers"
    assert len(getattr(base, stack)) == exits.config.num_hidden_layers == 2
    setattr(whole.base_model, stack, getattr(whole.base_model, stack)[:2])
    whole.config.num_hidden_layers = 2
    ids = list(range(1, 12))
    assert torch.equal(logits(exits, ids), logits(whole, ids))


def test_all_layers_are_the_model_itself(llama: str) -> None:
    whole, same = (load_causal_lm(llama, "float32", layers=layers, attention="eager") for layers in (None, 3))
    assert torch.equal(logits(whole, [1, 2, 3]), logits(same, [1, 2, 3]))


@pytest.mark.parametrize("layers", [-1, 0, 4])
def test_a_number_of_layers_the_model_has_not_is_refused(llama: str, layers: int) -> None:
    with pytest.raises(ModelRefused, match=f"{layers} layers were asked of a model with 3; 1 to 3 are possible"):
        load_causal_lm(llama, "float32", layers=layers)


def test_lists_that_are_not_per_layer_stay(tmp_path: Path) -> None:
    tiny_model(tmp_path, arch="gemma3_text", layers=2, sliding_window=4)
    config = AutoConfig.from_pretrained(tmp_path)
    config.eos_token_id = [1, 106]
    models.keep_layers(config, 1)
    assert (config.num_hidden_layers, config.layer_types) == (1, ["sliding_attention"])
    assert config.eos_token_id == [1, 106]


def test_an_unknown_dtype_is_refused(llama: str) -> None:
    with pytest.raises(ModelRefused, match="'int8' is not known; one of: float32, bfloat16, float16"):
        load_causal_lm(llama, "int8")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (T5Config(num_layers=1, d_model=8), "encoder with a decoder"),
        (BertConfig(num_hidden_layers=1), "its tokens see those that follow"),
        (MambaConfig(num_hidden_layers=1), "cannot be cut back"),
        (RwkvConfig(num_hidden_layers=1), "has recurrent layers: their state cannot be cut back"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_what_cannot_be_served_exactly_is_refused_at_start(tmp_path: Path, config: Any, why: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=f"of type '{config.model_type}'.*{why}"):
        load_causal_lm(str(tmp_path), "float32")


def described(folder: Path, **changes: Any) -> str:
    """The tiny model of `folder` with another config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(folder)


def test_hybrid_layers_are_refused_by_name(tmp_path: Path) -> None:
    tiny_model(tmp_path, arch="qwen3")
    hybrid = described(tmp_path, layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ModelRefused, match="layers of type linear_attention: their state cannot be cut back"):
        load_causal_lm(hybrid, "float32")


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    with pytest.raises(ModelRefused, match="no configuration that transformers knows"):
        load_causal_lm(described(tmp_path, model_type="not-a-model"), "float32")


def test_missing_weights_are_refused_not_invented(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    with pytest.raises(ModelRefused, match=r"lacks 9 weights of its model, 'model\.layers\.2\."):
        load_causal_lm(described(tmp_path, num_hidden_layers=3), "float32", attention="eager")


# naming the bits


ARGUMENTS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "parallelism": "ranks=1 threads=1", "layers": None}


def test_equal_models_have_equal_ids_wherever_they_lie(tmp_path: Path) -> None:
    one, two = (tiny_model(tmp_path / name) for name in ("one", "two"))
    os.utime(Path(two) / "model.safetensors", (0, 0))
    described(Path(two), transformers_version="0", _name_or_path="elsewhere")
    assert revision(one) == revision(two)
    assert numerics_id(one, **ARGUMENTS) == numerics_id(two, **ARGUMENTS)
    assert (len(revision(one)), len(numerics_id(one, **ARGUMENTS))) == (12, 16)
    assert int(numerics_id(one, **ARGUMENTS), 16) >= 0


@pytest.mark.parametrize(
    "change", [{"dtype": "bfloat16"}, {"device": "meta"}, {"parallelism": "ranks=1 threads=2"}, {"layers": 1}]
)
def test_what_decides_the_bits_decides_the_numerics_id(llama: str, change: dict[str, Any]) -> None:
    assert numerics_id(llama, **(ARGUMENTS | change)) != numerics_id(llama, **ARGUMENTS)


@pytest.mark.parametrize("name", models.NUMERIC_ENVIRONMENT)
def test_switches_of_the_libraries_decide_it_too(llama: str, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = numerics_id(llama, **ARGUMENTS)
    monkeypatch.setenv(name, "AVX512,STRICT")
    assert numerics_id(llama, **ARGUMENTS) != before
    monkeypatch.undo()
    assert numerics_id(llama, **ARGUMENTS) == before


def test_versions_decide_it_too(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_id(llama, **ARGUMENTS)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    assert numerics_id(llama, **ARGUMENTS) != before


def test_other_weights_or_another_configuration_are_another_revision(tmp_path: Path) -> None:
    one, other_weights = tiny_model(tmp_path / "one"), tiny_model(tmp_path / "two", seed=1)
    before = revision(one)
    assert revision(other_weights) != before
    assert revision(described(Path(one), rms_norm_eps=1e-3)) != before


def test_a_change_anywhere_in_a_small_file_is_seen(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    before, content = revision(folder), bytearray(weights.read_bytes())
    for at in (100, len(content) // 2, len(content) - 1):  # header, middle, end
        changed = content.copy()
        changed[at] ^= 1
        weights.write_bytes(changed)
        assert revision(folder) != before


def test_shards_are_those_of_the_index(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"\0" * 8)
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
    assert len(weight_files(str(tmp_path))) == 3
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weight_files(str(tmp_path))] == ["a.safetensors", "b.safetensors"]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelRefused, match="holds no weights"):
        revision(str(tmp_path))


# the tiny models that other tests stand on


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiny_models_are_worth_speculating_on(tmp_path: Path, arch: str) -> None:
    folder = tiny_model(tmp_path, arch=arch)
    target, draft = (load_causal_lm(folder, "float32", layers=layers, attention="eager") for layers in (None, 1))
    answers: Any = target
    ids = answers.generate(
        torch.tensor([[1, 2, 3, 4]]), do_sample=False, max_new_tokens=100, attention_mask=torch.ones(1, 4)
    )[0].tolist()
    assert len(ids) == 104
    assert len(set(ids)) > 20
    best = logits(target, ids)
    gaps = best.topk(2).values.diff().abs()
    assert gaps.median() > 0.5
    assert gaps.min() > 1e-4
    right = (best.argmax(-1) == logits(draft, ids).argmax(-1)).float().mean()
    assert 0.4 < right < 0.9


def test_tiny_tokenizers_know_any_id_and_any_text(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, vocab=300, eos=2)
    alone, transformers = Tokenizer.from_file(f"{folder}/tokenizer.json"), AutoTokenizer.from_pretrained(folder)
    for at in range(300):
        text = alone.decode([at], skip_special_tokens=False)
        assert text == (END if at == 2 else transformers.decode([at]))
        assert len(text) == (len(END) if at == 2 else 1)
        assert alone.encode(text).ids == transformers(text).input_ids == [at]
    assert alone.decode(alone.encode("Two words.\n").ids) == "Two words.\n"
    assert alone.encode("\U0001f642").ids == [0]
    assert transformers.eos_token_id == AutoConfig.from_pretrained(folder).eos_token_id == 2
    chat = transformers.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "user: hi\nassistant: "


@pytest.mark.parametrize("rope", ["longrope", "dynamic"])
def test_rotary_embeddings_that_depend_on_company_are_refused(tmp_path: Path, rope: str) -> None:
    folder = Path(tiny_model(tmp_path / "m"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0}
    config["rope_parameters"] |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if rope == "longrope" else {}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match=rope):
        read_config(str(folder))


def test_mixtures_of_experts_are_refused_since_their_bits_depend_on_company(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 256}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path)
    torch.set_num_threads(1)
    with pytest.raises(ModelRefused, match="mixtures of experts"):
        TransformersModel(load_causal_lm(str(tmp_path), "float32"), 256)
