"""forerun.text against the tokenizers and transformers libraries, and stop strings against a slow oracle."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from forerun.core.errors import InvalidRequest, ModelRefused
from forerun.text import AnswerText, Detokenizer, StopScanner, TextModel
from forerun.text.detokenizer import LOST
from tests.models import tiny_model

SENTENCES = [
    "The quick brown fox jumps over the lazy dog, and then it is done.",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))",
    "나는 학교에 갑니다. 오늘은 날씨가 좋습니다.",
    "今天天气很好，我们去公园吧。",  # noqa: RUF001
    "שלום עולם, מה שלומך היום?",
    "Grüße aus Köln — naïve café, 100 €",
    "👨‍👩‍👧‍👦 family, 🇩🇪🇰🇷 flags, 👍🏽 thumb, 🏳️‍🌈 and ☃️",
]
TEXTS = [
    *SENTENCES,
    " one space",
    "  two spaces",
    "trailing space ",
    "a\n\nb\n \n c",
    "\t tabs\tand  gaps   here",
    "x" * 40,
    "",
]
CUT = "<cut here>"  # a token that no test feeds
LLAMA_SPECIALS = ["<unk>", "<s>", "</s>"]
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        SENTENCES[:2] * 20 + SENTENCES,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def _with_byte_tokens(prefix: str | None) -> Tokenizer:
    """A SentencePiece BPE as Llama (prefix "▁") and Gemma (no prefix) have it; Latin only, the rest is bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    alphabet = [*map(chr, range(33, 127)), "▁"]
    trainer = trainers.BpeTrainer(vocab_size=180, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(SENTENCES[:1] * 5, trainer)
    learned = json.loads(trained.to_str())["model"]
    names = [*LLAMA_SPECIALS, *[f"<0x{byte:02X}>" for byte in range(256)], *learned["vocab"], "▁▁", CUT]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    merges = [*[tuple(merge) for merge in learned["merges"]], ("▁", "▁")]
    spaces = normalizers.Replace(" ", "▁")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(prefix), spaces]) if prefix else spaces
    parts: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    tokenizer.add_special_tokens(LLAMA_SPECIALS)
    return tokenizer


def llama() -> Tokenizer:
    tokenizer = _with_byte_tokens("▁")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def gemma() -> Tokenizer:
    return _with_byte_tokens(None)


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES * 3, trainer)
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def end_of_word() -> Tokenizer:
    """The first GPT's: a token's text depends on whether another follows."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>"], end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def no_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 3}, unk_token="<unk>"))


BUILDERS: list[Callable[[], Tokenizer]] = [byte_level, llama, gemma, metaspace, word_piece, end_of_word, no_decoder]


def write_folder(folder: Path, tokenizer: Tokenizer | None, **files: Any) -> Path:
    """`files` by name without extension; config.json is given a context limit unless stated."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {"config": {"max_position_embeddings": 256}, **files}.items():
        if name == "chat_template":
            (folder / "chat_template.jinja").write_text(content, encoding="utf-8")
        elif content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@dataclass(frozen=True)
class Made:
    """A tokenizer of the library and what was loaded from its folder."""

    name: str
    tokenizer: Tokenizer
    model: TextModel

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    built: dict[str, Made] = {}
    for build in BUILDERS:
        tokenizer = build()
        folder = write_folder(tmp_path_factory.mktemp(build.__name__), tokenizer)
        built[build.__name__] = Made(build.__name__, tokenizer, TextModel.load(str(folder)))
    return built


def chunks(ids: Sequence[int], cuts: Sequence[int]) -> Iterator[Sequence[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    for start, end in pairwise(edges):
        yield ids[start:end]


def streamed(model: TextModel, parts: Iterator[Sequence[int]] | Sequence[Sequence[int]]) -> list[str]:
    detokenizer = Detokenizer(model)
    return [*[detokenizer.feed(part) for part in parts], detokenizer.flush()]


# --- decoding -----------------------------------------------------------------------------------


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_is_the_decoded_text(made: dict[str, Made], build: Callable[[], Tokenizer], text: str) -> None:
    it = made[build.__name__]
    ids = it.tokenizer.encode(text).ids
    assert it.model.encode(text) == ids
    whole = it.decode(ids)
    assert it.model.decode(ids) == whole
    for size in (1, 2, 3, 7):
        assert "".join(streamed(it.model, [ids[at : at + size] for at in range(0, len(ids), size)])) == whole
    for cut in range(len(ids) + 1):
        assert "".join(streamed(it.model, [ids[:cut], ids[cut:]])) == whole


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma"])
@pytest.mark.parametrize("text", TEXTS)
def test_characters_are_never_halved_and_never_late(made: dict[str, Made], name: str, text: str) -> None:
    it = made[name]
    ids = it.tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(it.model)
    shown = ""
    for count, token in enumerate(ids, start=1):
        shown += detokenizer.feed([token])
        assert LOST not in shown
        # all that is whole has been shown: the library's text of the same ids, less a broken end
        assert shown == it.decode(ids[:count]).rstrip(LOST) or name != "byte_level"
        assert text.startswith(shown)
    assert shown == text == shown + detokenizer.flush()


def test_byte_tokens_show_each_character_with_its_last_byte(made: dict[str, Made]) -> None:
    it = made["llama"]
    ids = it.tokenizer.encode("\n\n今天👍", add_special_tokens=False).ids[1:]  # without the prefix "▁"
    assert [it.model.vocabulary.byte_tokens[i] for i in ids] == list("\n\n今天👍".encode())
    parts = ["\n", "\n", "", "", "今", "", "", "天", "", "", "", "👍", ""]
    assert streamed(it.model, [[i] for i in ids]) == parts


@pytest.mark.parametrize("name", ["byte_level", "metaspace", "word_piece", "end_of_word", "no_decoder"])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_ids_decode_as_the_library_does(made: dict[str, Made], name: str, data: st.DataObject) -> None:
    it = made[name]
    ids = data.draw(st.lists(st.integers(0, it.model.vocabulary.size + 3), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40), max_size=6))
    assert "".join(streamed(it.model, chunks(ids, cuts))) == it.decode(ids) == it.model.decode(ids)
    assert it.model.decode(ids, skip_special_tokens=False) == it.tokenizer.decode(ids, skip_special_tokens=False)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_bytes_of_a_byte_level_tokenizer_decode_as_the_library_does(
    made: dict[str, Made], data: st.DataObject
) -> None:
    it = made["byte_level"]
    piece = st.one_of(st.binary(max_size=5), st.text(max_size=3).map(lambda text: text.encode("utf-8", "ignore")))
    raw = b"".join(data.draw(st.lists(piece, max_size=15)))
    letters = {byte: chr(byte) for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    others = iter(range(256, 512))
    letters |= {byte: chr(next(others)) for byte in range(256) if byte not in letters}
    ids = [it.tokenizer.token_to_id(letters[byte]) for byte in raw]
    assert it.decode(ids) == raw.decode("utf-8", "replace")
    cuts = data.draw(st.lists(st.integers(0, 60), max_size=6))
    assert "".join(streamed(it.model, chunks(ids, cuts))) == it.decode(ids)


def repaired(it: Made, ids: Sequence[int]) -> str:
    """What the library decodes if each run of byte tokens keeps the characters before its first broken byte.

    The slow oracle for byte fallback: such a run is cut there with a token that is taken out again.
    """
    marker = it.tokenizer.token_to_id(CUT)
    kept = [i for i in ids if i not in it.model.vocabulary.special and i < it.model.vocabulary.size]
    separated: list[int] = []
    run: list[int] = []
    for token in [*kept, marker]:
        if token in it.model.vocabulary.byte_tokens:
            run.append(token)
            continue
        data = bytes(it.model.vocabulary.byte_tokens[i] for i in run)
        try:
            data.decode()
            separated += run
        except UnicodeDecodeError as error:
            separated += [*run[: error.start], marker, *run[error.start :]]
        run = []
        separated.append(token)
    return it.decode(separated[:-1]).replace(CUT, "")


@pytest.mark.parametrize("name", ["llama", "gemma"])
@given(data=st.data())
@settings(max_examples=250, deadline=None)
def test_any_ids_of_a_byte_fallback_tokenizer(made: dict[str, Made], name: str, data: st.DataObject) -> None:
    it = made[name]
    byte_of = it.model.vocabulary.byte_tokens
    by_byte = {byte: i for i, byte in byte_of.items()}
    piece = st.one_of(
        st.binary(min_size=1, max_size=4).map(lambda raw: [by_byte[byte] for byte in raw]),
        st.text(max_size=3).map(lambda text: [by_byte[byte] for byte in text.encode("utf-8", "ignore")]),
        st.lists(st.integers(0, it.model.vocabulary.size + 3), max_size=3),
        st.sampled_from([[it.tokenizer.token_to_id(token)] for token in ("▁", "▁▁", "▁the", "a")]),
    )
    ids = [i for part in data.draw(st.lists(piece, max_size=12)) for i in part if it.tokenizer.id_to_token(i) != CUT]
    cuts = data.draw(st.lists(st.integers(0, 60), max_size=6))
    text = "".join(streamed(it.model, chunks(ids, cuts)))
    assert text == it.model.decode(ids) == repaired(it, ids)
    if LOST not in text:
        assert text == it.decode(ids)


def test_a_broken_end_appears_at_the_flush_as_the_library_decodes_it(made: dict[str, Made]) -> None:
    for name in ("byte_level", "llama"):
        it = made[name]
        ids = it.tokenizer.encode("ok 👍", add_special_tokens=False).ids[:-1]
        parts = streamed(it.model, [[i] for i in ids])
        assert LOST not in "".join(parts[:-1])
        assert LOST in parts[-1]
        assert "".join(parts) == it.decode(ids)
    it = made["byte_level"]
    ids = it.tokenizer.encode(f"real {LOST}").ids
    assert "".join(streamed(it.model, [ids])) == f"real {LOST}" == it.model.decode(ids)


def test_leading_spaces_of_chunks_survive(made: dict[str, Made]) -> None:
    for name in ("llama", "metaspace"):
        it = made[name]
        for first in ("▁", "▁▁", "▁the"):
            word = it.tokenizer.token_to_id("▁the")
            start = it.tokenizer.token_to_id(first)
            if start is None:
                continue
            assert word is not None
            ids = [start, *[word] * 12]
            parts = streamed(it.model, [[i] for i in ids])
            assert parts[1:-1] == [" the"] * 12
            assert "".join(parts) == it.decode(ids)


def test_special_tokens_are_hidden_and_do_not_disturb_their_neighbours(made: dict[str, Made]) -> None:
    it = made["byte_level"]
    end = it.tokenizer.token_to_id("<|im_end|>")
    ids = it.tokenizer.encode("今").ids
    assert len(ids) > 1
    assert "".join(streamed(it.model, [[end], ids[:1], [end], ids[1:], [end]])) == "今"
    assert it.model.decode([end], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.parametrize(
    ("name", "token"), [("byte_level", "a"), ("llama", "<0xFF>"), ("llama", "<0x0A>"), ("llama", "▁"), ("llama", "<s>")]
)
def test_a_token_costs_the_same_late_in_an_answer(made: dict[str, Made], name: str, token: str) -> None:
    """Counted, not timed: how many tokens each step joins again."""
    it = made[name]
    joined: list[int] = []

    class Counting:
        def __getattr__(self, attribute: str) -> Any:
            return getattr(it.model.vocabulary, attribute)

        def __contains__(self, token_id: int) -> bool:
            return token_id in it.model.vocabulary

        def join(self, ids: Sequence[int]) -> str:
            joined.append(len(ids))
            return it.model.vocabulary.join(ids)

    detokenizer = Detokenizer(replace(it.model, vocabulary=Counting()))
    broken = [it.tokenizer.encode("今").ids[-1]] if name == "byte_level" else []
    for _ in range(300):
        detokenizer.feed([it.tokenizer.token_to_id(token), *broken])
    assert max(joined, default=0) <= 9
    detokenizer = Detokenizer(replace(it.model, vocabulary=Counting()))
    for _ in range(300):
        detokenizer.feed(broken)  # nothing but broken bytes
    assert max(joined, default=0) <= 9


# --- stop strings -------------------------------------------------------------------------------


def oracle(text: str, stops: Sequence[str]) -> tuple[str, str | None, int | None]:
    """(text before the match, the stop, where it ends): earliest end, then longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest, end
    return text, None, None


def scan(stops: Sequence[str], parts: Sequence[str]) -> tuple[str, str | None, int | None]:
    scanner = StopScanner(stops)
    text = ""
    for part in parts:
        released, stop = scanner.feed(part)
        text += released
        assert stop == scanner.stop
    return text + scanner.flush(), scanner.stop, scanner.consumed_at_match


def all_cuts(text: str) -> Iterator[list[str]]:
    if not text:
        yield []
    for end in range(1, len(text) + 1):
        for rest in all_cuts(text[end:]):
            yield [text[:end], *rest]


@given(st.text("ab", max_size=7), st.lists(st.text("ab", min_size=1, max_size=4), max_size=4))
@settings(max_examples=300, deadline=None)
def test_stops_match_as_the_oracle_says_under_every_cut(text: str, stops: list[str]) -> None:
    expected = oracle(text, stops)
    for parts in all_cuts(text):
        assert scan(stops, parts) == expected
        assert scan(stops[::-1], parts) == expected


@given(st.text("abc\n", max_size=60), st.lists(st.text("abc\n", min_size=1, max_size=8), max_size=6), st.data())
@settings(max_examples=200, deadline=None)
def test_stops_hold_back_no_more_and_no_less_than_needed(text: str, stops: list[str], data: st.DataObject) -> None:
    scanner = StopScanner(stops)
    fed = released = ""
    for char in text:
        fed += char
        out, stop = scanner.feed(char)
        released += out
        if stop is not None:
            break
        held = fed.removeprefix(released)
        assert fed == released + held
        longest = next((n for n in range(len(fed), 0, -1) if any(s.startswith(fed[-n:]) for s in stops)), 0)
        assert len(held) == longest
    assert (released + scanner.flush(), scanner.stop, scanner.consumed_at_match) == oracle(text, stops)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["\n\n"], "one\n\ntwo", ("one", "\n\n", 5)),
        (["b", "ab"], "xxabxx", ("xx", "ab", 4)),
        (["ab", "b"], "xxabxx", ("xx", "ab", 4)),
        (["late", "ear"], "so early, so late", ("so ", "ear", 6)),
        (["abcd", "bc"], "abcd", ("a", "bc", 3)),
        (["abcx", "c"], "abcd", ("ab", "c", 3)),
        (["aab"], "aaab", ("a", "aab", 4)),
        (["stop"], "sto stopp", ("sto ", "stop", 8)),
        (["stop"], "no sto", ("no sto", None, None)),
        (["👍🏽"], "a👍👍🏽", ("a👍", "👍🏽", 4)),
        ([], "anything", ("anything", None, None)),
    ],
)
def test_stop_table(stops: list[str], text: str, expected: tuple[str, str | None, int | None]) -> None:
    assert scan(stops, [text]) == scan(stops, list(text)) == expected


def test_nothing_is_released_after_a_match() -> None:
    scanner = StopScanner(["x"])
    assert scanner.feed("axb") == ("a", "x")
    assert scanner.feed("more") == ("", "x")
    assert scanner.flush() == ""
    assert scanner.consumed_at_match == 2


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 1 character"):
        StopScanner(["a", ""])


def test_a_long_stop_string_that_nearly_matches_all_the_time_is_cheap() -> None:
    scanner = StopScanner(["a" * 20_000 + "b"] * 4)
    started = time.process_time()
    for _ in range(500):
        scanner.feed("a" * 100)
    assert time.process_time() - started < 2  # a rescan of the held text would take minutes


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma"])
@pytest.mark.parametrize("stop", ["\n\n", " b", "return", "tur", "):\n    r", "print(add(1", "zzz"])
def test_an_answer_ends_with_the_token_that_completes_the_stop(made: dict[str, Made], name: str, stop: str) -> None:
    it = made[name]
    text = SENTENCES[1]
    ids = it.tokenizer.encode(text, add_special_tokens=False).ids
    before, matched, end = oracle(text, [stop])
    lengths = [len(it.decode(ids[:count])) for count in range(len(ids) + 1)]
    used = next(count for count, length in enumerate(lengths) if length >= end) if end is not None else len(ids)
    for size in (1, 2, 3, 8, len(ids)):
        answer = AnswerText(it.model, [stop, "never"])
        shown, taken = "", 0
        for at in range(0, len(ids), size):
            piece = answer.feed(ids[at : at + size])
            shown += piece.text
            taken += piece.tokens_used
            assert before.startswith(shown)
            if piece.stop is not None:
                assert piece.stop == matched
                break
        shown += answer.flush()
        assert (shown, answer.stop, taken) == (before, matched, used)
    if matched is not None:
        piece = answer.feed(ids)
        assert (piece.text, piece.tokens_used, piece.stop) == ("", 0, matched)


def test_held_text_is_released_when_the_answer_ends(made: dict[str, Made]) -> None:
    it = made["byte_level"]
    answer = AnswerText(it.model, ["stop"])
    ids = it.tokenizer.encode("do not sto").ids
    piece = answer.feed(ids)
    assert (piece.text, piece.tokens_used, piece.stop) == ("do not ", len(ids), None)
    assert (answer.flush(), answer.flush(), answer.stop) == ("sto", "", None)


def test_half_a_character_at_the_end_may_complete_a_stop(made: dict[str, Made]) -> None:
    it = made["byte_level"]
    answer = AnswerText(it.model, [f"k{LOST}"])
    piece = answer.feed(it.tokenizer.encode("ok👍").ids[:-1])
    assert (piece.text, piece.stop) == ("o", None)
    assert (answer.flush(), answer.stop) == ("", f"k{LOST}")


# --- loading ------------------------------------------------------------------------------------


def test_the_vocabulary_ends_where_padding_begins(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens(["<extra>"])
    real = tokenizer.get_vocab_size()
    for padded in (real + 70, None):
        config = {"vocab_size": padded, "max_position_embeddings": 64}
        assert TextModel.load(str(write_folder(tmp_path, tokenizer, config=config))).vocab_size == real
    smaller = {"text_config": {"vocab_size": real - 1, "n_positions": 32}}  # the model has no row for the last one
    model = TextModel.load(str(write_folder(tmp_path, tokenizer, config=smaller)))
    assert (model.vocab_size, model.context_limit) == (real - 1, 32)


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        ({"eos_token_id": [2, 1, 2]}, {"eos_token_id": 0}, {"eos_token": "<|endoftext|>"}, (2, 1)),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, {}, (2,)),
        ({}, {"eos_token_id": 0}, {"eos_token": "<|im_end|>"}, (0,)),
        (None, {"text_config": {"eos_token_id": [1]}}, {}, (1,)),
        ({"eos_token_id": None}, {"eos_token_id": 50256}, {"eos_token": {"content": "<|im_end|>"}}, (2,)),
        (None, {}, {"eos_token": "<absent>"}, ()),
    ],
)
def test_end_tokens(tmp_path: Path, generation: Any, config: Any, tokenizer: Any, expected: tuple[int, ...]) -> None:
    folder = write_folder(
        tmp_path,
        byte_level(),
        config={"max_position_embeddings": 8, **config},
        generation_config=generation,
        tokenizer_config=tokenizer,
    )
    assert TextModel.load(str(folder)).eos_token_ids == expected


def test_context_limit_may_come_from_the_tokenizer_but_must_come(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, no_decoder(), config={}, tokenizer_config={"model_max_length": 77})
    assert TextModel.load(str(folder)).context_limit == 77
    write_folder(folder, None, config={}, tokenizer_config={"model_max_length": 10**30})
    with pytest.raises(ModelRefused, match="max_position_embeddings"):
        TextModel.load(str(folder))


def test_a_saved_limit_does_not_cut_prompts(tmp_path: Path) -> None:
    tokenizer = byte_level()
    whole = tokenizer.encode(SENTENCES[0]).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=300)
    assert TextModel.load(str(write_folder(tmp_path, tokenizer))).encode(SENTENCES[0]) == whole


def test_refused_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="not a folder on this machine"):
        TextModel.load(str(tmp_path / "absent"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelRefused, match=r"config\.json is not JSON"):
        TextModel.load(str(tmp_path))
    write_folder(tmp_path, None)
    with pytest.raises(ModelRefused, match=r"tokenizer\.json is missing"):
        TextModel.load(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelRefused, match=r"tokenizer\.json is not a tokenizer"):
        TextModel.load(str(tmp_path))


def test_a_hub_id_fetches_the_small_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def fetch(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(write_folder(tmp_path, no_decoder()))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert TextModel.load("some/model").context_limit == 256
    assert asked[0][0] == "some/model"
    assert not [name for name in asked[0][1] if "*" in name or "safetensors" in name]

    def fail(repo_id: str, allow_patterns: list[str]) -> str:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelRefused, match=r"'some/model' is not a folder here.*tokenizer.json.*no route"):
        TextModel.load("some/model")


# --- chat and special tokens, against transformers ----------------------------------------------

CHATS = [
    [("user", "hi")],
    [("system", "be brief"), ("user", "what's <b>1 & 2</b>?"), ("assistant", " 3 "), ("user", "今天 👍")],
    [("user", "text of a special token: <|im_end|> and <|im_start|>system")],
]
TEMPLATES = [
    CHATML,
    """{{ bos_token }}
{% for m in messages %}
    {%- if m.role == 'system' %}
{{ m.content | tojson }}
    {% else %}
[{{ m['role'].upper() }}] {{ m.content.strip() }}{{ eos_token }}
    {% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{% if tools is not none or documents is not none %}tools{% endif %}
{% set ns = namespace(n=0) %}{% generation %}{% set ns.n = 2 %}{{ ns.n }}{% endgeneration %}
{{ strftime_now('%Y') }}{{ {'b': [1, 'é<'], 'a': none} | tojson(indent=2) }}
{% if add_generation_prompt %}>{% endif %}""",
]
NAMED = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("place", ["string", "list", "jinja"])
@pytest.mark.parametrize("ends", [{}, {"add_bos_token": True, "add_eos_token": False}, {"add_eos_token": True}])
def test_prompts_are_those_of_transformers(tmp_path: Path, template: str, place: str, ends: dict[str, bool]) -> None:
    transformers = pytest.importorskip("transformers")
    stored: Any = template if place == "string" else "other"
    if place == "list":
        stored = [{"name": "tool_use", "template": "other"}, {"name": "default", "template": template}]
    tokenizer = byte_level()
    if "add_bos_token" not in ends:
        tokenizer.post_processor = processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    folder = write_folder(tmp_path, tokenizer, tokenizer_config={**NAMED, **ends, "chat_template": stored})
    if place == "jinja":
        write_folder(folder, None, chat_template=template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    model = TextModel.load(str(folder))
    assert model.has_chat_template
    for chat in CHATS:
        messages = [{"role": role, "content": content} for role, content in chat]
        rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert model.render_chat(chat) == rendered
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert model.encode_chat(chat) == ids
    for text in [*TEXTS, "<|im_start|>a<|im_end|>"]:
        assert model.encode(text) == theirs(text)["input_ids"]


def test_tokens_named_in_the_configuration_are_special(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "<x>": 2, "<y>": 3, "?": 4}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([AddedToken("<y>", special=False)])
    folder = write_folder(
        tmp_path,
        tokenizer,
        special_tokens_map={"eos_token": {"content": "</s>"}},
        tokenizer_config={"extra_special_tokens": ["<x>"], "eos_token": "</s>", "add_bos_token": True},
    )
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    model = TextModel.load(str(folder))
    ids = [0, 1, 2, 3, 0]
    assert model.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a <y> a"
    assert model.eos_token_ids == (1,)
    assert model.encode("a</s>a") == theirs("a</s>a")["input_ids"] == [0, 1, 0]


def test_a_prompt_may_have_no_tokens_or_just_a_start_token(made: dict[str, Made]) -> None:
    assert made["byte_level"].model.encode("") == []
    assert made["llama"].model.encode("") == [1]


def test_templates_refuse_with_their_own_message(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    model = TextModel.load(str(folder))
    assert not model.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template; send text"):
        model.encode_chat([("user", "hi")])
    cases = {
        "{{ raise_exception('roles must alternate') }}": "roles must alternate",
        "{{ messages[0].nothing.at_all }}": "nothing",
        "{{ 1 / 0 }}": "ZeroDivisionError",
        "{{ messages.append(1) }}": "unsafe|not safely|append",
        "{{ ''.__class__.__mro__ }}": "unsafe|__class__",
    }
    for template, message in cases.items():
        model = TextModel.load(str(write_folder(folder, None, chat_template=template)))
        with pytest.raises(InvalidRequest, match=message):
            model.render_chat([("user", "hi")])
        with pytest.raises(InvalidRequest, match="at least 1 message"):
            model.render_chat([])
    with pytest.raises(ModelRefused, match="does not compile"):
        TextModel.load(str(write_folder(folder, None, chat_template="{% if %}")))


# --- simulated models ---------------------------------------------------------------------------


def test_simulated_models_parse_their_keys() -> None:
    model = TextModel.load("sim:")
    assert (model.vocab_size, model.context_limit, model.eos_token_ids) == (1000, 4096, ())
    assert not model.has_chat_template
    model = TextModel.load("sim:step=0.01, vocab=50,context=128")
    assert (model.vocab_size, model.context_limit) == (50, 128)
    for wrong in ("sim:vocab=0", "sim:vocab=many", "sim:context=-1", "sim:vocab"):
        with pytest.raises(ModelRefused, match=wrong.split(":")[1].split("=")[0]):
            TextModel.load(wrong)


@given(st.text(max_size=60), st.lists(st.integers(0, 49), max_size=20), st.lists(st.integers(0, 20), max_size=4))
def test_simulated_text_is_total_and_concatenates(text: str, ids: list[int], cuts: list[int]) -> None:
    model = TextModel.load("sim:vocab=50")
    encoded = model.encode(text)
    assert encoded == TextModel.load("sim:vocab=50").encode(text)
    assert all(0 <= token < 50 for token in encoded)
    assert model.decode(ids) == "".join(f"w{token} " for token in ids)
    assert model.encode(model.decode(ids)) == ids
    assert "".join(streamed(model, chunks(ids, cuts))) == model.decode(ids)


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level(), chat_template=CHATML)
    code = (
        "import sys; from forerun.text import TextModel; m = TextModel.load(sys.argv[1]); "
        "m.decode(m.encode_chat([('user', 'hi')])); "
        "print([n for n in ('torch', 'transformers', 'grpc', 'ray') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_bound_on_the_bytes_of_a_prompt_only_where_it_is_certain(tmp_path: Path) -> None:
    assert TextModel.load("sim:").vocabulary.longest is None
    words = tmp_path / "words"
    tiny_model(words)  # a token is a character; the unknown have a token of their own
    assert TextModel.load(str(words)).vocabulary.longest is None
