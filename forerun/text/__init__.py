"""Text in and text out: tokenizer, chat template, incremental decoding, stop strings. Needs no torch."""

from forerun.text.answer import AnswerText, Piece
from forerun.text.detokenizer import Detokenizer
from forerun.text.model import TextModel
from forerun.text.stops import StopScanner

__all__ = ["AnswerText", "Detokenizer", "Piece", "StopScanner", "TextModel"]
