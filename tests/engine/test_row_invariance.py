"""What is computed for a token does not depend on what shares its pass: bits, not tolerances."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from models import tiny_model
from numpy.typing import NDArray

from forerun.core.errors import ModelRefused
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm
from forerun.runtime.passes import Run

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
    kv, other = model.new_kv(), model.new_kv()
    model.forward([Run(other, TOKENS[:30], 0, logit_rows=1)])
    rows, at, turn = [], 0, 0
    while at < LENGTH:
        size = min(sizes[turn % len(sizes)], LENGTH - at)
        runs = [Run(kv, TOKENS[at : at + size], at, logit_rows=size)]
        if company:
            runs.insert(0, Run(other, TOKENS[30 : 30 + company], 30, logit_rows=company))
        rows.append(model.forward(runs)[-1])
        at, turn = at + size, turn + 1
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


def test_branches_see_their_ancestors_and_nothing_else(model: TransformersModel) -> None:
    """Two branches grown node by node, in turn, equal the same paths decoded plainly; so does the winner's trunk."""
    kv = model.new_kv()
    model.forward([Run(kv, TOKENS[:20], 0, logit_rows=1)])
    kv.extend(20)
    paths = {"left": TOKENS[20:26], "right": TOKENS[60:66]}
    slots: dict[str, list[int]] = {"left": [], "right": []}
    seen: dict[str, list[NDArray[np.float32]]] = {"left": [], "right": []}
    for depth in range(6):
        runs = []
        for name, path in paths.items():
            above = tuple(slots[name])
            slots[name] += kv.take_slots(1)
            runs.append(Run(kv, path[depth : depth + 1], 20 + depth, 1, lay=above, keep=(slots[name][-1],)))
        for name, rows in zip(paths, model.forward(runs), strict=True):
            seen[name].append(rows[0])
    for name, path in paths.items():
        plain = model.new_kv()
        expected = model.forward([Run(plain, TOKENS[:20] + path, 0, logit_rows=6)])[0]
        assert np.array_equal(np.stack(seen[name]), expected)
    kv.lay_path(slots["left"], 20)
    kv.extend(26)
    expected = model.forward([Run(model.new_kv(), TOKENS[:27], 0, logit_rows=1)])[0]
    assert np.array_equal(model.forward([Run(kv, TOKENS[26:27], 26, 1)])[0], expected)
    kv.free_slots(slots["left"] + slots["right"])
    assert kv.used_slots == 0


def test_rollback_leaves_no_trace(model: TransformersModel, one_by_one: NDArray[np.float32]) -> None:
    kv = model.new_kv()
    model.forward([Run(kv, TOKENS[:100], 0, logit_rows=1)])
    kv.extend(100)
    model.forward([Run(kv, tuple(reversed(TOKENS[:40])), 100, logit_rows=1)])  # guesses, all wrong
    assert np.array_equal(model.forward([Run(kv, TOKENS[100:103], 100, 3)])[0], one_by_one[100:103])
    kv.truncate(10)
    assert np.array_equal(model.forward([Run(kv, TOKENS[10:30], 10, 20)])[0], one_by_one[10:30])
    with pytest.raises(ValueError, match="only 10 tokens are cached"):
        kv.truncate(11)


def test_memory_grows_with_tokens_held(model: TransformersModel) -> None:
    short, long = model.new_kv(), model.new_kv()
    assert short.bytes == 0
    model.forward([Run(short, TOKENS[:10], 0, 1), Run(long, TOKENS, 0, 1)])
    assert short.bytes < long.bytes


def test_tokens_differ() -> None:
    """Were they all one token, a branch laid wrongly would go unseen."""
    assert len(set(TOKENS)) > LENGTH // 3


def test_layers_outside_the_interface_are_refused(folder: str) -> None:
    model = load_causal_lm(folder, "float32", attention="eager")
    with pytest.raises(ModelRefused, match="cannot be rolled back"):
        TransformersModel(model, 512)
