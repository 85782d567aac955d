"""What a chat template writes around the turns of a conversation, as tokens. Knows text, no model."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.core.errors import ModelRefused
from forerun.text import TextModel

_MARKS = ("FIRSTQUESTION", "FIRSTANSWER", "SECONDQUESTION")


@dataclass(frozen=True, slots=True)
class Turns:
    """Text of a conversation: opening, question, to_answer, answer, to_question, question, to_answer, ..."""

    opening: tuple[int, ...]
    to_answer: tuple[int, ...]
    to_question: tuple[int, ...]
    ends: tuple[int, ...]  # end tokens of the model

    @classmethod
    def of(cls, text: TextModel) -> Turns:
        """Raises ModelRefused: no chat template, or one that does not put turns one after the other."""
        if not text.has_chat_template:
            raise ModelRefused("the target has no chat template, and the data of a draft are made from it")
        roles = ("user", "assistant", "user")
        rest = text.render_chat(list(zip(roles, _MARKS, strict=True)))
        pieces = []
        for mark in _MARKS:
            piece, found, rest = rest.partition(mark)
            if not found:
                raise ModelRefused("the target's chat template does not write the turns of a conversation in order")
            pieces.append(tuple(text.vocabulary.encode(piece, add_special_tokens=False)))
        opening, to_answer, to_question = pieces
        if not opening or not to_answer or not to_question:
            raise ModelRefused("the target's chat template writes nothing between turns, so none would end")
        return cls(opening, to_answer, to_question, text.eos_token_ids)
