"""Every way to compute an answer gives the same tokens and the same logits, bit for bit. Exit status 1 if not.

    python benchmarks/exactness.py --prompts FILE [--temperature 1 --seed 7] [--dtype float32] [--json OUT]

In one process, on the engine itself, so that hundreds of prompts take minutes: `forerun bench --scenarios` does the
same through services, processes and faults. Each prompt is answered alone and plainly first, the reference for

    hints      alone, checking random trees that are right here and wrong there, up to 16 nodes a pass
    batch      eight at a time, arriving a few passes apart
    batch+     the same with hints
    preempted  eight at a time in a KV too small for them, with hints
    continued  by a second engine with nothing in KV, from a random token on, with hints
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from forerun.commands.measure import parse_prompts
from forerun.core.cost import PassCost
from forerun.core.messages import Emit, Hinted, Start, TargetParams
from forerun.core.pages import TILE
from forerun.core.params import Sampling, SeqId, Source
from forerun.core.sequence import TAIL, Hint
from forerun.core.tree import ROOT, TokenTree
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm, resolve
from forerun.text import TextModel
from target_worker.engine import TargetConfig, TargetEngine

BATCH, MOST_NODES, APART = 8, 16, 3
LEVEL = [(1, 1.0), (256, 1.0)]
"""Passes that cost the same whatever is checked, so that all that is hinted is checked."""

Answer = tuple[list[int], list[int]]  # tokens, digests


@dataclass
class Tally:
    """What one way did."""

    checked: int = 0
    identical: int = 0
    tokens: int = 0
    passes: int = 0
    branched: int = 0
    preempted: int = 0
    windows: Counter[int] = field(default_factory=Counter)
    differing: list[Any] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return {
            "checked": self.checked,
            "identical": self.identical,
            "tokens_per_pass": self.tokens / max(1, self.passes),
            "passes_with_trees": self.branched,
            "preempted": self.preempted,
            "windows": sorted(self.windows),
            "differing": self.differing,
        }


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        folder = resolve(options.model)
        self.options = options
        self.text = TextModel.load(folder)
        self.weights = load_causal_lm(folder, options.dtype)
        self.model = self.engine_model(400)
        self.rng = random.Random(options.seed)
        self.tallies: dict[str, Tally] = {}

    def engine_model(self, pages: int) -> TransformersModel:
        return TransformersModel(self.weights, self.text.context_limit, pages)

    def params(self, number: int, hinted: bool) -> TargetParams:
        options = self.options
        sampling = Sampling(temperature=options.temperature, seed=options.seed + number)
        sources, most = ((Source.MODEL,), MOST_NODES) if hinted else ((), 0)
        return TargetParams(sampling, options.tokens, sources=sources, max_draft_tokens=most, logits_digest=True)

    def hint(self, known: Sequence[int], right: Sequence[int]) -> Hint | None:
        """A tree of up to 16 nodes below `known`: the right line with gaps that a sibling fills, and wrong ends."""
        tree, node, rng = TokenTree(known[-1]), ROOT, self.rng
        for token in right[: rng.randrange(1, MOST_NODES + 1)]:
            if tree.node_count >= MOST_NODES:
                break
            chance = rng.random()
            if chance < 0.25 and tree.node_count + 2 <= MOST_NODES:
                tree.add(
                    tree.add(node, (token + 7) % self.model.vocab_size, 0.5, Source.MODEL), token, 0.5, Source.MODEL
                )
            if chance < 0.08:
                break
            node = tree.add(node, token, 0.4, Source.MODEL)
        if not tree.node_count:
            return None
        return Hint(len(known), tuple(known[-TAIL:]), tree)

    def serve(
        self, way: str, model: TransformersModel, jobs: Sequence[tuple[int, list[int], int]], answers: dict[int, Answer]
    ) -> dict[int, Answer]:
        """jobs: (number, tokens to start from, prompt length). Hints if the answers are known; staggered arrivals."""
        tally = self.tallies.setdefault(way, Tally())
        hinted = way not in ("plain", "batch")
        events: list[Any] = []
        config = TargetConfig(max_sequences=BATCH, ngram=False)
        ticks = iter(range(1 << 40))
        engine = TargetEngine(
            model, model.vocab_size, config, lambda _, event: events.append(event), cost=PassCost(LEVEL),
            clock=lambda: float(next(ticks)),
        )  # fmt: skip
        texts = {number: list(tokens) for number, tokens, _ in jobs}
        digests: dict[int, list[int]] = {number: [] for number, _, _ in jobs}
        lengths = {number: prompt_len for number, _, prompt_len in jobs}
        waiting, steps = list(jobs), 0

        def offer(number: int) -> None:
            done = len(texts[number]) - lengths[number]
            hint = self.hint(texts[number], answers[number][0][done:]) if hinted else None
            if hint is not None:
                engine.handle("", Hinted(SeqId(str(number)), hint))

        while waiting or engine.sequence_count:
            if waiting and steps % APART == 0:
                number, tokens, prompt_len = waiting.pop(0)
                params = self.params(number, hinted)
                engine.handle("", Start(SeqId(str(number)), prompt_len, tuple(tokens), params))
                offer(number)
            engine.step()
            steps += 1
            for event in events:
                if not isinstance(event, Emit):
                    raise SystemExit(f"{way}: {event}")
                number = int(event.seq.request_id)
                texts[number] += event.tokens
                digests[number] += event.digests
                tally.tokens, tally.passes = tally.tokens + len(event.tokens), tally.passes + event.passes
                tally.branched, tally.preempted = tally.branched + event.branched, tally.preempted + event.preempted
                tally.windows.update(event.windows)
                if event.finish is None:
                    offer(number)
            events.clear()
        return {number: (texts[number][lengths[number] :], digests[number]) for number in texts}

    def compare(self, way: str, got: dict[int, Answer], answers: dict[int, Answer], names: dict[int, Any]) -> None:
        tally = self.tallies[way]
        for number, (tokens, digests) in got.items():
            right = answers[number]
            same = tokens == right[0] and digests == right[1][len(right[1]) - len(digests) :]
            tally.checked, tally.identical = tally.checked + 1, tally.identical + same
            if not same:
                tally.differing.append(names[number])

    def block(self, prompts: Sequence[tuple[int, Any, list[int]]]) -> None:
        names = {number: name for number, name, _ in prompts}
        jobs = [(number, ids, len(ids)) for number, _, ids in prompts]
        answers: dict[int, Answer] = {}
        for job in jobs:
            self.model.pages.forget()
            answers |= self.serve("plain", self.model, [job], {})
        for job in jobs:
            self.compare("hints", self.serve("hints", self.model, [job], answers), answers, names)
        for way in ("batch", "batch+"):
            self.model.pages.forget()
            shuffled = self.rng.sample(jobs, len(jobs))
            self.compare(way, self.serve(way, self.model, shuffled, answers), answers, names)
        needs = [-(-(length + self.options.tokens + 1) // TILE) for _, _, length in jobs]
        small = self.engine_model(max(max(needs) + 1, sum(needs) // 2))
        self.compare("preempted", self.serve("preempted", small, jobs, answers), answers, names)
        second = self.engine_model(sum(needs) + 2 * BATCH)
        later = []
        for number, ids, length in jobs:
            done = self.rng.randrange(1, self.options.tokens)
            later.append((number, ids + answers[number][0][:done], length))
        self.compare("continued", self.serve("continued", second, later, answers), answers, names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.monotonic()
    bench = Bench(options)
    lines = options.prompts.read_text(encoding="utf-8").split("\n")
    chosen = parse_prompts(lines, str(options.prompts))[options.skip :][: options.limit]
    prompts = [(at, one.question_id, bench.text.encode_chat([("user", one.text)])) for at, one in enumerate(chosen)]
    for first in track(range(0, len(prompts), BATCH), "blocks of eight"):
        bench.block(prompts[first : first + BATCH])
        found = {way: tally.as_json() for way, tally in bench.tallies.items()}
        if options.json:
            settings = {name: str(value) for name, value in vars(options).items()}
            result = {
                "settings": settings,
                "prompts": len(prompts),
                "done": min(first + BATCH, len(prompts)),
                "ways": found,
            }
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    wrong = False
    for way, tally in list(bench.tallies.items())[1:]:
        print(f"{way:10} {tally.identical} of {tally.checked} identical, {tally.as_json()}")
        wrong |= tally.identical < tally.checked
    print(f"{time.monotonic() - began:.0f} s, longest prompt {max(len(ids) for _, _, ids in prompts)} tokens")
    return int(wrong or not bench.tallies["preempted"].preempted)


if __name__ == "__main__":
    sys.exit(main())
