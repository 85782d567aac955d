"""A distilled draft in transformers' own assisted generation, to compare with: same guesses, the library's loop."""

from __future__ import annotations

import pytest
import torch
from models import tiny_model

from forerun.commands.measure import Prompt
from forerun.commands.reference import FAR, Aid, Reference
from forerun.commands.runs import Decoding
from forerun.runtime.distill.draft import Draft
from forerun.runtime.distill.student import expanded, load_student, save_student, student_of
from forerun.runtime.distill.wide import WIDE
from forerun.runtime.models import load_causal_lm, revision

VOCAB = 256
HEAD = tuple(range(0, VOCAB, 2))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("target"), layers=3)


@pytest.fixture(scope="module")
def draft(target: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("draft")
    student = student_of(load_causal_lm(target, "float32", attention=WIDE), (0, 2), HEAD, WIDE)
    save_student(student, out, Draft("tiny", revision(target), (0, 2), len(HEAD)), "float32")
    return str(out)


def test_a_draft_with_a_whole_head_says_what_it_said(target: str, draft: str) -> None:
    tokens = torch.arange(3, 11)[None]
    with torch.inference_mode():
        said = load_student(draft, target, "float32", attention="sdpa", outside=FAR)(input_ids=tokens).logits
        whole = expanded(load_student(draft, target, "float32", attention="sdpa", outside=FAR))(tokens).logits
    assert whole.shape == (1, 8, VOCAB)
    torch.testing.assert_close(whole, said)
    assert bool((whole[..., 1::2] == FAR).all())


async def test_assisted_generation_says_the_same_in_fewer_passes(target: str, draft: str) -> None:
    reference = Reference(Decoding(24, 0.0, 0, ignore_eos=True))
    prompt = Prompt(1, "", "Once upon a time", True)
    try:
        await reference.load(target, "float32", 1, [], draft)
        plain = await reference.answer(prompt, 24)
        assisted = await reference.answer(prompt, 24, Aid.DRAFT)
    finally:
        reference.close()
    assert plain.token_ids == assisted.token_ids
    assert plain.passes == 24
    assert assisted.passes < 24
