"""The usual library in this process, as a run to compare with. The only place here that needs torch.

It answers one prompt at a time, in a thread of its own, so that the event loop goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from forerun.commands.measure import Prompt, Sample, Timeline
from forerun.commands.runs import Decoding
from forerun.core.errors import ModelRefused
from forerun.runtime.models import resolve
from forerun.text.model import TextModel

T = TypeVar("T")

LOOKUP_TOKENS = 8
"""prompt_lookup_num_tokens of transformers-prompt-lookup."""


class _Countable(Protocol):
    def numel(self) -> int: ...


class _Arrivals:
    """A streamer for transformers: the prompt is put first, then the tokens of each pass."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.puts: list[tuple[float, int]] = []

    def put(self, tokens: _Countable) -> None:
        self.puts.append((self.clock(), tokens.numel()))

    def end(self) -> None:
        pass


class Reference:
    """A model in transformers. Load it first, close it to end its thread."""

    def __init__(self, decoding: Decoding, clock: Callable[[], float] = time.perf_counter) -> None:
        self._decoding = decoding
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "reference")
        self._model: Any
        self._text: TextModel

    async def load(self, model: str, dtype: str, threads: int, eos_token_ids: Sequence[int]) -> None:
        """`model` is a folder or hub id. `eos_token_ids` are the service's, so that both end alike.

        Raises:
            ModelRefused: torch or transformers is missing, or they cannot load it.
        """
        await self._in_thread(lambda: self._load(model, dtype, threads, eos_token_ids))

    async def answer(self, prompt: Prompt, max_tokens: int, *, lookup: bool) -> Sample:
        return await self._in_thread(lambda: self._answer(prompt, max_tokens, lookup))

    def close(self) -> None:
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _load(self, model: str, dtype: str, threads: int, eos_token_ids: Sequence[int]) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ModelRefused(f"--compare transformers needs `pip install forerun[bench]`: {error}") from error
        library: Any = transformers  # typed in parts
        library.utils.logging.disable_progress_bar()
        folder = resolve(model)
        if folder.startswith("sim:"):
            raise ModelRefused(f"transformers cannot run {model!r}; name a model folder with --model")
        self._text = TextModel.load(folder)
        torch.set_num_threads(threads)  # holds for the calling thread only
        try:
            self._model = library.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        except Exception as error:  # the library raises its own, the hub's and OS errors
            raise ModelRefused(
                f"--compare transformers cannot load {model!r}; name its folder with --model: {error}"
            ) from error
        self._model.eval()
        # The model's own sampling defaults (top_k 50 and the like) are not the service's.
        end = list(eos_token_ids) if eos_token_ids and not self._decoding.ignore_eos else None
        self._model.generation_config = library.GenerationConfig(eos_token_id=end, pad_token_id=0)

    def _answer(self, prompt: Prompt, max_tokens: int, lookup: bool) -> Sample:
        import torch

        ids = self._prompt_ids(prompt)
        options: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": False}
        if self._decoding.temperature > 0:
            options |= {"do_sample": True, "temperature": self._decoding.temperature, "top_k": 0, "top_p": 1.0}
        if lookup:
            options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        torch.manual_seed(self._decoding.seed)
        arrivals = _Arrivals(self._clock)
        sent = self._clock()
        with torch.inference_mode():
            inputs = torch.tensor([ids])
            out = self._model.generate(inputs, attention_mask=torch.ones_like(inputs), streamer=arrivals, **options)
        ended = self._clock()
        answered = arrivals.puts[1:]  # the first is the prompt
        token_ids = tuple(out[0, len(ids) :].tolist())
        return Sample(prompt, token_ids, Timeline(sent, tuple(answered), ended), passes=len(answered))

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        """As the service makes them, from the same files."""
        if prompt.chat and self._text.has_chat_template:
            return self._text.encode_chat([("user", prompt.text)])
        return self._text.encode(prompt.text)


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """Plain `generate`, or with prompt-lookup decoding."""

    name: str
    reference: Reference
    lookup: bool
    streams_most: int = 1

    async def answer(self, prompt: Prompt, max_tokens: int) -> Sample:
        return await self.reference.answer(prompt, max_tokens, lookup=self.lookup)
