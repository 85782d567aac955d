"""Bad model folders end the start with one clear line; a pickle is never read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.core.errors import ModelRefused
from forerun.runtime.folders import check_depth, read_entries
from forerun.runtime.models import load_causal_lm, revision
from forerun.runtime.shards import load_shard
from tests.models import tiny_model

WEIGHT = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny_model(tmp_path))


def in_shards(folder: Path) -> dict[str, str]:
    """The model in two files with an index."""
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"one.safetensors": names[:9], "two.safetensors": names[9:]}
    for file, held in parts.items():
        save_file({name: whole[name] for name in held}, folder / file, metadata={"format": "pt"})
    where = {name: file for file, held in parts.items() for name in held}
    write_index(folder, where)
    return where


def write_index(folder: Path, where: dict[str, str], **others: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where} | others))


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def missing_shard(folder: Path) -> None:
    in_shards(folder)
    (folder / "two.safetensors").unlink()


def shard_without_its_weight(folder: Path) -> None:
    where = in_shards(folder)
    write_index(folder, where | {"model.norm.bias": "one.safetensors"})


def index_that_leads_out(folder: Path) -> None:
    where = in_shards(folder)
    write_index(folder, where | {WEIGHT: "../one.safetensors"})


def unreadable_index(folder: Path) -> None:
    in_shards(folder)
    (folder / INDEX).write_text('{"weight_map": 3}')


def index_without_metadata(folder: Path) -> None:
    write_index(folder, in_shards(folder), metadata=None)


def stale_index(folder: Path) -> None:
    """The whole model saved into a folder that held it in shards."""
    whole = (folder / "model.safetensors").read_bytes()
    in_shards(folder)
    (folder / "model.safetensors").write_bytes(whole)


def index_of_a_part(folder: Path) -> None:
    """One weight lies in a file of its own too, where the index says it is."""
    whole = load_file(folder / "model.safetensors")
    save_file({WEIGHT: whole[WEIGHT] * 2}, folder / "one.safetensors", metadata={"format": "pt"})
    write_index(folder, dict.fromkeys(whole, "model.safetensors") | {WEIGHT: "one.safetensors"})


def empty_index(folder: Path) -> None:
    write_index(folder, {})


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_shard(folder: Path) -> None:
    in_shards(folder)
    path = folder / "two.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def cut_in_the_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def longer(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def web_page(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"<!DOCTYPE html><html>404</html>")


def no_json(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")


def wrong_offsets(folder: Path) -> None:
    header = json.dumps({WEIGHT: {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The header is changed, the weights are not."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    change(header)
    described = json.dumps(header).encode()
    path.write_bytes(len(described).to_bytes(8, "little") + described + raw[end:])


def overlapping(folder: Path) -> None:
    other = WEIGHT.replace("layers.0", "layers.1")
    rewritten(folder, lambda header: header[other].update(data_offsets=header[WEIGHT]["data_offsets"]))


def unreadable_metadata(folder: Path) -> None:
    rewritten(folder, lambda header: header.update(__metadata__={"format": 1}))


def deeper_than_described(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 1}))


def wrong_shape(folder: Path) -> None:
    changed(folder, lambda weights: weights.update({WEIGHT: torch.zeros(64, 32)}))


def int8(folder: Path) -> None:
    changed(folder, lambda weights: weights.update({WEIGHT: weights[WEIGHT].to(torch.int8)}))


def float8(folder: Path) -> None:
    changed(folder, lambda weights: weights.update({WEIGHT: weights[WEIGHT].to(torch.float8_e4m3fn)}))


def quantised(folder: Path) -> None:
    path = folder / "config.json"
    described = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    path.write_text(json.dumps(described))


def only_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({WEIGHT: Trap(folder / "sprung")}))


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def dangling(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "gone")


def described_as(**more: object) -> Callable[[Path], None]:
    def describe(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | more))

    return describe


def nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def incomplete(folder: Path) -> None:
    changed(folder, lambda weights: weights.pop(WEIGHT))


def load(folder: str, ranks: int) -> object:
    return load_causal_lm(folder, "float32") if ranks == 1 else load_shard(folder, "float32", None, 1, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (missing_shard, rf"lacks 'two\.safetensors', one of 1 of 2 files of weights that {INDEX} names"),
        (shard_without_its_weight, r"one\.safetensors holds no 'model\.norm\.bias', though"),
        (index_that_leads_out, r"names '\.\./one\.safetensors', which is no file of this folder"),
        (unreadable_index, "is no index of weights"),
        (index_without_metadata, rf'{INDEX} lacks "metadata", .* \{{\}} would do'),
        (empty_index, rf"{INDEX} names no file: its weight_map is empty"),
        (
            stale_index,
            rf"twice: remove {INDEX} and what it names \(one\.safetensors to two\.safetensors, 2 files\) to serve "
            r"model\.safetensors, or remove model\.safetensors to serve those",
        ),
        (index_of_a_part, rf"twice: remove {INDEX} and what it names \(one\.safetensors\)"),
        (cut, r"model\.safetensors is cut off: \d+ bytes, and \d+ are expected"),
        (cut_shard, r"two\.safetensors is cut off: \d+ bytes, and \d+ are expected"),
        (cut_in_the_header, r"model\.safetensors is cut off: 100 bytes, less than its header of \d+"),
        (longer, r"is longer than its header says: \d+ bytes, and \d+ are expected"),
        (empty, "is cut off: 0 bytes"),
        (web_page, "is no safetensors file: its header would be"),
        (no_json, "has no readable header: JSONDecodeError"),
        (wrong_offsets, "has no readable header: ValueError: .* would lie in bytes 0 to 8"),
        (overlapping, r"would lie in bytes \d+ to \d+; the weight before it ends at \d+"),
        (unreadable_metadata, r"model\.safetensors cannot be read|cannot be loaded: SafetensorError"),
        (wrong_shape, rf"'{WEIGHT}' in .*model\.safetensors is of shape \[64, 32\]; .*asks for \[64, 64\]"),
        (int8, rf"'{WEIGHT}' in .*model\.safetensors is of dtype I8; .*F32, BF16, F16"),
        (float8, rf"'{WEIGHT}' in .* is of dtype F8_E4M3; .*quantised ones are not"),
        (quantised, "holds quantised weights; only plain float32"),
        (
            only_pickles,
            r"holds pickle weights only \(pytorch_model\.bin\); .*Convert it to safetensors.*save_pretrained",
        ),
        (nothing, "holds no weights"),
        (adapter, r"holds an adapter \(adapter_config\.json\).*merge it"),
        (dangling, r"lacks 'model\.safetensors': it leads nowhere"),
        (described_as(num_hidden_layers=0), "states 0 layers; a model has at least 1"),
        (described_as(num_attention_heads="many"), "has no configuration that transformers knows"),
        (incomplete, rf"'{WEIGHT}'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_folder_is_refused_in_one_line(folder: Path, harm: Callable[[Path], None], why: str, ranks: int) -> None:
    harm(folder)
    with pytest.raises(ModelRefused, match=why) as refused:
        load(str(folder), ranks)
    assert "\n" not in str(refused.value)
    assert not (folder / "sprung").exists()


def test_the_trap_would_spring(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Trap(tmp_path / "sprung")))
    assert (tmp_path / "sprung").exists()


def test_a_pickle_beside_safetensors_is_left_alone(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(folder / "sprung")))
    load(str(folder), 1)
    assert not (folder / "sprung").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_files_are_let_go_once_read(folder: Path, ranks: int) -> None:
    """One weight left in a mapped file would keep all of it in memory."""
    model = load(str(folder), ranks)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    del model


def test_shards_are_read_as_one(folder: Path) -> None:
    whole = {name: (entry.dtype, entry.shape) for name, entry in read_entries(str(folder)).items()}
    in_shards(folder)
    entries = read_entries(str(folder))
    assert {name: (entry.dtype, entry.shape) for name, entry in entries.items()} == whole
    assert {entry.file.name for entry in entries.values()} == {"one.safetensors", "two.safetensors"}
    assert whole[WEIGHT] == ("F32", (64, 64))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sharded", [False, True])
def test_an_index_is_served_as_transformers_does(folder: Path, sharded: bool, ranks: int) -> None:
    """Also one that names the single file only."""
    if sharded:
        in_shards(folder)
    else:
        write_index(folder, dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors"))
    entries = read_entries(str(folder))
    load(str(folder), ranks)
    assert {entry.file.name for entry in entries.values()} == (
        {"one.safetensors", "two.safetensors"} if sharded else {"model.safetensors"}
    )


@pytest.mark.parametrize("harm", [stale_index, index_of_a_part, empty_index])
def test_a_model_has_no_identity_while_two_could_be_meant(folder: Path, harm: Callable[[Path], None]) -> None:
    harm(folder)
    with pytest.raises(ModelRefused, match=INDEX):
        revision(str(folder))


@pytest.mark.parametrize(
    ("held", "refused"),
    [
        ("model.layers.2.norm.weight", r"is 2 in folder/config\.json, .* of 3 layers \('model\..*\.weight'\): write 3"),
        ("layers.11.norm.weight", "is 2 in .* of 12 layers"),  # saved without the head's model
        ("model.layers.1.mlp.experts.9.up.weight", None),  # a number that is no layer's
        ("vision.layers.7.norm.weight", None),
        ("model.layers.2.mtp.weight", None),  # what the model's own code leaves
    ],
)
def test_weights_of_more_layers_than_asked_for_are_refused(held: str, refused: str | None) -> None:
    wanted = [f"model.layers.{layer}.{part}.weight" for layer in range(2) for part in ("norm", "mlp.experts.0.up")]
    if refused is None:
        check_depth("folder", [*wanted, held], wanted, [r"\.mtp\."])
    else:
        with pytest.raises(ModelRefused, match=refused):
            check_depth("folder", [*wanted, held], wanted, [r"\.mtp\."])


def test_a_share_of_fewer_layers_than_the_files_hold_is_asked_for_not_assumed(folder: Path) -> None:
    deeper_than_described(folder)
    with pytest.raises(ModelRefused, match=r"num_hidden_layers is 1 in .* of 2 layers"):
        load_shard(str(folder), "float32", None, 1, 2)
    load_shard(str(folder), "float32", 1, 1, 2)
