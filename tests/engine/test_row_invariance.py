"""What is computed for a token does not depend on what shares its pass: bits, not tolerances."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from pathlib import Path as Folder
from typing import Any

import numpy as np
import pytest
import torch
from models import tiny_model
from numpy.typing import NDArray
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.activations import GELUTanh

from forerun.core.errors import ModelRefused
from forerun.core.pages import KV, TILE, Path
from forerun.runtime import tiled
from forerun.runtime.batch import lower
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm
from forerun.runtime.passes import Run
from forerun.runtime.steady import Steady
from forerun.runtime.tiled import Gather, TiledAttention, _in_pairs, blocks

LENGTH = 150  # crosses a column tile


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3_text", "gpt2"])
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(arch: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    window = 16 if arch == "gemma3_text" else None
    return tiny_model(
        tmp_path_factory.mktemp(arch) / "m", arch=arch, sliding_window=window, layers=3, hidden=96, heads=6
    )


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(folder: str, request: pytest.FixtureRequest) -> TransformersModel:
    torch.set_num_threads(1)
    return TransformersModel(load_causal_lm(folder, request.param), 512)


_RNG = random.Random(3)
TOKENS = tuple(_RNG.randrange(256) for _ in range(LENGTH))


def chunked(model: TransformersModel, sizes: list[int], company: int = 0) -> NDArray[np.float32]:
    """Logits of all positions, in chunks of these sizes in turn, beside `company` rows of another sequence."""
    kv, other = KV(model.pages), KV(model.pages)
    model.forward([Run(other.extend(30 + company), TOKENS[:30], 0, logit_rows=1)])
    rows, at, turn = [], 0, 0
    while at < LENGTH:
        size = min(sizes[turn % len(sizes)], LENGTH - at)
        runs = [Run(kv.extend(size), TOKENS[at : at + size], at, logit_rows=size)]
        if company:
            runs.insert(0, Run(other.trunk, TOKENS[30 : 30 + company], 30, logit_rows=company))
        rows.append(model.forward(runs)[-1])
        at, turn = at + size, turn + 1
        kv.cached_len = at  # nothing is published: the next text computes all its rows itself
    kv.release()
    other.release()
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def one_by_one(model: TransformersModel) -> NDArray[np.float32]:
    return chunked(model, [1])


@pytest.mark.parametrize("sizes", [[LENGTH], [2], [5], [16], [17], [33], [64], [1, 9, 4]])
def test_chunks(model: TransformersModel, one_by_one: NDArray[np.float32], sizes: list[int]) -> None:
    assert np.array_equal(chunked(model, sizes), one_by_one)


@pytest.mark.parametrize("company", [1, 3, 13, 40])
def test_company(model: TransformersModel, one_by_one: NDArray[np.float32], company: int) -> None:
    assert np.array_equal(chunked(model, [1], company), one_by_one)
    assert np.array_equal(chunked(model, [6], company), one_by_one)


@pytest.mark.parametrize("others", [1, 3, 4, 6])
@pytest.mark.parametrize("rows", [1, 4, 5])
def test_few_runs_and_more(model: TransformersModel, one_by_one: NDArray[np.float32], others: int, rows: int) -> None:
    """Up to four runs of up to four rows are one group, more are not."""
    kv, company = KV(model.pages), [KV(model.pages) for _ in range(others)]
    start = LENGTH - 1
    model.forward([Run(kv.extend(start), TOKENS[:start], 0, 1)])
    runs = [Run(kv.extend(1), TOKENS[start:], start, 1)]
    runs += [Run(other.extend(rows), TOKENS[:rows], 0, rows) for other in company]
    assert np.array_equal(model.forward(runs)[0][0], one_by_one[start])
    for each in (kv, *company):
        each.release()


def plainly(model: TransformersModel, tokens: tuple[int, ...], logit_rows: int) -> NDArray[np.float32]:
    kv = KV(model.pages)
    rows = model.forward([Run(kv.extend(len(tokens)), tokens, 0, logit_rows)])[0]
    kv.release()
    return rows


@pytest.mark.parametrize("base_len", [20, 124, 127, 128])
def test_a_tree_in_one_pass(model: TransformersModel, base_len: int) -> None:
    """A main path of six, a branch off its second node, one off that branch, one off the root, across page ends."""
    kv = KV(model.pages)
    model.forward([Run(kv.extend(base_len), TOKENS[:base_len], 0, logit_rows=1)])
    kv.commit(TOKENS, base_len)
    main, side, twig, root = TOKENS[base_len : base_len + 6], (7, 91, 14, 33), (55, 201), (99, 3)
    trunk = Run(kv.extend(6), main, base_len, 6)
    first = Run(kv.branch(trunk.path, base_len + 2, 4), side, base_len + 2, 4, parent=trunk)
    second = Run(kv.branch(first.path, base_len + 5, 2), twig, base_len + 5, 2, parent=first)
    third = Run(kv.branch(trunk.path, base_len, 2), root, base_len, 2, parent=trunk)
    rows = model.forward([trunk, first, second, third])
    before = TOKENS[:base_len]
    assert np.array_equal(rows[0], plainly(model, before + main, 6))
    assert np.array_equal(rows[1], plainly(model, before + main[:2] + side, 4))
    assert np.array_equal(rows[2], plainly(model, before + main[:2] + side[:3] + twig, 2))
    assert np.array_equal(rows[3], plainly(model, before + root, 2))
    won = before + main[:2] + side[:3] + twig
    kv.commit(won, len(won), second.path)
    for run in (first, third):
        kv.drop(run.path)
    after = model.forward([Run(kv.extend(1), (5,), len(won), 1)])[0]
    assert np.array_equal(after, plainly(model, (*won, 5), 1))
    kv.release()
    assert model.pages.held == 0


def test_branches_grown_node_by_node(model: TransformersModel) -> None:
    """As a draft does it: two branches grown in turn, in passes of their own, equal the same paths decoded plainly."""
    kv = KV(model.pages)
    model.forward([Run(kv.extend(20), TOKENS[:20], 0, logit_rows=1)])
    kv.commit(TOKENS, 20)
    texts = {"left": TOKENS[20:26], "right": TOKENS[60:66]}
    paths = {name: kv.branch(kv.trunk, 20, 1) for name in texts}
    seen: dict[str, list[NDArray[np.float32]]] = {"left": [], "right": []}
    for depth in range(6):
        if depth:
            for name, path in paths.items():
                paths[name] = kv.branch(path, 20 + depth, 1)
                kv.drop(path)
        runs = [Run(paths[name], text[depth : depth + 1], 20 + depth, 1) for name, text in texts.items()]
        for name, rows in zip(texts, model.forward(runs), strict=True):
            seen[name].append(rows[0])
    for name, text in texts.items():
        assert np.array_equal(np.stack(seen[name]), plainly(model, TOKENS[:20] + text, 6))
    kv.commit(TOKENS, 26, paths["left"])
    kv.drop(paths["right"])
    after = model.forward([Run(kv.extend(1), TOKENS[26:27], 26, 1)])[0]
    assert np.array_equal(after, plainly(model, TOKENS[:27], 1))
    kv.release()
    assert model.pages.held == 0


def test_rollback_leaves_no_trace(model: TransformersModel, one_by_one: NDArray[np.float32]) -> None:
    kv = KV(model.pages)
    model.forward([Run(kv.extend(100), TOKENS[:100], 0, logit_rows=1)])
    kv.commit(TOKENS, 100)
    model.forward([Run(kv.extend(40), tuple(reversed(TOKENS[:40])), 100, logit_rows=1)])  # guesses, all wrong
    kv.commit(TOKENS, 100)
    assert np.array_equal(model.forward([Run(kv.extend(3), TOKENS[100:103], 100, 3)])[0], one_by_one[100:103])
    kv.truncate(10)
    assert np.array_equal(model.forward([Run(kv.extend(20), TOKENS[10:30], 10, 20)])[0], one_by_one[10:30])
    with pytest.raises(ValueError, match="only 10 tokens are cached"):
        kv.truncate(11)
    kv.release()


def test_rollback_moves_as_little_after_4000_tokens_as_after_100(tmp_path: Folder) -> None:
    """Nothing is copied when guesses are rolled back, and one page when a branch had a tail of its own."""
    folder = tiny_model(tmp_path / "m", layers=1, context=4_400)
    model = TransformersModel(load_causal_lm(folder, "float32"), 4_400, pages=80)
    assert isinstance(model.attention, TiledAttention)
    moved = []
    for context in (100, 4_000):
        kv = KV(model.pages)
        prompt = (TOKENS * 27)[:context]
        for start in range(0, context, 500):
            model.forward([Run(kv.extend(min(500, context - start)), prompt[start : start + 500], start, 1)])
            kv.commit(prompt, min(start + 500, context))
        before = model.attention.bytes_moved
        for _ in range(3):
            trunk = Run(kv.extend(5), (1, 2, 3, 4, 5), context, 5)
            model.forward([trunk])
            kv.truncate(context)
        assert model.attention.bytes_moved == before
        for _ in range(3):
            trunk = Run(kv.extend(5), (1, 2, 3, 4, 5), context, 5)
            branch = Run(kv.branch(trunk.path, context + 1, 2), (6, 7), context + 1, 2, parent=trunk)
            model.forward([trunk, branch])
            kv.drop(branch.path)
            kv.truncate(context)
        moved.append(model.attention.bytes_moved - before)
        kv.release()
    page = model.memory(0, 0).kv // model.pages.count
    assert moved == [3 * page, 3 * page]


def test_a_shared_prefix_has_the_same_bits(model: TransformersModel, one_by_one: NDArray[np.float32]) -> None:
    """Found in whole pages and in part of one, while its first owner still decodes and after it is gone."""
    model.pages.forget()
    first, second, third = KV(model.pages), KV(model.pages), KV(model.pages)
    model.forward([Run(first.extend(140), TOKENS[:140], 0, logit_rows=1)])
    first.commit(TOKENS, 140)
    assert second.adopt(TOKENS) == 128
    first.release(TOKENS[:140])
    assert third.adopt(TOKENS) == 140
    for kv in (second, third):
        at = kv.cached_len
        rows = model.forward([Run(kv.extend(LENGTH - at), TOKENS[at:], at, LENGTH - at)])[0]
        assert np.array_equal(rows, one_by_one[at:])
        kv.release()
    assert model.pages.held == 0


def test_tokens_differ() -> None:
    """Were they all one token, a branch laid wrongly would go unseen."""
    assert len(set(TOKENS)) > LENGTH // 3


def test_layers_outside_the_interface_are_refused(folder: str) -> None:
    model = load_causal_lm(folder, "float32", attention="eager")
    with pytest.raises(ModelRefused, match="cannot be rolled back"):
        TransformersModel(model, 512)


@pytest.mark.parametrize("block", [1, 3])
def test_pages_in_many_blocks(model: TransformersModel, one_by_one: NDArray[np.float32], block: int) -> None:
    """As with a large model, of whose pages only a few are fetched at once."""
    assert isinstance(model.attention, TiledAttention)
    gather = model.attention._gather
    before, gather.block = gather.block, block
    try:
        assert np.array_equal(chunked(model, [33], company=3), one_by_one)
    finally:
        gather.block = before


def test_keys_of_another_type_are_refused() -> None:
    attention = TiledAttention(layers=1, pages=2, heads=2, kv_heads=1, head_dim=8, dtype=torch.bfloat16)
    key = torch.zeros((1, 4, 8))
    with pytest.raises(ModelRefused, match=r"K in torch\.float32, its weights are in torch\.bfloat16"):
        attention.attend(0, torch.zeros((2, 4, 8)), key, key, 1.0, None, None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_far_into_a_text_does_not_depend_on_shorter_or_longer_company(tmp_path: Folder, dtype: str) -> None:
    """Contexts of 3 to 11 pages: what pages give is added up in an order of its own, whoever has more or fewer."""
    torch.set_num_threads(1)
    folder = tiny_model(tmp_path / "model", layers=1, context=2048)
    model = TransformersModel(load_causal_lm(folder, dtype), 2048, 80)
    text = tuple(random.Random(1).randrange(256) for _ in range(1300))
    for length in (300, 390, 520, 640, 650, 1200):
        model.pages.forget()
        own = KV(model.pages).extend(length + 4)
        model.forward([Run(own, text[:length], 0, 1)])
        row = Run(own, text[length : length + 1], length, 1)
        (alone,) = model.forward([row])
        alone = alone.copy()
        for other in (100, 400, 700, 1290):
            path = KV(model.pages).extend(other + 4)
            model.forward([Run(path, text[:other], 0, 1)])
            for rows in (1, 3):
                _, beside = model.forward([Run(path, text[:rows], other, 1), row])
                assert np.array_equal(beside, alone), (length, other, rows)


def test_pages_are_added_in_pairs_by_their_places() -> None:
    """Another order is other numerics: then `TransformersModel.numerics` says so too."""
    given = torch.tensor([1e8, 1.0, -1e8, 3.0, 0.5])[:, None]
    (total,) = _in_pairs(given.clone())
    one, two = given[0] + given[1], given[2] + given[3]
    assert torch.equal(total, ((one + two) + given[4])[0])
    assert total != given.sum()
    blank = torch.full((8, 1), -0.0)
    blank[:5] = given
    assert torch.equal(_in_pairs(blank)[0], total)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("scattered", [False, True])
def test_what_attention_takes_at_most_is_what_it_states(head_dim: int, scattered: bool) -> None:
    heads, kv_heads, rows, columns = 8, 2, 128, 4096
    attention = TiledAttention(1, 40, heads, kv_heads, head_dim)
    pages = list(range(columns // TILE))
    if scattered:
        random.Random(1).shuffle(pages)
    attention.begin(lower([Run(Path(pages), tuple(range(rows)), columns - rows, 0)], []))
    query, key = torch.zeros(heads, rows, head_dim), torch.zeros(kv_heads, rows, head_dim)
    with Living() as living:
        attention.attend(0, query, key, key, 0.1, None, None)
    stated = attention.transient_bytes(rows, columns)
    assert 0.6 * stated < living.most <= 1.02 * stated


class Living(TorchDispatchMode):
    """How many bytes of tensors that were made within it lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = self._now = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            storage, given = made.untyped_storage(), [*args, *(kwargs or {}).values()]
            old = {tensor.untyped_storage().data_ptr() for tensor in given if isinstance(tensor, torch.Tensor)}
            if storage.data_ptr() not in old | self._seen:
                self._seen.add(storage.data_ptr())
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._gone, storage.data_ptr(), storage.nbytes())
        return made

    def _gone(self, at: int, size: int) -> None:
        self._seen.discard(at)
        self._now -= size


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("function", [nn.SiLU(), nn.GELU(approximate="tanh"), GELUTanh()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [688, 1_040, 2_048, 2_736, 4_100, 333])
def test_an_activation_does_not_depend_on_its_company(
    threads: None, function: nn.Module, dtype: torch.dtype, width: int
) -> None:
    """Threads divide 40 rows elsewhere than 4, three of them at any element."""
    x = 3 * torch.randn((112, width), generator=torch.Generator().manual_seed(2)).to(dtype)
    by_four = torch.cat([Steady(function)(rows) for rows in x.split(4)])
    for rows in (8, 16, 40, 64, 112):
        assert torch.equal(Steady(function)(x[:rows]), by_four[:rows]), rows
    torch.testing.assert_close(by_four, function(x))


def test_every_activation_of_a_model_is_steady(model: TransformersModel) -> None:
    activations = [child for child in model._model.modules() if type(child).__module__ == "transformers.activations"]
    wrapped = [child for child in model._model.modules() if isinstance(child, Steady)]
    assert len(wrapped) == 3
    assert {id(child.function) for child in wrapped} >= {id(child) for child in activations}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pages", [[3, 4, 5, 6], [0, 1, 2, 7, 8, 9], [0, 2, 5, 9], [4]])
def test_pages_are_fetched_as_they_are_wherever_they_lie(dtype: torch.dtype, pages: list[int]) -> None:
    store = torch.randn((10, 2, 3, 4), generator=torch.Generator().manual_seed(1)).to(dtype)
    gather = Gather(elements=24, dtype=dtype)
    (block,) = blocks(np.array(pages), gather.block)
    assert torch.equal(gather(store, block), store[pages].float().view(-1, 3, 4))


def test_fetched_pages_are_divided_into_blocks() -> None:
    parts = blocks(np.array([0, 1, 2, 7, 8]), most=2)
    assert [(part.start, part.end, part.index.tolist()) for part in parts] == [
        (0, 2, [0, 1]),
        (2, 4, [2, 7]),
        (4, 5, [8]),
    ]


@pytest.mark.parametrize("most_rows", [1, 3, 20])
def test_attention_in_pieces(
    model: TransformersModel, one_by_one: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch, most_rows: int
) -> None:
    """As for a long prompt, whose scores would take too much memory at once."""
    heads, columns = model._shape.heads, 2 * TILE
    monkeypatch.setattr(tiled, "SCORES_BYTES", 4 * heads * columns * most_rows)
    assert np.array_equal(chunked(model, [64, 1], company=3), one_by_one)
    parts = tiled.group(lower([Run(KV(model.pages).extend(150), TOKENS, 0, 1)], []), heads, model._shape.kv_heads, 8)
    assert max(part.runs * part.lines * model._shape.kv_heads * part.tiles for part in parts) <= max(
        most_rows * heads * 2, 4 * model._shape.kv_heads * 2
    )
    assert sum(len(part.position[0]) * part.runs for part in parts) >= LENGTH
    model.pages.forget()
