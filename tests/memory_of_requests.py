"""A process of its own that serves many short requests and tells what memory it has: see robustness/test_memory.py.

    python tests/memory_of_requests.py FOLDER KV_BYTES REQUESTS EVERY

Prints a line of JSON: `baseline` (bytes resident once everything is imported), what the target states before its first
request (`weights`, `kv`, `workspace`), `resident` after every EVERY requests, and how many KV pages hold something.
"""

from __future__ import annotations

import json
import random
import sys

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  transformers imports it late; it is program, not model

from forerun.core.messages import Emit, Start, TargetParams
from forerun.core.params import Sampling, SeqId
from forerun.runtime.calibrate import measure
from forerun.runtime.forward import TransformersModel
from forerun.runtime.memory import resident_bytes
from forerun.runtime.serving import LoadOptions, load
from target_worker.engine import TargetConfig, TargetEngine

TOGETHER = 8
PROMPT_TOKENS = (20, 200)
ANSWER_TOKENS = (2, 4)


def main(folder: str, kv_bytes: int, requests: int, every: int) -> None:
    baseline = resident_bytes()
    options = LoadOptions(folder, dtype="float32", kv_memory=kv_bytes)
    loaded = load(options, draft=False, sequences=TOGETHER)
    config = TargetConfig(max_sequences=TOGETHER)
    cost = measure(loaded.model, config.row_budget)
    assert loaded.memory is not None
    stated = loaded.memory()
    done = tokens = 0

    def told(link: object, event: object) -> None:
        nonlocal done, tokens
        assert isinstance(event, Emit), event
        done += event.finish is not None
        tokens += len(event.tokens)

    engine = TargetEngine(loaded.model, loaded.vocab_size, config, told, cost=cost)
    rng = random.Random(1)
    resident: list[int] = []
    for started in range(requests):
        prompt = tuple(rng.randrange(loaded.vocab_size) for _ in range(rng.randint(*PROMPT_TOKENS)))
        params = TargetParams(Sampling(temperature=0.0), rng.randint(*ANSWER_TOKENS))
        engine.handle("link", Start(SeqId(f"r{started}"), len(prompt), prompt, params))
        last = started + 1 == requests
        while engine.sequence_count >= (1 if last else TOGETHER):
            engine.step()
        if len(resident) < done // every:
            resident.append(resident_bytes())
    assert isinstance(loaded.model, TransformersModel)
    print(
        json.dumps(
            {
                "baseline": baseline,
                "weights": stated.weights,
                "kv": stated.kv,
                "workspace": stated.workspace,
                "resident": resident,
                "kv_touched": loaded.model.attention.touched_bytes(),
                "threads": torch.get_num_threads(),
                "done": done,
                "tokens": tokens,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
