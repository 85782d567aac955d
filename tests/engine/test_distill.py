"""A draft made of its target: data, student, training and folder, on tiny models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import ARCHITECTURES, tiny_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from forerun.cli import app
from forerun.core.errors import InvalidRequest, ModelRefused
from forerun.core.pages import KV
from forerun.runtime.distill import pipeline, writing
from forerun.runtime.distill.card import licence_of, plot
from forerun.runtime.distill.corpus import DataPlan, frequent, read_shards, write_shards
from forerun.runtime.distill.draft import Draft
from forerun.runtime.distill.evaluation import evaluate
from forerun.runtime.distill.student import choose_layers, load_student, save_student, student_of
from forerun.runtime.distill.training import Point, Slots, TrainPlan, distance, rows_of, train
from forerun.runtime.distill.turns import Turns
from forerun.runtime.distill.wide import WIDE, WideCache, step
from forerun.runtime.distill.writing import KEPT, Conversations, Kind, likeliest, sample, write
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm, revision
from forerun.runtime.packed import PackedLinear
from forerun.runtime.passes import Run
from forerun.runtime.serving import LoadOptions, load
from forerun.text import TextModel

VOCAB, END, ROWS, LENGTH = 256, 1, 16, 96
HEAD = tuple(range(0, VOCAB, 2))
LAYERS = (0, 2)


class Cut(Exception):
    """What breaks a stage off."""


@pytest.fixture(scope="module")
def turns(folder: str) -> Turns:
    return Turns.of(TextModel.load(folder))


@pytest.fixture(scope="module")
def plan(folder: str) -> DataPlan:
    return DataPlan(revision(folder), "float32", 5, (0.0, 1.0), ROWS, LENGTH)


@pytest.fixture(scope="module")
def shards(target: Any, turns: Turns, plan: DataPlan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data")
    write_shards(target, turns, VOCAB, plan, 6, data, lambda new: None)
    return data


@pytest.fixture
def draft(folder: str, target: Any, tmp_path: Path) -> Path:
    """A saved one, untrained."""
    out = tmp_path / "draft"
    save_student(student_of(target, LAYERS, HEAD, WIDE), out, Draft("tiny", revision(folder), LAYERS, len(HEAD)))
    return out


# --- data --------------------------------------------------------------------------------------------


def test_the_template_is_taken_apart(folder: str) -> None:
    text = TextModel.load(folder)
    turns = Turns.of(text)
    pieces = [text.decode(part, skip_special_tokens=False) for part in (turns.opening, turns.to_answer)]
    assert pieces == ["user: ", "\nassistant: "]
    assert text.decode(turns.to_question) == "\nuser: "
    assert turns.ends == (END,)


def test_a_target_without_a_template_is_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    with pytest.raises(ModelRefused, match="no chat template"):
        Turns.of(TextModel.load(str(tmp_path)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_wide_attention_is_that_of_transformers(arch: str, tmp_path: Path) -> None:
    window = 5 if arch in ("qwen3", "gemma3_text") else None
    tiny_model(tmp_path, arch=arch, sliding_window=window)
    tokens = torch.arange(3 * 24).reshape(3, 24) * 37 % VOCAB
    tokens[:, :4] = tokens[0, :4]
    wide = load_causal_lm(str(tmp_path), "float32", attention=WIDE)
    eager = load_causal_lm(str(tmp_path), "float32", attention="eager")
    with torch.inference_mode():
        wanted = eager(input_ids=tokens).logits
        whole = step(wide, tokens)
        cache = WideCache(3, 24)
        stepped = [step(wide, tokens[:1, :4], cache).expand(3, -1, -1)]
        stepped += [step(wide, tokens[:, at : at + 1], cache) for at in range(4, 24)]
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.cat(stepped, 1), wanted[:, 3:], rtol=1e-4, atol=1e-4)


def test_what_is_kept_is_what_the_target_thinks(target: Any, turns: Turns) -> None:
    made = write(target, turns, VOCAB, 8, LENGTH, (0.0, 1.0), (0, 0))
    with torch.inference_mode():
        law = step(target, torch.from_numpy(made.tokens[:, :-1])).softmax(-1).numpy()
    after = slice(len(turns.opening), None)
    ids, shares = made.top_ids[:, after], made.top_shares[:, after]
    assert (law[:, after.start - 1 :].argmax(-1) == ids[:, :, 0]).all()
    found = np.take_along_axis(law[:, after.start - 1 :], ids, -1)
    np.testing.assert_allclose(found, shares, atol=2e-3)
    assert ids.shape[-1] == KEPT


def test_answers_are_picks_and_turns_end_as_the_template_says(target: Any, turns: Turns) -> None:
    made = write(target, turns, VOCAB, 8, 384, (0.0,), (0, 0))
    closings = {turns.to_answer[0], turns.to_question[0], END}
    cold = (made.kinds == Kind.ANSWER) & ~np.isin(made.tokens, list(closings))
    assert cold.sum() > 100
    assert (made.tokens[cold] == made.top_ids[cold][:, 0]).all()
    text = [bytes(row) for row in made.tokens.astype(np.uint8)]
    assert all(row.startswith(bytes(turns.opening)) and bytes(turns.to_answer) in row for row in text)
    assert (made.kinds[:, : len(turns.opening)] == Kind.TEMPLATE).all()
    before, after = made.kinds[:, :-1], made.kinds[:, 1:]
    assert not ((before != Kind.TEMPLATE) & (after != Kind.TEMPLATE) & (before != after)).any()


def test_data_are_a_function_of_seed_and_number(target: Any, turns: Turns) -> None:
    def tokens(seed: int, number: int) -> np.ndarray:
        return write(target, turns, VOCAB, 4, 40, (0.0, 1.0), (seed, number)).tokens

    assert (tokens(3, 1) == tokens(3, 1)).all()
    assert (tokens(3, 1) != tokens(3, 2)).any()
    assert (tokens(3, 1) != tokens(4, 1)).any()


def test_broken_off_data_go_on_to_the_same_bytes(
    target: Any, turns: Turns, plan: DataPlan, shards: Path, tmp_path: Path
) -> None:
    heard: list[int] = []

    def cut(new: int) -> None:
        heard.append(new)
        if sum(heard) > 1.5 * plan.shard_tokens:
            raise Cut

    with pytest.raises(Cut):
        write_shards(target, turns, VOCAB, plan, 2, tmp_path, cut)
    first = tmp_path / "00000.safetensors"
    assert first.exists() and not (tmp_path / "00001.safetensors").exists()
    kept, again = first.stat().st_mtime_ns, []
    write_shards(target, turns, VOCAB, plan, 2, tmp_path, again.append)
    assert first.stat().st_mtime_ns == kept
    assert again[0] == plan.shard_tokens and sum(again) == 2 * plan.shard_tokens
    for name in ("00000.safetensors", "00001.safetensors"):
        assert (tmp_path / name).read_bytes() == (shards / name).read_bytes()


def test_data_of_another_plan_are_not_mixed_in(plan: DataPlan, shards: Path) -> None:
    other = DataPlan(plan.target_revision, plan.dtype, plan.seed + 1, plan.temperatures, plan.rows, plan.length)
    with pytest.raises(InvalidRequest, match="seed 5, and 6 was asked for"):
        other.fits(shards)


def test_a_broken_shard_is_named(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "00000.safetensors").write_bytes((shards / "00000.safetensors").read_bytes()[:1000])
    with pytest.raises(ModelRefused, match=r"00000\.safetensors is no shard of data.*written again"):
        read_shards((tmp_path, 1))


def test_rows_are_trained_on_or_held_out(shards: Path) -> None:
    data, held = read_shards((shards, 6))
    assert (len(data), len(held)) == (6 * (ROWS - 1), 6)
    assert not {row.tobytes() for row in data.tokens} & {row.tobytes() for row in held.tokens}


def test_draws_follow_the_law() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, -math.inf, 1.0]])
    count = 4000
    draws = (torch.arange(count) + 0.5) / count
    for temperature in (0.5, 1.0):
        drawn = sample(logits.expand(count, -1), torch.full((count,), temperature), draws)
        shares = torch.bincount(drawn, minlength=5) / count
        torch.testing.assert_close(shares, (logits[0] / temperature).softmax(-1), atol=1e-3, rtol=0.0)
    assert sample(logits.expand(count, -1), torch.zeros(count), draws).unique().tolist() == [0]


def test_the_likeliest_begin_with_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(1, 300)
    logits[0, [250, 40, 7]] = 4.0
    ids, shares = likeliest(logits, 5)
    assert ids[0, 0] == 7 and set(ids[0, :3].tolist()) == {7, 40, 250}
    assert len(set(ids[0].tolist())) == 5
    torch.testing.assert_close(shares, logits.softmax(-1).gather(1, ids))


@pytest.mark.parametrize("vocab", [5, 128, 300, 49152])
@pytest.mark.parametrize("count", [1, 3, 32])
def test_the_likeliest_are_those_of_a_look_at_all(vocab: int, count: int) -> None:
    logits = 4.0 * torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab))
    ids, shares = likeliest(logits, count)
    wanted, places = logits.softmax(-1).topk(min(count, vocab))
    assert ids.tolist() == places.tolist()
    torch.testing.assert_close(shares, wanted)


@pytest.mark.parametrize("vocab", [1, 5, 128, 300, 49152])
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 2.0])
def test_a_draw_is_where_the_running_sum_of_chances_passes_it(vocab: int, temperature: float) -> None:
    made = torch.Generator().manual_seed(vocab)
    logits, draws = 4.0 * torch.randn(64, vocab, generator=made), torch.rand(64, generator=made)
    logits[:, ::3] = -torch.inf  # never drawn
    logits[:, -1] = 0.0
    draws[:4] = torch.tensor([0.0, 1.0 - 2**-24, 0.5, 0.999999])
    drawn = sample(logits, torch.full((64,), temperature), draws)
    chances = (logits.double() / temperature).softmax(-1)
    reached = chances.cumsum(-1).gather(1, drawn[:, None])[:, 0]
    own = chances.gather(1, drawn[:, None])[:, 0]
    assert (own > 0.0).all()
    assert (reached > draws - 1e-5).all() and (reached - own <= draws + 1e-5).all()


def test_the_head_gets_what_the_target_is_likeliest_to_say() -> None:
    top = np.array([[[0, 0], [5, 9], [5, 2], [3, 3]]])
    shares = np.array([[[0, 0], [0.9, 0.1], [0.5, 0.5], [1, 0]]], np.float16)
    kinds = np.array([[0, 1, 2, 0]], np.uint8)  # what the template says counts nothing
    data = Conversations(np.zeros((1, 4), np.int64), kinds, np.zeros(1, np.float32), top, shares)
    assert frequent(data, 12, 2, ()).tolist() == [2, 5]
    assert frequent(data, 12, 3, (11,)).tolist() == [2, 5, 11]


# --- the student -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"), [("1", (0,)), ("3", (0, 14, 29)), ("4", (0, 10, 19, 29)), ("0, 7,29", (0, 7, 29))]
)
def test_layers_are_a_count_or_numbers(text: str, wanted: tuple[int, ...]) -> None:
    assert choose_layers(text, 30) == wanted


@pytest.mark.parametrize("text", ["", "0", "31", "0,30", "3,1", "1,1", "-1,2", "two", "1,,2"])
def test_other_layers_are_refused(text: str) -> None:
    with pytest.raises(ModelRefused, match="cannot be taken of a target with 30"):
        choose_layers(text, 30)


def test_the_student_begins_as_the_chosen_layers(target: Any) -> None:
    student = student_of(target, LAYERS, HEAD, WIDE)
    own, theirs = student.own(), target.state_dict()
    for place, layer in enumerate(LAYERS):
        names = [name for name in own if name.startswith(f"model.layers.{place}.")]
        assert names
        for name in names:
            assert torch.equal(own[name], theirs[name.replace(f"layers.{place}.", f"layers.{layer}.")])
    assert torch.equal(own["lm_head.weight"], theirs["lm_head.weight"][list(HEAD)])
    assert torch.equal(own["model.norm.weight"], theirs["model.norm.weight"])
    assert not any("embed" in name for name in own)
    assert {name for name, weight in student.model.named_parameters() if weight.requires_grad} == set(own)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_draft_that_is_the_target_is_always_right(arch: str, tmp_path: Path) -> None:
    tiny_model(tmp_path, arch=arch, layers=2, eos=END)
    same = load_causal_lm(str(tmp_path), "float32", attention=WIDE)
    student = student_of(same, (0, 1), range(VOCAB), WIDE)
    held = write(same, Turns.of(TextModel.load(str(tmp_path))), VOCAB, 4, LENGTH, (0.0, 1.0), (0, 0))
    result = evaluate(student, same, held, VOCAB, 0, (1.0, 4.0))
    assert result.greedy.accepted == result.coupled.accepted == result.coverage == 1.0
    assert result.overlap == pytest.approx(1.0, abs=1e-6)
    assert result.cost == 0.25


def test_evaluation_agrees_with_counting(target: Any, shards: Path) -> None:
    _, held = read_shards((shards, 6))
    student = student_of(target, LAYERS, HEAD, WIDE)
    result = evaluate(student, target, held, VOCAB, 0, (1.0, 1.0))
    with torch.inference_mode():
        p, q = (step(model, torch.from_numpy(held.tokens[:, :-1].astype(np.int64))) for model in (target, student))
    asked = torch.from_numpy(held.kinds[:, 1:] == Kind.ANSWER)
    p, q = p[asked], q[asked]
    right = p.argmax(-1) == q.argmax(-1)
    second = (q.topk(2).indices[:, 1] == p.argmax(-1))[~right]
    assert result.greedy.accepted == pytest.approx(right.float().mean().item())
    assert result.greedy.runner_up == pytest.approx(second.float().mean().item())
    assert result.overlap == pytest.approx(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean().item(), abs=1e-5)
    assert result.coverage == pytest.approx((p.argmax(-1) % 2 == 0).float().mean().item())  # HEAD is the even ids
    assert 0.2 < result.coupled.accepted < 0.9
    assert set(result.greedy_by_temperature) <= {"0", "1"}


def test_logits_are_of_the_whole_vocabulary(target: Any) -> None:
    student = student_of(target, LAYERS, HEAD, WIDE)
    tokens = torch.tensor([[5, 17, 80]])
    with torch.inference_mode():
        logits = step(student, tokens)
        asked = student(input_ids=tokens, use_cache=False, logits_to_keep=torch.tensor([2, 0])).logits
        few = student.model(input_ids=tokens, use_cache=False).logits
    assert logits.shape == (1, 3, VOCAB)
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[list(HEAD)] = False
    assert (logits[..., outside] == -math.inf).all()
    assert logits[..., ~outside].isfinite().all()
    assert torch.equal(logits[..., list(HEAD)], few)
    torch.testing.assert_close(asked, logits[:, [2, 0]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_draft_has_the_same_bits(folder: str, target: Any, tmp_path: Path, dtype: str) -> None:
    student = student_of(target, LAYERS, HEAD, WIDE)
    save_student(student, tmp_path, Draft("tiny", revision(folder), LAYERS, len(HEAD)), dtype)
    loaded = load_student(str(tmp_path), folder, dtype, attention=WIDE)
    tokens = torch.tensor([[5, 17, 80, 3]])
    for name, weight in student.own().items():
        assert torch.equal(loaded.own()[name], weight.to(getattr(torch, dtype)))
    assert torch.equal(loaded.ids, student.ids)
    if dtype == "float32":
        with torch.inference_mode():
            assert torch.equal(step(loaded, tokens), step(student, tokens))
    stored = load_file(tmp_path / "model.safetensors")
    assert folder not in (tmp_path / "config.json").read_text()
    assert not any("embed" in name for name in stored)
    assert not any(weight.requires_grad for weight in loaded.parameters())


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_draft_is_served_packed(arch: str, tmp_path: Path) -> None:
    home, out = str(tmp_path / "target"), tmp_path / "draft"
    tiny_model(home, arch=arch, layers=3)
    student = student_of(load_causal_lm(home, "float32", attention=WIDE), LAYERS, HEAD, WIDE)
    save_student(student, out, Draft("tiny", revision(home), LAYERS, len(HEAD)), "float32")
    lowest = torch.finfo(torch.float32).min
    loaded = load_student(str(out), home, "float32", outside=lowest)
    served = TransformersModel(loaded, 256, 4, exact=False)
    assert isinstance(loaded.model.get_output_embeddings(), PackedLinear)
    tokens = (5, 17, 80, 3, 200)
    rows = served.forward([Run(KV(served.pages).extend(len(tokens)), tokens, 0, len(tokens))])[0]
    with torch.inference_mode():
        wanted = step(student, torch.tensor([tokens]))[0].numpy()
    np.testing.assert_allclose(rows[:, list(HEAD)], wanted[:, list(HEAD)], rtol=1e-3, atol=1e-3)
    assert (rows[:, 1::2] == lowest).all()


# --- training ----------------------------------------------------------------------------------------


def test_the_distance_is_least_at_the_target() -> None:
    p = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
    slots, shares = torch.tensor([[0, 1, -1]]), p[:, :3]  # the third is outside the head, the fourth not kept
    q = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)  # the head: two of them, and one other
    wanted = -(0.5 * math.log(0.5) + 0.3 * math.log(0.3) + 0.2 * math.log(0.2))
    assert distance(q.log(), slots, shares).item() == pytest.approx(wanted)
    for other in ([0.6, 0.2, 0.2], [0.5, 0.2, 0.3], [0.4, 0.3, 0.3], [0.55, 0.35, 0.1]):
        assert distance(torch.tensor([other], dtype=torch.float64).log(), slots, shares).item() > wanted + 1e-3


@pytest.mark.parametrize("rows", [3, 128, 300])
def test_the_distance_and_its_gradient_are_those_of_the_formula(rows: int) -> None:
    made = torch.Generator().manual_seed(rows)
    slots = torch.randn(rows, 40, generator=made).argsort(-1)[:, :6] - 2  # now and then outside the head
    slots.clamp_(min=-1)
    shares = torch.randn(rows, 6, generator=made).softmax(-1) * 0.9
    few = 3.0 * torch.randn(rows, 40, generator=made)
    few[0, slots[0].clamp(min=0)] += 60.0  # nothing is left for the others

    def formula(logits: torch.Tensor) -> torch.Tensor:
        inside = slots >= 0
        p = shares * inside
        log_q = logits.log_softmax(-1).gather(1, slots.clamp(min=0))
        rest_q = (1 - (log_q.exp() * inside).sum(-1)).clamp(min=1e-6)
        return -((p * log_q).sum(-1) + (1 - p.sum(-1)) * rest_q.log()).mean()

    one, other = few.clone().requires_grad_(), few.clone().requires_grad_()
    found, wanted = distance(one, slots, shares), formula(other)
    found.backward()
    wanted.backward()
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-7)


def test_every_pass_over_the_data_sees_all_rows_once() -> None:
    plan = TrainPlan(10, None, 4, 7)
    seen = np.concatenate([rows_of(at, 10, plan) for at in range(5)])
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert (seen[:10] != seen[10:]).any()


def test_training_makes_the_draft_better(target: Any, shards: Path, tmp_path: Path) -> None:
    data, held = read_shards((shards, 6))
    ids = frequent(data, VOCAB, 200, (END,)).tolist()
    student = student_of(target, (1, 2), ids, WIDE)  # without the layer that decides most
    history = train(student, data, held, TrainPlan(60, None, 8, 0, learning_rate=3e-3), tmp_path)
    assert [history[0].step, history[-1].step] == [0, 60]
    assert history[-1].acceptance > history[0].acceptance + 0.08
    assert history[-1].overlap > history[0].overlap + 0.08
    slots = Slots(student)
    assert slots.of(student.ids.numpy()).tolist() == list(range(200))


def test_minutes_become_steps_by_the_clock(target: Any, shards: Path, tmp_path: Path) -> None:
    data, held = read_shards((shards, 2))
    times = iter(range(100))
    student = student_of(target, LAYERS, HEAD, WIDE)
    history = train(student, data, held, TrainPlan(None, 0.1, 2, 0), tmp_path, clock=lambda: float(next(times)))
    assert history[-1].step == 6  # of a second each


def test_broken_off_training_goes_on_to_the_same_bits(target: Any, shards: Path, tmp_path: Path) -> None:
    data, held = read_shards((shards, 2))
    plan = TrainPlan(60, None, 4, 3, learning_rate=2e-3)

    def cut(done: int, steps: int, history: list[Point]) -> None:
        if done == 40:  # between two checkpoints
            raise Cut

    whole = student_of(target, LAYERS, HEAD, WIDE)
    wanted = train(whole, data, held, plan, tmp_path / "whole")
    broken = student_of(target, LAYERS, HEAD, WIDE)
    with pytest.raises(Cut):
        train(broken, data, held, plan, tmp_path / "broken", cut)
    resumed = student_of(target, LAYERS, HEAD, WIDE)
    heard: list[int] = []
    found = train(resumed, data, held, plan, tmp_path / "broken", lambda done, steps, history: heard.append(done))
    assert heard[0] == 39 and heard[-1] == 60
    assert found == wanted
    for name, weight in whole.own().items():
        assert torch.equal(weight, resumed.own()[name])


def test_a_checkpoint_goes_with_its_training(target: Any, shards: Path, tmp_path: Path) -> None:
    data, held = read_shards((shards, 2))
    train(student_of(target, LAYERS, HEAD, WIDE), data, held, TrainPlan(2, None, 2, 0), tmp_path)
    with pytest.raises(InvalidRequest, match=r"another steps \(2, now 3\).*--no-resume"):
        train(student_of(target, LAYERS, HEAD, WIDE), data, held, TrainPlan(3, None, 2, 0), tmp_path)
    with pytest.raises(InvalidRequest, match="another student"):
        train(student_of(target, (1, 2), HEAD, WIDE), data, held, TrainPlan(2, None, 2, 0), tmp_path)


# --- the folder --------------------------------------------------------------------------------------


def test_a_draft_of_another_target_is_refused(draft: Path, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", layers=3, eos=END, seed=1)
    with pytest.raises(ModelRefused, match=f"made for tiny of revision .* is of revision {revision(other)}"):
        load_student(str(draft), other, "float32")


def _without_description(draft: Path) -> None:
    (draft / "draft.json").unlink()


def _without_config(draft: Path) -> None:
    (draft / "config.json").unlink()


def _without_weights(draft: Path) -> None:
    (draft / "model.safetensors").unlink()


def _cut_weights(draft: Path) -> None:
    path = draft / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _pickled(draft: Path) -> None:
    (draft / "model.safetensors").unlink()
    (draft / "pytorch_model.bin").write_bytes(b"\x80\x04.")


def _without_a_layer(draft: Path) -> None:
    _change(draft, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))


def _unordered(draft: Path) -> None:
    _change(draft, lambda tensors: tensors["draft.ids"][5:7].copy_(tensors["draft.ids"][5:7].flip(0)))


def _beyond_the_vocabulary(draft: Path) -> None:
    _change(draft, lambda tensors: tensors.update({"draft.ids": tensors["draft.ids"] + VOCAB}))


def _of_the_future(draft: Path) -> None:
    path = draft / "draft.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 9}))


def _with_another_head(draft: Path) -> None:
    path = draft / "draft.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"head": 100}))


def _broken_json(draft: Path) -> None:
    (draft / "draft.json").write_text("{")


def _change(draft: Path, edit: Any) -> None:
    tensors = load_file(draft / "model.safetensors")
    edit(tensors)
    save_file(tensors, draft / "model.safetensors")


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_without_description, "is no draft: it holds no draft.json"),
        (_broken_json, "describes no draft"),
        (_of_the_future, "format 9; this version reads format 1"),
        (_without_config, "no configuration"),
        (_without_weights, "no weights"),
        (_cut_weights, "is cut off"),
        (_pickled, "pickle"),
        (_without_a_layer, "lacks 'model.layers.1.mlp.up_proj.weight'"),
        (_unordered, "must be 128 ascending ids below 256"),
        (_beyond_the_vocabulary, "must be 128 ascending ids below 256"),
        (_with_another_head, r"shape \[128, 64\].*asks for \[100, 64\]"),
    ],
)
def test_a_harmed_draft_is_refused(draft: Path, folder: str, harm: Any, reason: str) -> None:
    load_student(str(draft), folder, "float32")
    harm(draft)
    with pytest.raises(ModelRefused, match=reason):
        load_student(str(draft), folder, "float32")


def test_the_licence_is_the_targets(folder: str, tmp_path: Path) -> None:
    assert licence_of(Path(folder)) is None
    (tmp_path / "config.json").write_text('{"license": "mit"}')
    assert licence_of(tmp_path) == "mit"
    (tmp_path / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\n")
    assert licence_of(tmp_path) == "apache-2.0"


def test_the_plot_ends_where_training_did() -> None:
    drawn = plot([Point(0, 0.0, 0.0), Point(50, 1.0, 0.5)], "a < b")
    assert drawn.count("<polyline") == 2 and "a &lt; b" in drawn and ">50<" in drawn
    assert 'points="56.0,316.0 704.0,46.0"' in drawn


# --- the command -------------------------------------------------------------------------------------


def _distill(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["distill", *arguments])


def test_the_command_makes_a_draft_and_goes_on(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    out = tmp_path / "out"
    asked = ["--target", folder, "--out", str(out), "--layers", "0,2", "--head", "100", "--tokens", "3000"]
    asked += ["--batch", "16", "--length", "96", "--rows", "4", "--steps", "6", "--dtype", "float32"]
    made = _distill(*asked)
    assert made.exit_code == 0, made.output
    assert "accepts" in made.output
    told = json.loads((out / "draft.json").read_text())
    assert told["target_revision"] == revision(folder) and told["layers"] == [0, 2] and told["head"] == 100
    assert told["evaluation"]["greedy"]["positions"] > 0 and told["evaluation"]["cost"] > 0
    card = (out / "README.md").read_text()
    assert revision(folder) in card and "100 of 256 ids" in card and "no benchmark prompts" in card
    assert (out / "acceptance.svg").read_text().startswith("<svg")
    weights = (out / "model.safetensors").read_bytes()
    monkeypatch.setattr(writing, "sample", None)  # nothing is written again
    assert _distill(*asked).exit_code == 0
    assert (out / "model.safetensors").read_bytes() == weights
    refused = _distill(*asked, "--seed", "1")
    assert refused.exit_code == 1 and "holds data made with seed 0" in refused.output
    refused = _distill(*asked, "--head", "90")
    assert refused.exit_code == 1 and "--no-resume" in refused.output
    afresh = _distill(*asked, "--head", "90", "--no-resume")
    assert afresh.exit_code == 0, afresh.output
    assert json.loads((out / "draft.json").read_text())["head"] == 90


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--layers", "0,9"], "cannot be taken of a target with 3"),
        (["--temperatures", "hot"], "numbers joined by commas"),
        (["--temperatures", "-1"], "numbers of 0 to 2"),
        (["--head", "100000"], "2 to 256 ids"),
        (["--length", "100000"], "do not fit a context of 512"),
        (["--length", "10"], "at least 20 tokens"),
        (["--learning-rate", "0"], "above 0 and at most 0.1"),
        (["--batch", "1"], "at least 2 conversations"),
        (["--steps", "1", "--minutes", "1"], "not both"),
        (["--target", "sim:pass=1ms"], "simulated"),
        (["--target", "./nowhere"], "there is no folder"),
    ],
)
def test_bad_values_end_in_one_line(folder: str, tmp_path: Path, arguments: list[str], reason: str) -> None:
    result = _distill("--target", folder, "--out", str(tmp_path / "out"), "--head", "64", *arguments)
    assert result.exit_code == 1
    assert reason in result.output and result.output.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_target_is_never_overwritten(folder: str, tmp_path: Path) -> None:
    result = _distill("--target", folder, "--out", folder)
    assert result.exit_code == 1 and "is the target itself" in result.output
    other = tiny_model(tmp_path / "other")
    result = _distill("--target", folder, "--out", other)
    assert result.exit_code == 1 and "holds a model that is no draft" in result.output


def test_an_interrupt_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(asked: Any, console: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "make_draft", interrupted)
    result = _distill("--target", "demo", "--out", str(tmp_path))
    assert result.exit_code == 130 and "the same command goes on from here" in result.output


def test_a_draft_is_served_beside_its_target_and_as_nothing_else(folder: str, draft: Path) -> None:
    """Its tokenizer and embeddings are the target's, its logits of the target's whole vocabulary."""
    about = draft / "draft.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "target": folder}))
    loaded = load(LoadOptions(str(draft), "float32"), draft=True, sequences=2)
    assert loaded.vocab_size == TextModel.load(folder).vocab_size
    tokens = tuple(range(5))
    logits = loaded.model.forward([Run(KV(loaded.model.pages).extend(5), tokens, 0, 5)])[0]
    student = load_student(str(draft), folder, "float32", attention="eager")
    with torch.inference_mode():
        expected = student(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    np.testing.assert_allclose(logits, expected.numpy(), rtol=1e-4, atol=1e-4)
    with pytest.raises(ModelRefused, match="is a draft that `forerun distill` made; serve its target"):
        load(LoadOptions(str(draft), "float32"), draft=False, sequences=2)
    with pytest.raises(ModelRefused, match="takes neither --tp nor --layers"):
        load(LoadOptions(str(draft), "float32", layers=1), draft=True, sequences=2)
