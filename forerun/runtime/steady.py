"""Activations whose bits do not depend on how many rows share a pass, with any number of threads.

PyTorch divides a large tensor among threads at any element, and computes what is left of a vector at the end of each
part by another formula of exp or tanh. With three threads or more, where parts end depends on the number of rows. In
pieces that no thread divides, every element of a full vector is computed by one formula.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_PIECE = 8192
"""Elements. PyTorch computes so few in one thread, whatever the function; a multiple of every vector length."""

_VECTOR = 128
"""Twice the most elements that PyTorch computes together, in two vectors: so halves are whole too."""

_MODULES = ("transformers.activations", "torch.nn.modules.activation")


class Steady(nn.Module):
    """An elementwise function, piece by piece."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        whole = x.numel() % _VECTOR == 0
        if whole and (x.numel() <= _PIECE or torch.get_num_threads() <= 2):  # halves of whole vectors, or of one thread
            return self.function(x)  # type: ignore[no-any-return]
        flat = x.reshape(-1)
        if not whole:
            flat = nn.functional.pad(flat, (0, -x.numel() % _VECTOR))
        pieces = [self.function(piece) for piece in flat.split(_PIECE)]
        return torch.cat(pieces)[: x.numel()].view(x.shape)


def steady(model: nn.Module) -> None:
    """Wrap every activation module of a CPU model in place."""
    for parent in list(model.modules()):
        if isinstance(parent, Steady):
            continue
        for name, child in list(parent.named_children()):
            if type(child).__module__ in _MODULES and not list(child.parameters()):
                setattr(parent, name, Steady(child))
