"""What a pass costs when a model is split over ranks of this machine, against the same pass unsplit.

    python benchmarks/tp_pass.py [--passes 40] [--gloo]

SmolLM2 in 3 ranks (9 heads, 3 KV heads) and a random model of the same size with 8 heads in 2 ranks, float32, one
thread a rank. Passes of the split and the unsplit model take turns, decoding one token at 128 of context. Nothing
gets faster on two cores: this bounds what splitting costs where cores are few, and shows what the exchanges do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from forerun.core.pages import KV
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm, resolve
from forerun.runtime.parallel import ParallelModel
from forerun.runtime.passes import Run
from forerun.runtime.ranks import GroupSpec

CONTEXT, PAGES = 128, 16
WARM = 3


def even_heads(folder: str) -> str:
    """SmolLM2's sizes with 8 heads of 72 and 4 KV heads, random weights."""
    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 72, "tie_word_embeddings": True}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads), dtype=torch.float32).save_pretrained(folder)
    return folder


def decoding(model: TransformersModel) -> Callable[[], None]:
    """A function that decodes one token after CONTEXT tokens, over and over."""
    tokens = tuple(range(1, CONTEXT + 1))
    path = KV(model.pages).extend(CONTEXT + 1)
    model.forward([Run(path, tokens, 0, 1)])

    def decode() -> None:
        model.forward([Run(path, (7,), CONTEXT, 1)])

    return decode


def timed(run: Callable[[], None]) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e3


def compare(name: str, folder: str, ranks: int, passes: int, shared: bool) -> None:
    cores = len(os.sched_getaffinity(0))
    unsplit = TransformersModel(load_causal_lm(folder, "float32"), 1024, PAGES)
    split = ParallelModel(GroupSpec(folder, "float32", ranks, 1024, PAGES, shared=shared))
    try:
        one, many = decoding(unsplit), decoding(split)
        took: dict[str, list[float]] = {"one thread": [], f"{cores} threads": [], f"{ranks} ranks": []}
        print(f"{name}: load of the machine {os.getloadavg()[0]:.1f}")
        for _ in range(WARM + passes):
            torch.set_num_threads(1)
            took["one thread"].append(timed(one))
            took[f"{ranks} ranks"].append(timed(many))
            torch.set_num_threads(cores)
            took[f"{cores} threads"].append(timed(one))
        for how, of in (("median", statistics.median), ("best", min)):
            ms = {what: of(times[WARM:]) for what, times in took.items()}
            print(f"{name}, {how}: " + ", ".join(f"{what} {value:.1f} ms" for what, value in ms.items()), end="; ")
            print(", ".join(f"{ms[f'{ranks} ranks'] / ms[what]:.2f} x {what}" for what in list(ms)[:2]))
    finally:
        split.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--gloo", action="store_true", help="exchange through torch.distributed, as between hosts")
    options = parser.parse_args()
    compare("SmolLM2", resolve("demo"), 3, options.passes, not options.gloo)
    with tempfile.TemporaryDirectory() as folder:
        compare("even heads", even_heads(folder), 2, options.passes, not options.gloo)


if __name__ == "__main__":
    main()
