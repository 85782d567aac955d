"""The GPU's bookkeeping on the CPU: integers of a pass, pages, slices, buckets. Kernels are a plain torch stand-in."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from gpu import stages
from models import tiny_model
from torch import Tensor

from forerun.core.errors import ModelRefused
from forerun.core.pages import KV, Pages
from forerun.runtime import cuda_kernels
from forerun.runtime.attention import PassState, current_pass
from forerun.runtime.batch import Batch, lower
from forerun.runtime.cuda import GraphedForward, Kernel, Size, VarlenAttention, bucket, cut, lay
from forerun.runtime.cuda_kernels import choose, flaw, ways
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm
from forerun.runtime.passes import Run

HEADS, KV_HEADS, WIDTH = 4, 2, 8
CPU = torch.device("cpu")


def kernel(in_place: bool, starts: bool = True) -> Kernel:
    return Kernel("reference", cuda_kernels.reference_varlen_attn, in_place, starts)


def batch_of(
    positions: list[int],
    firsts: list[int],
    tables: list[list[int]],
    writes: list[tuple[int, int, int]],
    copies: list[tuple[int, int]] | None = None,
    wanted: list[int] | None = None,
) -> Batch:
    return Batch(
        np.arange(100, 100 + len(positions)),
        np.array(positions),
        np.array(wanted or [], dtype=np.int64),
        np.array(firsts),
        np.array(tables),
        np.array(writes).reshape(-1, 3),
        np.array(copies or [], dtype=np.int64).reshape(-1, 2),
    )


# --- integers ------------------------------------------------------------------------------------

TWO_RUNS = batch_of(
    positions=[5, 6, 3],
    firsts=[0, 2, 3],
    tables=[[4, 0], [7, -1]],
    writes=[(0, 0, 1), (1, 0, 2), (2, 7, 3), (1, 9, 2)],
    wanted=[1, 2],
)
"""Pages of 4 columns: a run of two rows in its second page (one of them for a branch too), a run of one row."""


def test_laid_by_hand_for_pages_in_place() -> None:
    laid = lay(TWO_RUNS, tile=4, width=3, page=4, scratch=11, in_place=True)
    assert laid.tokens.tolist() == [100, 101, 102, 0]
    assert laid.positions.tolist() == [5, 6, 3, 0]
    assert laid.write_rows.tolist() == [0, 1, 2, 1]
    assert laid.write_slots.tolist() == [1, 2, 31, 38]
    assert laid.cu_q.tolist() == [0, 2, 3, 4, 4, 4]  # the last of them padding
    assert laid.used.tolist() == [7, 4, 1, 0, 0]
    assert laid.table.tolist() == [[4, 0, 11], [7, 11, 11], [11] * 3, [11] * 3, [11] * 3]
    assert laid.size == Size(4, 0)
    assert laid.table.dtype == laid.used.dtype == laid.cu_q.dtype == laid.cu_k.dtype == np.int32


def test_laid_by_hand_for_gathered_pages() -> None:
    laid = lay(TWO_RUNS, tile=4, width=3, page=4, scratch=11, in_place=False)
    assert laid.gather.tolist() == [4, 0, 7] + [11] * 13
    assert laid.cu_k.tolist() == [0, 8, 12, 16, 16, 16]
    assert laid.table.shape == (5, 0)
    assert laid.size == Size(4, 16)


def test_a_full_forward_has_no_padding() -> None:
    full = batch_of([0, 1, 2, 3], [0, 1, 2, 3, 4], [[0]] * 4, [(row, 0, row) for row in range(4)])
    laid = lay(full, tile=4, width=1, page=4, scratch=9, in_place=False)
    assert laid.cu_q.tolist() == [0, 1, 2, 3, 4, 4]
    assert laid.used.tolist() == [1, 2, 3, 4, 0]
    assert laid.gather.tolist() == [0, 0, 0, 0] + [9] * 12


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(ValueError, match="a forward has 2 rows, not 3"):
        lay(TWO_RUNS, tile=2, width=3, page=4, scratch=11, in_place=True)
    with pytest.raises(ValueError, match="reaches column 7, there is room for 4"):
        lay(replace(TWO_RUNS, tables=TWO_RUNS.tables[:, :1]), tile=4, width=1, page=4, scratch=11, in_place=True)


def test_cut() -> None:
    batch = batch_of(
        positions=[0, 1, 2, 3, 4, 7, 8],
        firsts=[0, 5, 7],
        tables=[[0, 1], [2, 3]],
        writes=[(row, row % 4, row) for row in range(7)] + [(1, 9, 1)],
        copies=[(6, 7)],
        wanted=[4, 5, 6],
    )
    assert [part.firsts.tolist() for part in cut(batch, 5)] == [[0, 5], [0, 2]]  # a run that begins with a part
    one, two, three = cut(batch, 3)
    assert one.tokens.tolist() + two.tokens.tolist() + three.tokens.tolist() == batch.tokens.tolist()
    assert [part.positions.tolist() for part in (one, two, three)] == [[0, 1, 2], [3, 4, 7], [8]]
    assert [part.firsts.tolist() for part in (one, two, three)] == [[0, 3], [0, 2, 3], [0, 1]]
    assert [part.tables.tolist() for part in (one, two, three)] == [[[0, 1]], [[0, 1], [2, 3]], [[2, 3]]]
    assert [part.wanted.tolist() for part in (one, two, three)] == [[], [1, 2], [0]]
    assert one.writes.tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2], [1, 9, 1]]
    assert three.writes.tolist() == [[0, 2, 6]]
    assert [len(part.copies) for part in (one, two, three)] == [1, 0, 0]


def test_a_pass_of_one_tile_is_not_cut() -> None:
    (only,) = cut(TWO_RUNS, 3)
    assert only.firsts.tolist() == TWO_RUNS.firsts.tolist()
    assert only.writes.tolist() == TWO_RUNS.writes.tolist()


@pytest.mark.parametrize(("count", "size"), [(0, 16), (1, 16), (16, 16), (17, 32), (33, 64), (1000, 1024)])
def test_bucket(count: int, size: int) -> None:
    assert bucket(count, 16) == size


# --- attention -----------------------------------------------------------------------------------


@dataclass
class Rows:
    """Made-up query, key and value of rows, and what they should get, from paths alone."""

    window: int | None
    draw: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    made: list[Tensor] = field(default_factory=list)

    def new(self, count: int) -> list[int]:
        first = len(self.made)
        self.made += [torch.randn((HEADS + 2 * KV_HEADS, WIDTH), generator=self.draw) for _ in range(count)]
        return list(range(first, first + count))

    def of(self, rows: list[int], padding: int) -> tuple[Tensor, Tensor, Tensor]:
        """[heads, rows, head_dim] of each."""
        stacked = torch.stack([self.made[row] for row in rows] + [torch.ones(HEADS + 2 * KV_HEADS, WIDTH)] * padding)
        query, key, value = stacked.transpose(0, 1).split([HEADS, KV_HEADS, KV_HEADS])
        return query, key, value

    def expected(self, path: list[int]) -> Tensor:
        """[heads, head_dim] of the last row of a path, without pages, batches or runs."""
        query, key, value = self.of(path, 0)
        key, value = (part.repeat_interleave(HEADS // KV_HEADS, 0) for part in (key, value))
        scores = (query[:, -1:] @ key.transpose(1, 2)) * 0.3
        last = len(path) - 1
        if self.window is not None:
            hidden = torch.arange(len(path)) <= last - self.window
            scores = scores.masked_fill(hidden, float("-inf"))
        return (torch.softmax(scores, -1) @ value)[:, 0]


@pytest.fixture(params=["in place", "in place, no starts", "gathered"])
def attention(request: pytest.FixtureRequest) -> VarlenAttention:
    how = kernel(request.param != "gathered", starts="no" not in request.param)
    return VarlenAttention(
        how,
        layers=2,
        pages=8,
        kv_heads=KV_HEADS,
        head_dim=WIDTH,
        context_limit=40,
        dtype=torch.float32,
        device=CPU,
        page=8,
        tile=8,
    )


def run_pass(attention: VarlenAttention, rows: Rows, batch: Batch, paths: list[list[int]]) -> None:
    """`paths[row]`: ids of a row and all before it. Layer 0 gets other keys: a mix-up of layers would show."""
    ids, first = [path[-1] for path in paths], 0
    for part in cut(batch, attention.tile):
        count = len(part.tokens)
        attention.begin(part)
        query, key, value = rows.of(ids[first : first + count], attention.tile - count)
        attention.attend(0, query, -key, -value, 0.3, rows.window, None)
        out = attention.attend(1, query, key, value, 0.3, rows.window, None)
        assert out.isfinite().all()  # padding too
        for row in range(count):
            torch.testing.assert_close(out[row], rows.expected(paths[first + row]))
        first += count


@pytest.mark.parametrize("window", [None, 1, 3, 9, 100])
def test_attention_equals_the_oracle(attention: VarlenAttention, window: int | None) -> None:
    """Prompts in several slices, then a tree with private tails over a shared page, then the branch that won."""
    rows = Rows(window)
    a, b = rows.new(11), rows.new(3)
    writes = [(i, [0, 1][i // 8], i % 8) for i in range(11)] + [(11 + i, 2, i) for i in range(3)]
    prompt = batch_of([*range(11), *range(3)], [0, 11, 14], [[0, 1], [2, -1]], writes)
    run_pass(attention, rows, prompt, [a[: i + 1] for i in range(11)] + [b[: i + 1] for i in range(3)])

    root, left, right, more = (*rows.new(1), rows.new(2), rows.new(6), rows.new(1))
    a += [root]
    tree = batch_of(
        positions=[11, 12, 13, 12, 13, 14, 15, 16, 17, 3],
        firsts=[0, 3, 9, 10],
        tables=[[0, 1, -1], [0, 3, 4], [2, -1, -1]],
        writes=[(0, 1, 3), (1, 1, 4), (2, 1, 5), (0, 3, 3)]
        + [(3 + i, 3 if 12 + i < 16 else 4, (12 + i) % 8) for i in range(6)]
        + [(9, 2, 3)],
        copies=[(1, 3)],
    )
    paths = [a, a + left[:1], a + left, *(a + right[: i + 1] for i in range(6)), b + more]
    run_pass(attention, rows, tree, paths)
    assert attention.bytes_moved == 2 * attention.keys[:, 0].nbytes

    a += right[:5]  # up to position 16; 17 was wrong and is overwritten
    after = rows.new(3)
    chain = batch_of([17, 18, 19], [0, 3], [[0, 3, 4]], [(i, 4, 1 + i) for i in range(3)])
    run_pass(attention, rows, chain, [a + after[: i + 1] for i in range(3)])


def test_copies_read_before_they_write_and_a_blank_page_scrubs(attention: VarlenAttention) -> None:
    attention.begin(batch_of([0], [0, 1], [[5]], [(0, 5, 0)]))
    query, key, value = Rows(None).of([], 8)
    attention.attend(0, query, key, value, 1.0, None, None)  # padding rows go somewhere, not into the blank page
    attention.keys[:, 0], attention.keys[:, 1], attention.keys[:, 2] = 1.0, 2.0, 3.0
    attention.begin(batch_of([0], [0, 1], [[5]], [(0, 5, 0)], copies=[(0, 1), (1, 2), (8, 3)]))
    assert [float(attention.keys[0, page].unique()) for page in (0, 1, 2, 3)] == [1.0, 1.0, 2.0, 0.0]


def test_the_same_size_is_the_same_memory(attention: VarlenAttention) -> None:
    """A captured graph reads it at every replay."""
    attention.begin(TWO_RUNS)
    first = attention.now
    addresses = [part.data_ptr() for part in (first.tokens, first.used, first.write_slots)]
    attention.begin(batch_of([0], [0, 1], [[5]], [(0, 5, 0)]))
    assert attention.now is first
    assert [part.data_ptr() for part in (first.tokens, first.used, first.write_slots)] == addresses
    assert first.tokens.tolist() == [100] + [0] * 7


def test_capped_scores_are_refused(attention: VarlenAttention) -> None:
    attention.begin(TWO_RUNS)
    query, key, value = Rows(None).of([], 8)
    with pytest.raises(ModelRefused, match=r"capped at 50\.0"):
        attention.attend(0, query, key, value, 1.0, None, 50.0)


# --- which kernel --------------------------------------------------------------------------------

OLD = {"query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "return_aux", "scale", "window_size"}
NEW = OLD | {"enable_gqa", "seqused_k", "block_table", "num_splits"}
OPERATOR = {"query", "key", "value", "scale", "window_size_left", "window_size_right", "seqused_k", "alibi_slopes"}


@pytest.mark.parametrize(
    ("varlen", "operator", "flash", "page", "expected"),
    [
        (NEW, OPERATOR, None, 256, ["in place", "gathered"]),
        (NEW, OPERATOR, None, 128, ["gathered"]),
        (NEW, OPERATOR, "FA3", 128, ["in place"]),
        (OLD, OPERATOR, None, 128, ["gathered"]),
        (OLD, OPERATOR, "FA3", 128, []),
        (NEW - {"num_splits"}, OPERATOR - {"seqused_k"}, None, 256, []),
        (set(), set(), None, 256, []),
    ],
)
def test_ways(varlen: set[str], operator: set[str], flash: str | None, page: int, expected: list[str]) -> None:
    assert ways(varlen, operator, flash, page) == expected


def test_this_torch_has_a_way() -> None:
    assert [made.name for made in cuda_kernels.kernels()] == ["FA2 gathered"]


def check(broken: Any, in_place: bool = False) -> str | None:
    found = Kernel("broken", broken, in_place)
    return flaw(found, HEADS, KV_HEADS, WIDTH, torch.bfloat16, CPU, context_limit=32, page=16)


@pytest.mark.parametrize("in_place", [True, False])
def test_an_exact_kernel_passes_the_probe(in_place: bool) -> None:
    assert check(cuda_kernels.reference_varlen_attn, in_place) is None


def test_kernels_that_are_not_exact_fail_the_probe() -> None:
    def wider(*args: Any, **kwargs: Any) -> Tensor:
        left, right = kwargs.pop("window_size")
        return cuda_kernels.reference_varlen_attn(*args, window_size=(left + (left >= 0), right), **kwargs)

    def by_company(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rows = int(kwargs["seqused_k"].count_nonzero())
        return cuda_kernels.reference_varlen_attn(query * (1 + 0.004 * rows), *args, **kwargs)

    def absent(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("paged KV needs\nanother torch")

    assert check(wider) == "its results are wrong"
    assert check(by_company) == "the bits of a row depend on the rows beside it"
    assert check(absent) == "RuntimeError: paged KV needs"


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "reason"),
    [
        (4, 64, torch.float32, "dtype float32 on a GPU"),
        (4, 20, torch.bfloat16, "head_dim 20 on a GPU"),
        (3, 64, torch.bfloat16, "3 heads cannot share 2 KV heads"),
    ],
)
def test_what_no_kernel_can_do_is_refused(heads: int, head_dim: int, dtype: torch.dtype, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        choose(heads, 2, head_dim, dtype, CPU, context_limit=32)


def test_refusal_names_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_kernels, "kernels", lambda page: [kernel(True)])
    monkeypatch.setattr(cuda_kernels, "flaw", lambda *_: "its results are wrong")
    with pytest.raises(ModelRefused, match="no attention that is exact on cpu: reference: its results are wrong"):
        choose(4, 2, 64, torch.bfloat16, CPU, context_limit=32)
    monkeypatch.setattr(cuda_kernels, "kernels", lambda page: [])
    with pytest.raises(ModelRefused, match=r"no varlen attention with seqused_k"):
        choose(4, 2, 64, torch.bfloat16, CPU, context_limit=32)


@pytest.fixture
def matmul_settings() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")] + ["allow_fp16_accumulation"]
    before = {name: getattr(matmul, name) for name in names}
    yield
    for name, value in before.items():
        setattr(matmul, name, value)


@pytest.mark.usefixtures("matmul_settings")
def test_sums_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    cuda_kernels.make_exact()
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction is False
    assert torch.get_float32_matmul_precision() == "highest"


# --- a model -------------------------------------------------------------------------------------

LENGTH = 150  # crosses a page and several slices
DRAW = random.Random(5)
TOKENS = tuple(DRAW.randrange(256) for _ in range(LENGTH))


class Sliced:
    """A model as a GPU would run it, on the CPU; counts forwards with and without the head."""

    def __init__(self, folder: str, in_place: bool) -> None:
        self.model = load_causal_lm(folder, "float32")
        config = self.model.config
        self.pages = Pages(12)
        self.attention = VarlenAttention(
            kernel(in_place),
            layers=config.num_hidden_layers,
            pages=12,
            kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            context_limit=512,
            dtype=torch.float32,
            device=CPU,
            tile=16,
        )
        self.graphed = GraphedForward(self._rows, self.attention, graphs=False)
        self.heads: list[bool] = []

    def _rows(self, tokens: Tensor, positions: Tensor, asked: Tensor) -> Tensor:
        assert tokens.shape == positions.shape == (16,)
        self.heads.append(len(asked) > 0)
        token = current_pass.set(PassState(self.attention, set()))
        try:
            ids, places = tokens[None], positions[None]
            found = self.model(input_ids=ids, position_ids=places, use_cache=False, logits_to_keep=asked)
            return found.logits[0]
        finally:
            current_pass.reset(token)

    def forward(self, runs: list[Run]) -> list[Tensor]:
        logits = self.graphed(lower(runs, self.pages.take_copies()))
        return list(torch.split(logits, [run.logit_rows for run in runs]))

    def all_logits(self, sizes: list[int]) -> Tensor:
        """Of all positions, in chunks of these sizes in turn."""
        kv, rows, turn = KV(self.pages), [], 0
        while kv.cached_len < LENGTH:
            size = min(sizes[turn % len(sizes)], LENGTH - kv.cached_len)
            at = kv.cached_len
            rows += self.forward([Run(kv.extend(size), TOKENS[at : at + size], at, size)])
            kv.commit(TOKENS[: at + size], at + size)
            turn += 1
        kv.release()
        self.pages.forget()  # nothing is found again: every call computes
        return torch.cat(rows)


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3_text"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    window = None if request.param == "llama" else 16
    where = tmp_path_factory.mktemp(request.param) / "m"
    return tiny_model(where, arch=request.param, sliding_window=window, hidden=32)


@pytest.fixture(scope="module", params=["in place", "gathered"])
def sliced(folder: str, request: pytest.FixtureRequest) -> Sliced:
    return Sliced(folder, request.param == "in place")


def test_a_model_in_slices_gives_the_same_logits(sliced: Sliced, folder: str) -> None:
    plain = TransformersModel(load_causal_lm(folder, "float32"), 512)
    (expected,) = plain.forward([Run(KV(plain.pages).extend(LENGTH), TOKENS, 0, LENGTH)])
    found = sliced.all_logits([LENGTH])
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=2e-4, rtol=2e-4)
    assert torch.equal(sliced.all_logits([1, 16, 17, 5]), found)


def test_branches_in_slices(sliced: Sliced) -> None:
    """A chain in the trunk and a branch beside it in one pass of two slices, each equal to its path run plainly."""
    kv, start = KV(sliced.pages), 132
    sliced.forward([Run(kv.extend(start), TOKENS[:start], 0, 0)])
    kv.commit(TOKENS[:start], start)
    trunk = Run(kv.extend(12), TOKENS[start : start + 12], start, 12)
    other = TOKENS[20:30]
    branch = kv.branch(kv.trunk, start + 4, 10)
    found = sliced.forward([trunk, Run(branch, other, start + 4, 10, parent=trunk)])
    for logits, path, count in ((found[0], TOKENS[: start + 12], 12), (found[1], TOKENS[: start + 4] + other, 10)):
        expected = sliced.forward([Run(KV(sliced.pages).extend(len(path)), path, 0, count)])[0]
        assert torch.equal(logits, expected)
    sliced.pages.forget()


def test_slices_without_wanted_rows_leave_out_the_head(sliced: Sliced) -> None:
    sliced.heads.clear()
    sliced.forward([Run(KV(sliced.pages).extend(40), TOKENS[:40], 0, 1)])
    assert sliced.heads == [False, False, True]
    sliced.pages.forget()


# --- the prepared script -------------------------------------------------------------------------


def test_checks_of_the_gpu_script(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """They pass for an exact model, and fail for one whose rows depend on their company."""
    model = TransformersModel(load_causal_lm(folder, "float32"), 512)
    report = stages.Report("model")
    stages.exactness(report, "exact", model, TOKENS[:40], 20)
    assert report.passed, report.checks
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda runs: [rows + len(runs) for rows in forward(runs)])
    report = stages.Report("model")
    stages.exactness(report, "inexact", model, TOKENS[:40], 20)
    failed = [check["name"] for check in report.checks if not check["passed"]]
    assert failed == ["inexact: chains in company on and off", "inexact: trees on and off"]
    assert "FAIL inexact: trees on and off" in capsys.readouterr().out
