"""Which attention kernel of a GPU may be used: the ones this torch has, tried at start for what exactness needs.

A kernel is taken if a row's bits do not depend on the other rows of its run or on other runs, and it computes what
plain torch does. Nothing here falls back to one that does not: a machine without one is refused, saying why.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import attention

from forerun.core.errors import ModelRefused
from forerun.core.pages import TILE
from forerun.runtime.batch import Batch
from forerun.runtime.cuda import ROW_TILE, Kernel, VarlenAttention

FLASH_PAGE = 256
"""FlashAttention 2, which torch carries, reads pages in place only if they hold a multiple of this. 3 takes any."""


def reference_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor | None,
    num_splits: int,
) -> Tensor:
    """The oracle of `Varlen`: plain torch, float32, row by row, each row over the columns that it sees."""
    out = torch.zeros_like(query)
    kv_heads, head_dim = key.shape[-2:]
    for run, used in enumerate(seqused_k.tolist()):
        first, last = cu_seq_q[run : run + 2].tolist()
        for row in range(first, last):
            position = used - (last - row)
            least = 0 if window_size[0] < 0 else max(0, position - window_size[0])
            columns = torch.arange(least, position + 1, device=key.device)
            if block_table is not None:
                page = key.shape[1]
                at = block_table[run, columns // page].long() * page + columns % page
            else:
                assert cu_seq_k is not None
                at = cu_seq_k[run] + columns
            seen = (pool.reshape(-1, kv_heads, head_dim)[at].float() for pool in (key, value))
            keys, values = (part.transpose(0, 1) for part in seen)  # [kv_heads, columns, head_dim]
            heads = query[row].float().view(kv_heads, -1, head_dim) * scale
            weights = torch.softmax(heads @ keys.transpose(1, 2), dim=-1)
            out[row] = (weights @ values).reshape(-1, head_dim).to(out.dtype)
    return out


# --- which kernel ----------------------------------------------------------------------------------


def ways(varlen: Collection[str], operator: Collection[str], flash: str | None, page: int) -> list[str]:
    """Which ways to attend can be exact, the best first.

    varlen: parameters of torch's varlen_attn; operator: of the FlashAttention operator below it; flash: what was
    activated in place of torch's own FlashAttention 2, such as FA3.
    """
    found = []
    if {"seqused_k", "block_table", "num_splits"} <= set(varlen) and (flash or page % FLASH_PAGE == 0):
        found.append("in place")  # num_splits: else a long neighbour changes how K is divided
    if "seqused_k" in operator and flash is None:
        found.append("gathered")  # FlashAttention 2 divides K only if pages are read in place or max_q is 1
    return found


def kernels(page: int = TILE) -> list[Kernel]:
    """Those of this torch that `ways` allows."""
    public: Callable[..., Any] | None
    try:
        from torch.nn.attention.varlen import varlen_attn as public
    except ImportError:
        public = None
    operator = torch.ops.aten._flash_attention_forward.default
    known = {argument.name for argument in operator._schema.arguments}
    names = set(inspect.signature(public).parameters) if public else set()
    flash = getattr(attention, "current_flash_attention_impl", lambda: None)()

    def in_place(*args: Any, **kwargs: Any) -> Tensor:
        assert public is not None
        out: Tensor = public(*args, **{name: value for name, value in kwargs.items() if name in names})
        return out

    def gathered(*args: Any, **kwargs: Any) -> Tensor:
        left, _ = kwargs["window_size"]
        given = {"scale": kwargs["scale"], "seqused_k": kwargs["seqused_k"], "num_splits": kwargs["num_splits"]}
        if left >= 0:
            given |= {"window_size_left": left, "window_size_right": 0}
        given = {name: value for name, value in given.items() if name in known}
        out: Tensor = operator(*args, 0.0, left < 0, False, **given)[0]
        return out

    label = flash or "FA2"
    made = {
        "in place": Kernel(f"{label} in place, pages of {page}", in_place, True, starts=flash is None),
        "gathered": Kernel(f"{label} gathered", gathered, False),
    }
    return [made[way] for way in ways(names, known, flash, page)]


def choose(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    context_limit: int,
    page: int = TILE,
) -> Kernel:
    """The first kernel that works on `device` and is row-invariant there, tried. ModelRefused names what failed."""
    if dtype not in (torch.bfloat16, torch.float16):
        raise ModelRefused(
            f"dtype {str(dtype).removeprefix('torch.')} on a GPU: FlashAttention knows bfloat16, float16"
        )
    if head_dim % 8 or head_dim > 256:
        raise ModelRefused(f"head_dim {head_dim} on a GPU: FlashAttention knows multiples of 8 up to 256")
    if heads % kv_heads:
        raise ModelRefused(f"{heads} heads cannot share {kv_heads} KV heads evenly")
    failed = []
    for kernel in kernels(page):
        wrong = flaw(kernel, heads, kv_heads, head_dim, dtype, device, context_limit, page)
        if wrong is None:
            return kernel
        failed.append(f"{kernel.name}: {wrong}")
    reason = "; ".join(failed) or "no varlen attention with seqused_k (and num_splits, if FA3 or another is activated)"
    raise ModelRefused(f"torch {torch.__version__} has no attention that is exact on {device}: {reason}")


@torch.inference_mode()
def flaw(
    kernel: Kernel,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    context_limit: int,
    page: int = TILE,
) -> str | None:
    """What is wrong with `kernel`, in few words, after a few small passes; None if it may be used."""
    length, tile, window, chunk = page + 12, min(ROW_TILE, page), 9, 8
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn((length + chunk, n, head_dim), generator=draw) for n in (heads, kv_heads, kv_heads)]
    query, key, value = (part.to(device, dtype).transpose(0, 1) for part in rows)

    def passes(attend: Kernel, sizes: list[int], ahead: int, span: int | None) -> Tensor:
        """[length, heads, head_dim]: a sequence in passes of these sizes, after `ahead` rows of another."""
        held = VarlenAttention(
            attend,
            layers=1,
            pages=3,
            kv_heads=kv_heads,
            head_dim=head_dim,
            context_limit=max(context_limit, 2 * page),
            dtype=dtype,
            device=device,
            page=page,
            tile=tile,
        )
        seen, at = [], 0
        for size in sizes:
            own = np.arange(at, at + size)
            where = np.append(np.arange(length, length + ahead), own)
            positions = np.append(np.arange(ahead), own)
            written = np.where(np.arange(ahead + size) < ahead, 2, positions // page)
            held.begin(
                Batch(
                    np.zeros(ahead + size, dtype=np.int64),
                    positions,
                    np.zeros(0, dtype=np.int64),
                    np.array([0, ahead, ahead + size] if ahead else [0, size]),
                    np.array([[2, -1], [0, 1]] if ahead else [[0, 1]]),
                    np.stack([np.arange(ahead + size), written, positions % page], axis=1),
                    np.zeros((0, 2), dtype=np.int64),
                )
            )
            padded = torch.from_numpy(np.pad(where, (0, tile - len(where)))).to(device)
            q, k, v = (part.index_select(1, padded) for part in (query, key, value))
            seen.append(held.attend(0, q, k, v, head_dim**-0.5, span, None)[ahead : ahead + size].clone())
            at += size
        return torch.cat(seen)

    chunks = [chunk] * (length // chunk) + [length % chunk]
    oracle = replace(kernel, attend=reference_varlen_attn, starts=True)
    for span in (None, window):
        try:
            together, alone = passes(kernel, chunks, 0, span), passes(kernel, [1] * length, 0, span)
            beside = passes(kernel, [1] * length, 5, span)
        except Exception as error:  # torch's, CUDA's and a kernel's own share no base class
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        if not torch.allclose(together.float(), passes(oracle, chunks, 0, span).float(), atol=0.02, rtol=0.02):
            return "its results are wrong"
        if not torch.equal(together, alone) or not torch.equal(alone, beside):
            return "the bits of a row depend on the rows beside it"
    return None


# --- forwards --------------------------------------------------------------------------------------


def make_exact() -> None:
    """Full sums in matrix products. Call before the first of them: cuBLAS reads its workspace setting once."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_fp16_accumulation = False
    if torch.cuda.is_available() and torch.cuda.tunable.is_enabled():
        raise ModelRefused(
            "TunableOp picks matrix products by their time, so bits would change; unset PYTORCH_TUNABLEOP_ENABLED"
        )
