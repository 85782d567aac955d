"""A rank's share: the right bytes of the right weights, sums in rank order, and refusals that say what would do."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import tiny_model
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from forerun.core.errors import ModelRefused
from forerun.core.pages import KV
from forerun.runtime.batch import Batch, lower
from forerun.runtime.exchange import SLOT_BYTES, PeerLost, SharedEnds, SharedExchange
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm
from forerun.runtime.passes import Run
from forerun.runtime.ranks import RankModel
from forerun.runtime.shards import GatheredColumns, RowParallel, connect, load_shard, plan_of

SPLIT = ("llama", "qwen3", "gemma3_text")
_RNG = random.Random(5)
TOKENS = tuple(_RNG.randrange(256) for _ in range(140))  # crosses a column tile


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


_open: list[SharedExchange] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _open:
        _open.pop().close()


def exchanges(ranks: int, timeout_s: float = 10.0) -> list[SharedExchange]:
    ends = SharedEnds(ranks)
    made = [ends.take(rank, timeout_s) for rank in range(ranks)]
    ends.release()
    _open.extend(made)
    return made


def at_once(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [done.result() for done in [pool.submit(job) for job in jobs]]


class Shared(TransformersModel):
    """All ranks in threads of this process, as one model."""

    def __init__(self, folder: str, dtype: str, ranks: int) -> None:
        ends = exchanges(ranks)
        shares = [load_shard(folder, dtype, None, rank, ranks) for rank in range(ranks)]
        for share, end in zip(shares, ends, strict=True):
            connect(share, end)
        self._others = [RankModel(share, 512, 16) for share in shares[1:]]
        super().__init__(shares[0], 512, 16)

    def execute(self, batch: Batch) -> torch.Tensor:
        own = super().execute
        parts = [lambda: own(batch), *(lambda other=other: other.execute(batch) for other in self._others)]
        result: torch.Tensor = at_once(parts)[0]
        return result


def chunked(model: TransformersModel, sizes: list[int], company: int = 0) -> NDArray[np.float32]:
    """Logits of all positions, in chunks of these sizes in turn, beside `company` rows of another sequence."""
    kv, other = KV(model.pages), KV(model.pages)
    rows, at, turn = [], 0, 0
    while at < len(TOKENS):
        size = min(sizes[turn % len(sizes)], len(TOKENS) - at)
        runs = [Run(kv.extend(size), TOKENS[at : at + size], at, logit_rows=size)]
        if company:
            runs.insert(0, Run(other.extend(company), TOKENS[:company], 0, logit_rows=1))
        rows.append(model.forward(runs)[-1])
        at, turn = at + size, turn + 1
        kv.cached_len = at
    kv.release()
    other.release()
    return np.concatenate(rows)


# --- weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", SPLIT)
def test_shares_are_the_bits_of_the_whole(tmp_path: Path, arch: str, dtype: str) -> None:
    folder = tiny_model(tmp_path, arch=arch)
    whole: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    shares: list[Any] = [load_shard(folder, dtype, None, rank, 2) for rank in range(2)]
    kinds = set()
    for name, weight in whole.named_parameters():
        owner = name.rpartition(".")[0]
        kind = type(shares[0].get_submodule(owner))
        wrapped = kind in (RowParallel, GatheredColumns)
        inner = f"{owner}.linear.weight" if wrapped else name
        parts = [share.get_parameter(inner) for share in shares]
        split = [axis for axis in range(weight.ndim) if parts[0].shape[axis] != weight.shape[axis]]
        kinds.add((kind.__name__, tuple(split)))
        joined = torch.cat(parts, dim=split[0]) if split else parts[0]
        assert torch.equal(joined, weight), name
        assert not split or 2 * parts[0].numel() == weight.numel()
        assert all(part.dtype is weight.dtype and not part.requires_grad for part in parts)
    assert {("Linear", (0,)), ("RowParallel", (1,)), ("GatheredColumns", (0,))} <= kinds
    assert shares[1].model.embed_tokens.weight.shape == whole.model.embed_tokens.weight.shape
    for share in shares:
        assert [name for name, _ in share.named_buffers()] == [name for name, _ in whole.named_buffers()]
        for (name, mine), (_, theirs) in zip(share.named_buffers(), whole.named_buffers(), strict=True):
            assert mine.dtype is theirs.dtype and torch.equal(mine, theirs), name
        assert not share.training
        assert not any(tensor.is_meta for tensor in (*share.parameters(), *share.buffers()))


def qwen2_with_biases(folder: Path, **changes: Any) -> str:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**(sizes | heads | {"tie_word_embeddings": True} | changes)))
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(weight)
    model.save_pretrained(folder)
    return str(folder)


def test_a_tied_head_is_a_share_of_the_embedding_which_stays_whole(tmp_path: Path) -> None:
    folder = qwen2_with_biases(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    shares: list[Any] = [load_shard(folder, "float32", None, rank, 2) for rank in range(2)]
    embedding = shares[0].model.embed_tokens.weight
    assert torch.equal(torch.cat([share.lm_head.linear.weight for share in shares]), embedding)
    bias = torch.cat([share.model.layers[0].self_attn.q_proj.bias for share in shares])
    assert torch.equal(bias, load_file(tmp_path / "model.safetensors")["model.layers.0.self_attn.q_proj.bias"])


def test_a_head_whose_vocabulary_does_not_divide_stays_whole_and_tied(tmp_path: Path) -> None:
    folder = qwen2_with_biases(tmp_path, vocab_size=251)
    share: Any = load_shard(folder, "float32", None, 1, 2)
    assert type(share.lm_head) is nn.Linear
    assert share.lm_head.weight is share.model.embed_tokens.weight


def test_a_share_of_an_early_exit_is_of_its_first_layers(tmp_path: Path) -> None:
    share: Any = load_shard(tiny_model(tmp_path, layers=3), "float32", 2, 0, 2)
    assert len(share.model.layers) == 2


def test_the_configuration_tells_the_heads_of_the_share(tmp_path: Path) -> None:
    share: Any = load_shard(tiny_model(tmp_path), "float32", None, 0, 2)
    text = share.config.get_text_config()
    assert (text.num_attention_heads, text.num_key_value_heads, text.head_dim) == (2, 1, 16)


# --- sums --------------------------------------------------------------------------------------------


class Told:
    """An exchange in which the other ranks' parts are given."""

    def __init__(self, rank: int, others: list[torch.Tensor]) -> None:
        self.rank, self.world = rank, len(others) + 1
        self._others = others

    def open(self) -> None: ...

    def close(self) -> None: ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.stack([*self._others[: self.rank], part, *self._others[self.rank :]])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_parts_are_summed_in_rank_order_whoever_sums(rank: int) -> None:
    parts = [torch.full((1, 4), value) for value in (1.0, 1e8, -1e8)]
    linear = nn.Linear(1, 4, bias=False)
    nn.init.constant_(linear.weight, parts[rank][0, 0].item())
    layer = RowParallel(linear, None, None)
    layer.exchange = Told(rank, parts[:rank] + parts[rank + 1 :])
    with torch.no_grad():
        assert layer(torch.ones(1, 1)).tolist() == [[0.0] * 4]  # 1 is lost in order, and left over in reverse


def test_the_bias_is_added_once() -> None:
    linear = nn.Linear(1, 1, bias=False)
    nn.init.constant_(linear.weight, 2.0)
    layer = RowParallel(linear, nn.Parameter(torch.tensor([10.0])), None)
    layer.exchange = Told(1, [torch.tensor([[1.0]]), torch.tensor([[3.0]])])
    with torch.no_grad():
        assert layer(torch.ones(1, 1)).tolist() == [[16.0]]


def test_the_sum_is_rounded_once() -> None:
    bfloat16 = torch.bfloat16
    linear = nn.Linear(1, 1, bias=False, dtype=bfloat16)
    nn.init.constant_(linear.weight, 1.0)
    layer = RowParallel(linear, nn.Parameter(torch.tensor([2**-9], dtype=bfloat16)), None)
    part = torch.full((1, 1), 2**-9, dtype=bfloat16)
    layer.exchange = Told(0, [part, part])
    with torch.no_grad():
        out = layer(torch.ones(1, 1, dtype=bfloat16))
    # The step of bfloat16 above 1 is 2**-7. 1 + 3 * 2**-9 is three quarters of it; each addend alone is rounded off.
    assert out.dtype is bfloat16
    assert out.item() == 1 + 2**-7


def test_a_split_model_says_what_the_whole_one_says(tmp_path: Path) -> None:
    for at, folder in enumerate(dense(tmp_path)):
        whole = chunked(TransformersModel(load_causal_lm(folder, "float32"), 512, 16), [len(TOKENS)])
        model = Shared(folder, "float32", 2)
        split = chunked(model, [len(TOKENS)])
        assert np.abs(split - whole).max() < 2e-3 * np.abs(whole).max(), at
        assert (split.argmax(-1) == whole.argmax(-1)).mean() > 0.98, at


def dense(home: Path) -> list[str]:
    """Architectures with different plans: separate and fused projections, norms over all heads, biases, odd sizes."""
    folders = [tiny_model(home / arch, arch=arch) for arch in SPLIT]
    folders.append(qwen2_with_biases(home / "qwen2"))
    folders.append(qwen2_with_biases(home / "odd", vocab_size=257))
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ends = {"bos_token_id": None, "eos_token_id": None}
    for kind, config, name in ((Phi3ForCausalLM, Phi3Config, "phi3"), (Olmo2ForCausalLM, Olmo2Config, "olmo2")):
        torch.manual_seed(0)
        kind(config(**sizes, **heads, **ends)).save_pretrained(home / name)
        folders.append(str(home / name))
    return folders


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", SPLIT)
def test_a_split_model_is_row_invariant(tmp_path: Path, arch: str, dtype: str) -> None:
    window = 16 if arch == "gemma3_text" else None
    folder = tiny_model(tmp_path, arch=arch, heads=6, kv_heads=3, hidden=96, sliding_window=window)
    model = Shared(folder, dtype, 3)
    whole = chunked(model, [len(TOKENS)])
    for sizes, company in (([1], 0), ([1, 9, 33], 0), ([6], 13)):
        assert np.array_equal(chunked(model, sizes, company), whole), (sizes, company)


# --- exchanging --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 3), (0, 7), (16, 576), (3, SLOT_BYTES // 8 + 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everybody_gathers_every_part(shape: tuple[int, int], dtype: torch.dtype) -> None:
    ends = exchanges(3)
    parts = [[torch.randn(shape).to(dtype) for _ in range(3)] for _ in range(4)]

    def rounds(end: SharedExchange) -> list[torch.Tensor]:
        end.open()
        return [end.gather(turn[end.rank]).clone() for turn in parts]

    for gathered in at_once([lambda end=end: rounds(end) for end in ends]):
        for got, turn in zip(gathered, parts, strict=True):
            assert torch.equal(got, torch.stack(turn))


def test_a_rank_that_is_ahead_overwrites_nothing() -> None:
    first, second = exchanges(2)
    started = threading.Event()

    def fast() -> None:
        for turn in range(200):
            first.gather(torch.full((1000,), float(turn)))
        started.set()

    def slow() -> list[bool]:
        seen = []
        for turn in range(200):
            view = second.gather(torch.zeros(1000))[0]
            seen.append(all(bool((view == turn).all()) for _ in range(3)))
        return seen

    assert all(at_once([fast, slow])[1])
    assert started.is_set()


def test_a_peer_that_is_gone_is_known_at_once() -> None:
    first, second = exchanges(2, timeout_s=60.0)
    second.close()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        first.gather(torch.zeros(4))
    assert time.monotonic() - began < 5


def test_a_peer_that_does_not_answer_is_given_up() -> None:
    first, _second, _third = exchanges(3, timeout_s=0.2)
    with pytest.raises(PeerLost, match=r"rank 1 has not answered within 0\.2 s"):
        first.gather(torch.zeros(4))


def test_ranks_out_of_step_do_not_mix_passes_up() -> None:
    first, second = exchanges(2)
    second._sockets[0].send(b"\7")  # as if it were in its seventh turn
    with pytest.raises(PeerLost, match="rank 1 is out of step"):
        first.gather(torch.zeros(4))


def test_the_starter_keeps_no_copy_of_an_end_that_would_hide_a_death() -> None:
    ends = SharedEnds(2)
    own = ends.take(0, 60.0)
    _open.append(own)
    ends.release()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        own.open()


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "ranks", "why"),
    [
        ({"heads": 4, "kv_heads": 2}, 3, r"with 4 attention heads, 2 KV heads .* 3 ranks; .* ranks: 1, 2$"),
        ({"heads": 4, "kv_heads": 2}, 4, r"with 4 attention heads, 2 KV heads .* 4 ranks; .* ranks: 1, 2$"),
        ({"heads": 12, "kv_heads": 12, "hidden": 96}, 8, r"with 12 attention heads.*ranks: 1, 2, 3, 4, 6, 12$"),
    ],
)
def test_heads_that_do_not_divide_are_refused_with_what_would_do(
    tmp_path: Path, sizes: dict[str, int], ranks: int, why: str
) -> None:
    folder = tiny_model(tmp_path, **sizes)
    with pytest.raises(ModelRefused, match=why):
        load_shard(folder, "float32", None, 0, ranks)


def test_feed_forward_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    folder = qwen2_with_biases(tmp_path, num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    with pytest.raises(ModelRefused, match=r"128 inputs of down_proj.* over 3 ranks; possible numbers of ranks: 1$"):
        load_shard(folder, "float32", None, 0, 3)


def test_a_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="GPT2LMHeadModel cannot be split over ranks: transformers has no plan"):
        load_shard(tiny_model(tmp_path, arch="gpt2"), "float32", None, 0, 2)


def test_mixtures_of_experts_are_refused() -> None:
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(**sizes, num_attention_heads=4, num_local_experts=4))
    with pytest.raises(ModelRefused, match=r"MixtralForCausalLM cannot be split .* its plan says '.*' for .*experts"):
        plan_of(model)


def renamed(folder: Path, old: str, new: str) -> str:
    path = folder / "model.safetensors"
    weights = {name.replace(old, new): weight for name, weight in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return str(folder)


def test_weights_under_other_names_are_refused_not_guessed(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    folder = renamed(tmp_path, "model.layers.1.mlp.up_proj", "transformer.h.1.mlp.w1")
    with pytest.raises(ModelRefused, match=r"holds no 'model\.layers\.1\.mlp\.up_proj\.weight'; .*save_pretrained"):
        load_shard(folder, "float32", None, 0, 2)


def test_weights_without_a_place_are_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | {"model.layers.0.mlp.gate.weight": torch.zeros(2, 2)}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"holds 'model\.layers\.0\.mlp\.gate\.weight', which LlamaForCausalLM has"):
        load_shard(str(tmp_path), "float32", None, 0, 2)


def test_a_pass_as_bytes_is_the_same_pass(tmp_path: Path) -> None:
    model = TransformersModel(load_causal_lm(tiny_model(tmp_path), "float32"), 512, 16)
    batch = lower([Run(KV(model.pages).extend(5), TOKENS[:5], 0, 2)], [])
    back = Batch.from_bytes(batch.to_bytes())
    assert torch.equal(model.execute(back), model.execute(batch))
    assert json.dumps(back.wanted.tolist()) == "[3, 4]"
