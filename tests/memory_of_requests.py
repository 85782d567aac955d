"""A process of its own that serves many short requests and tells what memory it has: see robustness/test_memory.py.

    python tests/memory_of_requests.py FOLDER KV_BYTES REQUESTS EVERY

Prints one JSON object: `baseline`, bytes resident once everything is imported; `weights`, `kv` and `workspace`, as the
target states them before its first request; `resident`, after every EVERY requests that are done.
"""

from __future__ import annotations

import json
import random
import sys

import transformers.models.llama.modeling_llama  # noqa: F401  imported late otherwise; it is program, not model

from forerun.core.messages import Emit, Start, TargetParams
from forerun.core.params import Sampling, SeqId
from forerun.runtime.calibrate import measure
from forerun.runtime.forward import TransformersModel
from forerun.runtime.memory import keep_workspace, resident_bytes, settle
from forerun.runtime.serving import LoadOptions, load
from target_worker.engine import TargetConfig, TargetEngine

TOGETHER = 8
PROMPT_TOKENS = (20, 200)  # most are short
ANSWER_TOKENS = (2, 4)


def main(folder: str, kv_bytes: int, requests: int, every: int) -> None:
    keep_workspace()
    baseline = resident_bytes()
    loaded = load(LoadOptions(folder, dtype="float32", kv_memory=kv_bytes), draft=False, sequences=TOGETHER)
    model, config = loaded.model, TargetConfig(max_sequences=TOGETHER)
    cost = measure(model, config.row_budget)
    assert loaded.memory is not None and isinstance(model, TransformersModel)
    stated = loaded.memory()
    settle()

    done = 0

    def told(link: object, event: object) -> None:
        nonlocal done
        assert isinstance(event, Emit), event
        done += event.finish is not None

    engine = TargetEngine(model, loaded.vocab_size, config, told, cost=cost)
    draw = random.Random(1)
    started, resident = 0, list[int]()
    while done < requests:
        while started < requests and engine.sequence_count < TOGETHER:
            length = int(draw.triangular(*PROMPT_TOKENS, PROMPT_TOKENS[0]))
            prompt = tuple(draw.randrange(loaded.vocab_size) for _ in range(length))
            asked = TargetParams(Sampling(temperature=0.0), draw.randint(*ANSWER_TOKENS))
            engine.handle("link", Start(SeqId(f"r{started}"), length, prompt, asked))
            started += 1
        engine.step()
        if done // every > len(resident):
            resident.append(resident_bytes())
    told_all = {
        "baseline": baseline,
        "weights": stated.weights,
        "kv": stated.kv,
        "workspace": stated.workspace,
        "resident": resident,
        "done": done,
        "kv_touched": model.attention.touched_bytes(),
        "idle": model.pages.idle,
        "pages": model.pages.count,
    }
    print(json.dumps(told_all))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
