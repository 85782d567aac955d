"""The usual library in this process, as a run to compare with. The only place here that needs torch.

It answers one prompt at a time, or a whole batch, in a thread of its own, so that the event loop goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

from forerun.commands.measure import Prompt, Sample, Timeline
from forerun.commands.runs import Decoding, Told, closed_loop, named
from forerun.core.errors import ModelRefused
from forerun.runtime.distill.draft import is_draft
from forerun.runtime.models import load_causal_lm, resolve
from forerun.text.model import TextModel

T = TypeVar("T")

LOOKUP_TOKENS = 8
"""prompt_lookup_num_tokens of transformers-prompt-lookup."""

FAR = -1e4
"""Logit of ids that a distilled draft's head lacks."""

PAD = 0
"""What fills the rows of a batch; masked before the prompt, cut off after the end."""


class Aid(Enum):
    """What guesses for it."""

    NONE = "transformers"
    LOOKUP = "transformers-prompt-lookup"
    DRAFT = "transformers-assisted"


class _Countable(Protocol):
    def numel(self) -> int: ...


class _Arrivals:
    """A streamer for transformers: the prompts are put first, then the tokens of each pass."""

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
        self._draft: Any = None
        self._text: TextModel
        self._ends: list[int] = []

    async def load(
        self, model: str, dtype: str, threads: int, eos_token_ids: Sequence[int], draft: str | None = None
    ) -> None:
        """`model` is a folder or hub id. `eos_token_ids` are the service's, so that both end alike.

        draft: folder of what guesses with Aid.DRAFT, a model or what `forerun distill` made.

        Raises:
            ModelRefused: torch or transformers is missing, or they cannot load it.
        """
        await self._in_thread(lambda: self._load(model, dtype, threads, eos_token_ids, draft))

    async def answer(self, prompt: Prompt, max_tokens: int, aid: Aid = Aid.NONE) -> Sample:
        return await self._in_thread(lambda: self._answer(prompt, max_tokens, aid))

    async def answer_batch(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Sample]:
        """All in one `generate`: padded on the left, the padding masked."""
        return await self._in_thread(lambda: self._answer_batch(prompts, max_tokens))

    def close(self) -> None:
        self._thread.shutdown()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _load(self, model: str, dtype: str, threads: int, eos_token_ids: Sequence[int], draft: str | None) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ModelRefused(f"--compare transformers needs `pip install forerun[bench]`: {error}") from error
        library: Any = transformers  # typed in parts
        library.utils.logging.disable_progress_bar()
        library.utils.logging.set_verbosity_error()  # it advises on every assisted answer
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
        if draft is not None:
            self._draft = _whole_draft(draft, folder, dtype)
        # The model's own sampling defaults (top_k 50 and the like) are not the service's.
        self._ends = [] if self._decoding.ignore_eos else list(eos_token_ids)
        for each in filter(None, (self._model, self._draft)):
            each.generation_config = library.GenerationConfig(eos_token_id=self._ends or None, pad_token_id=PAD)

    def _answer(self, prompt: Prompt, max_tokens: int, aid: Aid) -> Sample:
        import torch

        ids = self._prompt_ids(prompt)
        options = self._options(max_tokens)
        if aid is Aid.LOOKUP:
            options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
        if aid is Aid.DRAFT:
            options["assistant_model"] = self._draft
        torch.manual_seed(self._decoding.seed_of(prompt))
        arrivals = _Arrivals(self._clock)
        sent = self._clock()
        with torch.inference_mode():
            inputs = torch.tensor([ids])
            out = self._model.generate(inputs, attention_mask=torch.ones_like(inputs), streamer=arrivals, **options)
        ended = self._clock()
        answered = arrivals.puts[1:]  # the first is the prompt
        token_ids = tuple(out[0, len(ids) :].tolist())
        return Sample(prompt, token_ids, Timeline(sent, tuple(answered), ended), passes=len(answered))

    def _answer_batch(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Sample]:
        import torch

        rows = [self._prompt_ids(prompt) for prompt in prompts]
        longest = max(map(len, rows))
        torch.manual_seed(self._decoding.seed_of(prompts[0]))
        arrivals = _Arrivals(self._clock)
        sent = self._clock()
        with torch.inference_mode():
            inputs = torch.tensor([[PAD] * (longest - len(row)) + row for row in rows])  # [prompts, longest]
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
            out = self._model.generate(inputs, attention_mask=mask, streamer=arrivals, **self._options(max_tokens))
        ended = self._clock()
        times = [at for at, _ in arrivals.puts[1:]]  # the first are the prompts
        samples = []
        for prompt, answer in zip(prompts, out[:, longest:].tolist(), strict=True):
            token_ids = tuple(answer[: _length(answer, self._ends)])
            timeline = Timeline(sent, tuple((at, 1) for at in times[: len(token_ids)]), ended)
            samples.append(Sample(prompt, token_ids, timeline, passes=len(token_ids)))
        return samples

    def _options(self, max_tokens: int) -> dict[str, Any]:
        options: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": False}
        if self._decoding.temperature > 0:
            options |= {"do_sample": True, "temperature": self._decoding.temperature, "top_k": 0, "top_p": 1.0}
        return options

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        """As the service makes them, from the same files."""
        if prompt.chat and self._text.has_chat_template:
            return self._text.encode_chat([("user", prompt.text)])
        return self._text.encode(prompt.text)


@dataclass(frozen=True, slots=True)
class ReferenceRun:
    """Plain `generate`, or with prompt-lookup or assisted decoding as it comes; one prompt at a time."""

    reference: Reference
    aid: Aid

    @property
    def name(self) -> str:
        return self.aid.value

    async def answers(self, prompts: Sequence[Prompt], streams: int, max_tokens: int, told: Told) -> list[Sample]:
        async def one(prompt: Prompt) -> Sample:
            sample = await named(self.name, prompt, self.reference.answer(prompt, max_tokens, self.aid))
            told(self.name)
            return sample

        return await closed_loop(one, prompts, 1)


@dataclass(frozen=True, slots=True)
class BatchedReferenceRun:
    """Plain `generate` of `streams` prompts at once; the next batch begins when the longest answer is done."""

    name: str
    reference: Reference

    async def answers(self, prompts: Sequence[Prompt], streams: int, max_tokens: int, told: Told) -> list[Sample]:
        samples: list[Sample] = []
        for start in range(0, len(prompts), streams):
            batch = await self.reference.answer_batch(prompts[start : start + streams], max_tokens)
            for _ in batch:
                told(self.name)
            samples += batch
        return samples


def _whole_draft(folder: str, target: str, dtype: str) -> Any:
    """A model with the target's vocabulary, in the library's own attention."""
    if not is_draft(folder):
        return load_causal_lm(folder, dtype, attention="sdpa")
    from forerun.runtime.distill.student import expanded, load_student

    return expanded(load_student(folder, target, dtype, attention="sdpa", outside=FAR))


def _length(answer: Sequence[int], ends: Sequence[int]) -> int:
    """Tokens up to the first end token, it included; what follows it is padding."""
    return next((index + 1 for index, token in enumerate(answer) if token in ends), len(answer))
