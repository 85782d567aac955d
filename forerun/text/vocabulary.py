"""Token ids and the text of each: a real tokenizer, or a made-up one for simulated models.

A vocabulary encodes text and joins tokens. It does not know what may be shown already, which tokens
end an answer, or how many of the ids a model's tables hold.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from forerun.core.errors import ModelRefused

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Vocabulary(Protocol):
    """What the rest of this package asks of a tokenizer."""

    @property
    def size(self) -> int:
        """One more than the largest id."""

    @property
    def longest(self) -> int | None:
        """Bytes of text that one token can stand for at most; None: no limit."""

    @property
    def special(self) -> frozenset[int]:
        """Ids that are not text."""

    @property
    def byte_tokens(self) -> Mapping[int, int]:
        """Byte by id of the tokens that stand for one byte (byte fallback), if there are any."""

    def __contains__(self, token_id: int) -> bool: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def join(self, token_ids: Sequence[int]) -> str:
        """The text that begins with these tokens, special ones included. Unknown ids have none."""


class TokenizerFile:
    """tokenizer.json, corrected as transformers 5 does: tokens that the configuration names are special.

    Which of them a prompt begins with is tokenizer.json's to say; `add_bos_token` of the configuration is not.
    """

    __slots__ = ("_tokenizer", "byte_tokens", "longest", "size", "special")

    def __init__(self, path: Path, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
        """Raises ModelRefused if the file is missing or no tokenizer."""
        if not path.is_file():
            raise ModelRefused(f"{path} is missing; convert a tokenizer of another format to tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
            _correct(tokenizer, config, named)
        except Exception as error:  # the library raises nothing narrower
            raise ModelRefused(f"{path} is not a tokenizer: {error}") from error
        self._tokenizer = tokenizer
        self.size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.longest = _longest(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(i for i in added if self.join([i]) != tokenizer.decode([i], skip_special_tokens=True))
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        found = {tokenizer.token_to_id(name): (name, byte) for name, byte in names.items()}
        self.byte_tokens: Mapping[int, int] = {
            i: byte for i, (name, byte) in found.items() if i is not None and self.join([i]) != name
        }

    def __contains__(self, token_id: int) -> bool:
        return self._tokenizer.id_to_token(token_id) is not None

    def id_of(self, token: str) -> int | None:
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def join(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def _correct(tokenizer: Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    tokenizer.no_truncation()  # a saved limit would cut prompts silently
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder()
    for token in [*named.values(), *_extra_tokens(config)]:
        token_id = tokenizer.token_to_id(token)
        if token_id is not None and not (token_id in added and added[token_id].special):
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])


def _extra_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        entries = config.get(key) or ()
        for entry in entries.values() if isinstance(entries, Mapping) else entries:
            token = token_text(entry)
            if token is not None:
                yield token


def token_text(entry: object) -> str | None:
    """A token in a configuration file is its text, or an object with its `content`."""
    if isinstance(entry, Mapping):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _longest(tokenizer: Tokenizer) -> int | None:
    """Only where every byte of a text has to be covered by tokens: BPE that has no token for the unknown."""
    model = tokenizer.model
    if not isinstance(model, BPE) or (model.unk_token is not None and not model.byte_fallback):
        return None
    return max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)


class WordVocabulary:
    """Of a simulated model: id i is the word "wi". Encoding is total: any other word is hashed to an id."""

    __slots__ = ("byte_tokens", "longest", "size", "special")

    _WORD = re.compile(r"w(0|[1-9][0-9]{0,9})", re.ASCII)

    def __init__(self, size: int) -> None:
        self.size = size
        self.longest: int | None = None
        self.special: frozenset[int] = frozenset()
        self.byte_tokens: Mapping[int, int] = {}

    def __contains__(self, token_id: int) -> bool:
        return 0 <= token_id < self.size

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [self._id_of(word) for word in text.split()]

    def join(self, token_ids: Sequence[int]) -> str:
        return "".join(f"w{token_id} " for token_id in token_ids if token_id in self)

    def _id_of(self, word: str) -> int:
        named = self._WORD.fullmatch(word)
        if named and int(named[1]) < self.size:
            return int(named[1])
        return zlib.crc32(word.encode("utf-8", "surrogatepass")) % self.size
