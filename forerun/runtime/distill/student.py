"""A draft made of its target: some of the target's layers, its norm, its embedding, and a head over few ids.

On disk are only layers, norm and head. The embedding is the target's, so a draft goes with one target, of the
revision that draft.json names, and is refused beside any other.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

import forerun.runtime.attention  # noqa: F401  makes the name "forerun" known
from forerun.core.errors import ModelRefused
from forerun.runtime.distill import DRAFT
from forerun.runtime.distill.draft import Draft, read_draft, write_draft
from forerun.runtime.folders import SINGLE, check_shapes, read_entries
from forerun.runtime.models import DTYPES, load_causal_lm, read_config, revision

IDS = "draft.ids"


class Student(nn.Module):
    """Logits over the whole vocabulary of the target; ids that the head lacks get `outside`."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, outside: float = -math.inf) -> None:
        """model: whose head has a row for each of `ids`, [head] int64, ascending."""
        super().__init__()
        self.model = model
        self.config = model.config
        self.outside = outside
        self.ids: Tensor
        self.register_buffer("ids", ids)
        self._vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)

    def forward(self, **inputs: Any) -> Any:
        """As transformers' models; honours logits_to_keep."""
        output = self.model(**inputs)
        few = output.logits  # [..., head]
        logits = few.new_full((*few.shape[:-1], self._vocab_size), self.outside)
        output.logits = logits.index_copy_(-1, self.ids, few)
        return output

    def own(self) -> dict[str, nn.Parameter]:
        """What is its own and trained, by name: all but the embeddings, which are the target's."""
        return {name: weight for name, weight in self.model.named_parameters() if name not in _shared(self.model)}


def choose_layers(text: str, total: int) -> tuple[int, ...]:
    """Of `total` layers: a count ("3": the first, the last, and between them evenly), or numbers ("0,14,29")."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(numbers) == len(parts) == 1 and 1 <= numbers[0] <= total:
        count = numbers[0]
        return tuple(round(at * (total - 1) / max(1, count - 1)) for at in range(count))
    if len(numbers) == len(parts) > 1 and numbers == sorted(set(numbers)) and numbers[-1] < total:
        return tuple(numbers)
    raise ModelRefused(
        f"layers {text!r} cannot be taken of a target with {total}: either a count of 1 to {total}, or at least 2 "
        f"ascending numbers of 0 to {total - 1}, joined by commas"
    )


def student_of(target: PreTrainedModel, layers: Sequence[int], ids: Sequence[int], attention: str) -> Student:
    """Float32, on the target's device, ready to train; its weights are copies of the target's."""
    config = copy.deepcopy(target.config)
    total = int(config.get_text_config(decoder=True).num_hidden_layers)
    _take_layers(config, layers)
    kept = torch.tensor(ids, dtype=torch.int64)
    model = _empty(config, len(kept), torch.float32, attention)
    head, stem, source = _head(model), _stem(target, total), target.state_dict()
    weights = {}
    for name in model.state_dict():
        if name.startswith(f"{head}."):
            weights[name] = source[name][kept.to(source[name].device)]
        else:
            weights[name] = source[re.sub(rf"^{re.escape(stem)}\.(\d+)\.", _renumbered(stem, layers), name)]
    model.load_state_dict(weights)
    student = Student(model, kept).to(target.device)
    student.eval().requires_grad_(False)
    for weight in student.own().values():
        weight.requires_grad_(True)
    return student


def check_start(folder: str, target_folder: str, layers: Sequence[int]) -> None:
    """Raises ModelRefused: `folder` is no draft of this target, or one of other layers."""
    draft = read_draft(folder)
    _check_revision(folder, draft, target_folder)
    if draft.layers != tuple(layers):
        theirs, own = (",".join(map(str, numbers)) for numbers in (draft.layers, layers))
        raise ModelRefused(
            f"{folder} has the layers {theirs} of its target, and {own} were asked for; say --layers {theirs}, or "
            "begin without it"
        )


def begin_from(student: Student, folder: str, target_folder: str, layers: Sequence[int]) -> None:
    """Give it the weights of the draft in `folder`; rows of its head that that one lacks stay the target's.

    Raises ModelRefused: not a draft of this target, or of other layers.
    """
    check_start(folder, target_folder, layers)
    former = load_student(folder, target_folder, "float32")
    theirs, head = former.own(), _head(student.model)
    rows = {int(token): row for row, token in enumerate(former.ids)}
    shared = [(row, rows[int(token)]) for row, token in enumerate(student.ids) if int(token) in rows]
    to, of = torch.tensor(shared, dtype=torch.int64).reshape(-1, 2).unbind(-1)
    with torch.no_grad():
        for name, weight in student.own().items():
            if name.startswith(f"{head}."):
                weight[to.to(weight.device)] = theirs[name][of].to(weight.device)
            else:
                weight.copy_(theirs[name])


def save_student(student: Student, folder: Path, draft: Draft, dtype: str = "bfloat16") -> None:
    """config.json, model.safetensors and draft.json, which comes last: without it the folder is no draft."""
    kind: torch.dtype = getattr(torch, dtype)
    tensors = {name: weight.detach().to("cpu", kind).contiguous() for name, weight in student.own().items()}
    tensors[IDS] = student.ids.to("cpu", torch.int32)
    config = copy.deepcopy(student.config)
    config.dtype = dtype
    config.name_or_path = ""  # where the target lay here
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DRAFT).unlink(missing_ok=True)
    config.to_json_file(folder / "config.json", use_diff=False)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / SINGLE).chmod(0o644)  # safetensors lets nobody else read; a worker may be another user
    write_draft(folder, draft)


def load_student(
    folder: str, target_folder: str, dtype: str, *, attention: str = "forerun", outside: float = -math.inf
) -> Student:
    """The draft in `folder` with the embedding of the target in `target_folder`, on the CPU, ready for inference.

    outside: logit of ids that the head lacks. Raises ModelRefused: made for another target, or files that are
    missing, cut or pickles.
    """
    if dtype not in DTYPES:
        raise ModelRefused(f"dtype {dtype!r} is not known; one of: {', '.join(DTYPES)}")
    draft = read_draft(folder)
    _check_revision(folder, draft, target_folder)
    entries = read_entries(folder)
    config = read_config(folder)
    kind: torch.dtype = getattr(torch, dtype)
    student = Student(_empty(config, draft.head, kind, attention), torch.zeros(draft.head, dtype=torch.int64), outside)
    own = student.own()
    check_shapes(folder, entries, {name: tuple(weight.shape) for name, weight in own.items()})
    if wrong := sorted(set(entries) ^ {IDS, *own}):
        what = "lacks" if wrong[0] not in entries else "has no place for"
        raise ModelRefused(f"{folder} {what} {wrong[0]!r}; a draft holds its layers, norm and head, and {IDS}")
    with safe_open(Path(folder) / SINGLE, framework="pt") as file, torch.no_grad():
        for name, weight in own.items():
            weight.copy_(file.get_tensor(name))
        ids = file.get_tensor(IDS).long()
    if (
        ids.shape != (draft.head,)
        or not bool((ids.diff() > 0).all())
        or not 0 <= int(ids[0]) <= int(ids[-1]) < (student._vocab_size)
    ):
        raise ModelRefused(
            f"{IDS} in {folder} must be {draft.head} ascending ids below {student._vocab_size}, as draft.json and "
            "config.json say"
        )
    student.ids.copy_(ids)
    _share(student.model, load_causal_lm(target_folder, dtype, layers=1))
    return student.eval().requires_grad_(False)


def _check_revision(folder: str, draft: Draft, target_folder: str) -> None:
    found = revision(target_folder)
    if found != draft.target_revision:
        raise ModelRefused(
            f"{folder} was made for {draft.target} of revision {draft.target_revision}, and {target_folder} is of "
            f"revision {found}; name that target, or make a draft for this one with `forerun distill`"
        )


def expanded(student: Student) -> PreTrainedModel:
    """For libraries that know no reduced heads: one over the whole vocabulary, in which `outside` is a bias."""
    model = student.model
    name = _head(model)
    few = model.get_submodule(name)
    assert isinstance(few, nn.Linear)
    whole = nn.Linear(few.in_features, student._vocab_size, dtype=few.weight.dtype)
    with torch.no_grad():
        whole.weight.zero_()[student.ids] = few.weight
        whole.bias.fill_(student.outside)[student.ids] = 0.0 if few.bias is None else few.bias
    model.set_submodule(name, whole.requires_grad_(False))
    return model


# --- parts of a model, by whatever names its architecture gives them ---------------------------------


def _empty(config: PretrainedConfig, head: int, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """A model of `config` with `head` rows in its head, its weights still to be filled."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    name = _head(model)
    old = model.get_submodule(name)
    if not isinstance(old, nn.Linear):
        raise ModelRefused(f"{type(model).__name__} has a head of {type(old).__name__}, which cannot be reduced")
    if not 2 <= head <= old.out_features:
        raise ModelRefused(
            f"a head of {head} ids was asked of {old.out_features}; 2 to {old.out_features} are possible"
        )
    model.set_submodule(name, nn.Linear(old.in_features, head, old.bias is not None, dtype=dtype))
    model.eval()
    return model


def _head(model: PreTrainedModel) -> str:
    head = model.get_output_embeddings()
    return next(str(name) for name, module in model.named_modules() if module is head)


def _stem(model: PreTrainedModel, total: int) -> str:
    """Name of the list of layers, as model.layers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == total:
            return str(name)
    raise ModelRefused(f"{type(model).__name__} keeps its {total} layers in no list, so none can be taken")


def _renumbered(stem: str, layers: Sequence[int]) -> Any:
    return lambda found: f"{stem}.{layers[int(found[1])]}."


def _shared(model: PreTrainedModel) -> frozenset[str]:
    """Names of the weights that stay the target's: of its embeddings, of tokens and of positions."""
    return frozenset(f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding))


def _share(model: PreTrainedModel, target: PreTrainedModel) -> None:
    for name in _shared(model):
        own, theirs = model.get_parameter(name), target.get_parameter(name)
        if own.shape != theirs.shape:
            raise ModelRefused(
                f"{name!r} of the draft is of shape {list(own.shape)}, and the target's of {list(theirs.shape)}"
            )
        own.data = theirs.data


def _take_layers(config: PretrainedConfig, layers: Sequence[int]) -> None:
    """`config` of a model of these layers alone, its lists with an entry per layer too."""
    text = config.get_text_config(decoder=True)
    total: int = text.num_hidden_layers
    if getattr(text, "num_kv_shared_layers", None):
        raise ModelRefused(f"a model of type {text.model_type!r} shares keys and values between layers: none is taken")
    for name, value in list(vars(text).items()):
        if isinstance(value, list | tuple) and len(value) == total and not name.endswith(("token_id", "token_ids")):
            setattr(text, name, [value[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    config.tie_word_embeddings = text.tie_word_embeddings = False
