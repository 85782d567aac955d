"""One rank's share of a model: plan, layers, and the weights read straight from the files, share by share.

    colwise:  y_r = x W_r^T + b_r          W_r: rows of W; each rank has some of the outputs, whole heads of them
    rowwise:  y = round(sum_r x_r W_r^T + b)    W_r: columns of W; summed in rank order in float32, rounded once

Which layer is which is the model's own metadata (`tp_plan` of transformers). A colwise layer is just a smaller
nn.Linear. Embeddings and norms are whole on every rank; the head has its rows if the vocabulary divides.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from forerun.core.errors import ModelRefused
from forerun.runtime.batch import Batch
from forerun.runtime.exchange import Exchange
from forerun.runtime.folders import Entry, check_depth, check_shapes, read_entries
from forerun.runtime.models import described

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

COLUMNS, ROWS = "columns", "rows"
STYLES = {
    "colwise": (COLUMNS, False),
    "colwise_gather_output": (COLUMNS, True),
    "colwise_rep": (COLUMNS, True),
    "rowwise": (ROWS, False),
    "rowwise_split_input": (ROWS, True),
    "rowwise_rep": (ROWS, True),
}
"""transformers' names: what is split, and whether inputs or outputs are whole on every rank."""

WHOLE = ("replicated*", "embedding*")
"""Styles of what every rank keeps whole: norms, and embeddings, of which a pass reads a few rows."""


class RowParallel(nn.Module):
    """A linear layer of which every rank has some of the inputs. The result is the same bits on every rank."""

    exchange: Exchange

    def __init__(self, linear: nn.Linear, bias: nn.Parameter | None, share: slice | None) -> None:
        """linear: this rank's columns, no bias. share: its part of an input that is whole; None: it comes split."""
        super().__init__()
        self.linear = linear
        self.bias = bias
        self._share = share

    def forward(self, x: Tensor) -> Tensor:
        part = self.linear(x if self._share is None else x[..., self._share])
        parts = self.exchange.gather(part).unbind(0)
        total = parts[0].float() + parts[1]
        for other in parts[2:]:
            total += other
        if self.bias is not None:
            total += self.bias
        return total.to(part.dtype)


class GatheredColumns(nn.Module):
    """A linear layer of which every rank computes some of the outputs and all get the whole."""

    exchange: Exchange

    def __init__(self, linear: nn.Linear, head: bool) -> None:
        """head: only rank 0 gets the whole, and only the first `rows` rows (None: all) are shown."""
        super().__init__()
        self.linear = linear
        self._head = head
        self.rows: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        part = self.linear(x)
        if self._head and self.rows is not None:
            part = part[..., : self.rows, :]
        parts = self.exchange.gather(part)
        if self._head and self.exchange.rank != 0:
            return cast(Tensor, part)
        return torch.cat(parts.unbind(0), dim=-1)


def connect(model: nn.Module, exchange: Exchange) -> None:
    """Let the layers of this share meet those of the other ranks."""
    for module in model.modules():
        if isinstance(module, RowParallel | GatheredColumns):
            module.exchange = exchange


def ask_rows(model: nn.Module, batch: Batch) -> None:
    """How many rows of logits the pass is asked for: padding need not travel. On GPUs shapes are constant."""
    for module in model.modules():
        if isinstance(module, GatheredColumns):
            module.rows = len(batch.wanted) if next(model.parameters()).device.type == "cpu" else None


# --- the plan ----------------------------------------------------------------------------------------


def plan_of(model: PreTrainedModel) -> dict[str, str]:
    """Style of each linear layer that is split, by its name. Raises ModelRefused for what is not understood."""
    patterns: Mapping[str, str] = model.tp_plan or {}
    names = dict(model.named_modules()) | dict(model.named_parameters())
    plan: dict[str, str] = {}
    for name, part in names.items():
        pattern = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
        style = patterns.get(pattern)
        if style is None or any(fnmatch.fnmatch(style, whole) for whole in WHOLE):
            continue
        if style not in STYLES or type(part) is not nn.Linear:
            raise ModelRefused(
                f"{type(model).__name__} cannot be split over ranks: its plan says {style!r} for {name} "
                f"({type(part).__name__}); only dense linear layers are split (mixtures of experts are not)"
            )
        plan[name] = style
    if not any(STYLES[style][0] == ROWS for style in plan.values()):
        raise ModelRefused(f"{type(model).__name__} cannot be split over ranks: transformers has no plan for it")
    return plan


def check_divides(model: PreTrainedModel, plan: Mapping[str, str], ranks: int) -> None:
    """Raises ModelRefused, with the numbers of ranks that would do."""
    text = model.config.get_text_config(decoder=True)
    counts: dict[str, int] = {}
    if heads_are_split(plan):
        counts["attention heads"] = int(text.num_attention_heads)
        counts["KV heads"] = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    heads = dict(counts)
    for name, style in plan.items():
        layer = cast(nn.Linear, model.get_submodule(name))
        if STYLES[style][0] == ROWS:
            counts[f"inputs of {name.rpartition('.')[2]}"] = layer.in_features
        elif not is_head(name):
            counts[f"outputs of {name.rpartition('.')[2]}"] = layer.out_features
    if all(count % ranks == 0 for count in counts.values()):
        return
    fit = [n for n in range(1, max(counts.values()) + 1) if all(count % n == 0 for count in counts.values())]
    wrong = heads if any(count % ranks for count in heads.values()) else counts
    told = ", ".join(f"{count} {what}" for what, count in wrong.items())
    raise ModelRefused(
        f"{type(model).__name__} with {told} cannot be split over {ranks} ranks; "
        f"possible numbers of ranks: {', '.join(map(str, fit))}"
    )


def heads_are_split(plan: Mapping[str, str]) -> bool:
    """Whether each rank attends with some of the heads; otherwise every rank attends with all."""
    return any(style == "colwise" and name.endswith("k_proj") for name, style in plan.items())


def is_head(name: str) -> bool:
    return name.rpartition(".")[2] == "lm_head"


# --- loading -----------------------------------------------------------------------------------------


def load_shard(
    folder: str, dtype: str, layers: int | None, rank: int, ranks: int, device: str = "cpu"
) -> PreTrainedModel:
    """Share `rank` of `ranks`, ready for inference once `connect`ed. Its configuration has the rank's own heads.

    Raises ModelRefused: no plan, heads that do not divide, weights under names that are not the model's.
    """
    config, model = described(folder, dtype, layers)
    plan = plan_of(model)
    check_divides(model, plan, ranks)
    entries = read_entries(folder)
    if layers is None:
        check_depth(folder, entries, model.state_dict(), model._keys_to_ignore_on_load_unexpected or ())
    names = _source_names(folder, config, model, entries)
    check_shapes(folder, entries, {names[name]: tuple(weight.shape) for name, weight in model.state_dict().items()})
    shares = _replace(model, plan, rank, ranks)
    _fill_buffers(model, device)
    _read(model, entries, names, shares, device)
    if heads_are_split(plan):
        _keep_heads(config if model.config is config else model.config, ranks)
    model.eval().requires_grad_(False)
    return model


def _source_names(
    folder: str, config: PretrainedConfig, model: PreTrainedModel, entries: Mapping[str, Entry]
) -> dict[str, str]:
    """Under which name each parameter and stored buffer lies in the files. Tied ones lie under their twin's."""
    tied: Mapping[str, str] = model.all_tied_weights_keys or {}
    names = {name: tied.get(name, name) if name not in entries else name for name in model.state_dict()}
    hint = "splitting a model over ranks needs its weights under the names that transformers' save_pretrained writes"
    for name, source in names.items():
        if source not in entries:
            raise ModelRefused(f"{folder} holds no {name!r}; {hint}")
    depth = int(config.get_text_config(decoder=True).num_hidden_layers)
    ignored: set[str] = model._keys_to_ignore_on_load_unexpected or set()  # type: ignore[assignment]
    for name in sorted(set(entries) - set(names) - set(names.values())):
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= depth:  # beyond an early exit: `check_depth` refuses others
            continue
        if not name.endswith("rotary_emb.inv_freq") and not any(re.search(pattern, name) for pattern in ignored):
            raise ModelRefused(f"{folder} holds {name!r}, which {type(model).__name__} has no place for; {hint}")
    if model._get_dtype_plan(model.dtype):
        raise ModelRefused(
            f"{type(model).__name__} keeps some weights in float32; such models are not split over ranks"
        )
    return names


def _replace(model: PreTrainedModel, plan: Mapping[str, str], rank: int, ranks: int) -> dict[str, tuple[int, slice]]:
    """Put this rank's layers in place of the whole ones. Returns (dimension, share) of each split parameter.

    Keys are the names of parameters as they were; `_read` finds them in the new layers by `_plain`.
    """
    shares: dict[str, tuple[int, slice]] = {}
    for name, style in plan.items():
        whole = cast(nn.Linear, model.get_submodule(name))
        split, is_whole = STYLES[style]
        if is_head(name) and whole.out_features % ranks:
            continue  # every rank computes all of it; rank 0's counts
        size = (whole.out_features if split == COLUMNS else whole.in_features) // ranks
        share = slice(rank * size, (rank + 1) * size)
        shares[f"{name}.weight"] = (0 if split == COLUMNS else 1, share)
        options: dict[str, Any] = {"device": "meta", "dtype": whole.weight.dtype}
        new: nn.Module
        if split == COLUMNS:
            new = linear = nn.Linear(whole.in_features, size, whole.bias is not None, **options)
            if whole.bias is not None:
                shares[f"{name}.bias"] = (0, share)
            if is_whole:
                new = GatheredColumns(linear, is_head(name))
        else:
            linear = nn.Linear(size, whole.out_features, False, **options)
            new = RowParallel(linear, whole.bias, share if is_whole else None)
        model.set_submodule(name, new)
    return shares


def _plain(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name in the whole model, module, attribute) of every parameter and stored buffer."""
    for path, module in model.named_modules():
        inner = path.removesuffix(".linear") if _wraps(model, path) else path
        stored = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        for name in [*module._parameters, *stored]:
            if getattr(module, name) is not None:
                yield f"{inner}.{name}" if inner else name, module, name


def _wraps(model: nn.Module, path: str) -> bool:
    outer, _, last = path.rpartition(".")
    return last == "linear" and isinstance(model.get_submodule(outer), RowParallel | GatheredColumns)


def _read(
    model: PreTrainedModel,
    entries: Mapping[str, Entry],
    names: Mapping[str, str],
    shares: Mapping[str, tuple[int, slice]],
    device: str,
) -> None:
    """Only this rank's bytes are read, and copied out of the mapped file, so that the mapping can go."""
    loaded: dict[tuple[str, bool], nn.Parameter] = {}  # a weight that is tied and whole is one tensor
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for name, module, attribute in list(_plain(model)):
            entry, source = entries[names[name]], names[name]
            if entry.file not in files:
                try:
                    files[entry.file] = stack.enter_context(safe_open(entry.file, framework="pt", device="cpu"))
                except SafetensorError as error:
                    raise ModelRefused(f"{entry.file} cannot be read: {error}") from error
            old: Tensor = getattr(module, attribute)
            key = (source, name in shares)
            if key not in loaded:
                new = torch.empty(old.shape, dtype=old.dtype, device=device)
                new.copy_(_share(files[entry.file].get_slice(source), shares.get(name)))
                loaded[key] = nn.Parameter(new, requires_grad=False)
            if isinstance(old, nn.Parameter):
                setattr(module, attribute, loaded[key])
            else:
                setattr(module, attribute, loaded[key].data)


def _share(weight: Any, share: tuple[int, slice] | None) -> Tensor:
    """weight: a slice of safetensors, not read yet."""
    if share is None:
        return cast(Tensor, weight[:] if weight.get_shape() else weight[...])
    dimension, part = share
    return cast(Tensor, weight[part] if dimension == 0 else weight[:, part])


def _fill_buffers(model: PreTrainedModel, device: str) -> None:
    """Buffers that no file holds (rotary frequencies) as from_pretrained makes them: by the model's own initialisation.

    Parameters are marked as initialised, which is how transformers itself leaves those alone that it has loaded.
    """
    unset: list[tuple[str, Tensor]] = []
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None:
                empty = torch.full_like(buffer, torch.nan if buffer.is_floating_point() else 0, device=device)
                setattr(module, name, empty)
                if buffer.is_floating_point():
                    unset.append((f"{path}.{name}", empty))
    for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_meta)):
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    model.initialize_weights()
    for name, tensor in unset:
        if tensor.isnan().any():
            raise ModelRefused(f"{type(model).__name__} does not say how to compute its buffer {name}")


def _keep_heads(config: PretrainedConfig, ranks: int) -> None:
    """The configuration of a share tells the heads of the share."""
    text = config.get_text_config(decoder=True)
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    text.head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    text.num_attention_heads, text.num_key_value_heads = heads // ranks, kv_heads // ranks
