"""What a model is to text: its vocabulary, its limits, its end tokens, its chat template.

Read from the small files of a model folder, so that the coordinator and the client need neither
torch nor transformers. It does not know weights or engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.core.errors import InvalidRequest, ModelRefused
from forerun.text.chat import ChatTemplate
from forerun.text.detokenizer import Detokenizer
from forerun.text.files import locate, read_json
from forerun.text.vocabulary import NAMED_TOKENS, TokenizerFile, Vocabulary, WordVocabulary, token_text

SIMULATED = "sim:"
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length")


@dataclass(frozen=True, slots=True)
class TextModel:
    """Immutable and shared by all requests."""

    vocabulary: Vocabulary
    vocab_size: int  # ids from here up are padding of the model's tables, or unknown to the model
    eos_token_ids: tuple[int, ...]
    context_limit: int  # tokens, prompt and answer
    chat_template: ChatTemplate | None = None

    @classmethod
    def load(cls, model: str) -> TextModel:
        """`model` is a folder, a hub id, or "sim:vocab=1000,context=4096" (other keys are the engine's).

        Raises:
            ModelRefused: not found, or a file lacks or contradicts what is needed.
        """
        if model.startswith(SIMULATED):
            return cls._simulated(model)
        return cls._from_folder(locate(model))

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the tokenizer adds itself."""
        return self.vocabulary.encode(text, add_special_tokens=True)

    def render_chat(self, messages: Sequence[tuple[str, str]]) -> str:
        """(role, content) pairs as one text. Raises InvalidRequest without a template, or with its message."""
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template; send text or token_ids instead of chat")
        return self.chat_template.render(messages)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """The template writes its special tokens itself; none are added."""
        return self.vocabulary.encode(self.render_chat(messages), add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The same text that a Detokenizer streams."""
        detokenizer = Detokenizer(self, skip_special_tokens=skip_special_tokens)
        return detokenizer.feed(ids) + detokenizer.flush()

    @classmethod
    def _simulated(cls, model: str) -> TextModel:
        numbers = {"vocab": 1000, "context": 4096}
        for item in filter(None, model.removeprefix(SIMULATED).split(",")):
            key, equals, value = (part.strip() for part in item.partition("="))
            if not equals:
                raise ModelRefused(f"{item!r} in {model!r} is not key=value")
            if key in numbers:
                if not (value.isascii() and value.isdigit() and int(value) > 0):
                    raise ModelRefused(f"{key} in {model!r} must be an integer of at least 1, not {value!r}")
                numbers[key] = int(value)
        return cls(WordVocabulary(numbers["vocab"]), numbers["vocab"], (), numbers["context"])

    @classmethod
    def _from_folder(cls, folder: Path) -> TextModel:
        config = read_json(folder, "config.json", required=True)
        text_config = config.get("text_config")
        configs = [config, text_config] if isinstance(text_config, dict) else [config]
        tokenizer_config = read_json(folder, "tokenizer_config.json")
        named = _named_tokens(read_json(folder, "special_tokens_map.json"), tokenizer_config)
        vocabulary = TokenizerFile(folder / "tokenizer.json", tokenizer_config, named)
        vocab_size = min(vocabulary.size, _first_int(configs, ("vocab_size",)) or vocabulary.size)
        eos = named.get("eos_token")
        candidates = [source.get("eos_token_id") for source in (read_json(folder, "generation_config.json"), *configs)]
        candidates.append(vocabulary.id_of(eos) if eos else None)
        template = _template_source(folder, tokenizer_config)
        return cls(
            vocabulary,
            vocab_size,
            next(filter(None, (_valid_ids(entry, vocab_size) for entry in candidates)), ()),
            _context_limit(folder, configs, tokenizer_config),
            None if template is None else ChatTemplate(template, named),
        )


def _named_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Texts of bos_token, eos_token, ...; later sources win."""
    found = {key: token_text(source.get(key)) for source in sources for key in NAMED_TOKENS if source.get(key)}
    return {key: text for key, text in found.items() if text}


def _valid_ids(entry: object, vocab_size: int) -> tuple[int, ...]:
    """An id or a list of ids; those that the vocabulary lacks (defaults of small models) cannot occur."""
    ids = entry if isinstance(entry, list) else [entry]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < vocab_size))


def _first_int(sources: Iterable[Mapping[str, Any]], keys: Sequence[str]) -> int | None:
    values = (source.get(key) for source in sources for key in keys)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _context_limit(folder: Path, configs: Sequence[Mapping[str, Any]], tokenizer_config: Mapping[str, Any]) -> int:
    limit = _first_int(configs, CONTEXT_KEYS)
    if limit is None:
        limit = _first_int([tokenizer_config], ("model_max_length",))  # transformers writes 10**30 for "unknown"
        if limit is None or limit > 1 << 31:
            path = folder / "config.json"
            raise ModelRefused(f"{path} states no context limit: it has none of {', '.join(CONTEXT_KEYS)}")
    return limit


def _template_source(folder: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja wins over tokenizer_config.json, where it may be a list of named templates."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
