"""The stages of run.sh: `python tests/gpu/stages.py attention|model|speed`. Weights are random; no network.

Each prints PASS and FAIL lines and tables; with $OUT set it writes them to $OUT/gpu-STAGE.json. The checks of `model`
run in CI too, on the CPU.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from models import tiny_model
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from forerun.core.pages import KV, TILE
from forerun.runtime import cuda_kernels
from forerun.runtime.batch import Batch
from forerun.runtime.cuda import ROW_TILE, VarlenAttention
from forerun.runtime.forward import TransformersModel
from forerun.runtime.models import load_causal_lm
from forerun.runtime.passes import Run

EIGHT_B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Report:
    """What a stage found."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.checks: list[dict[str, Any]] = []
        self.tables: dict[str, list[dict[str, Any]]] = {}

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        self.checks.append({"name": name, "passed": passed, "detail": detail})
        print(f"{'PASS' if passed else 'FAIL'} {name}{': ' if detail else ''}{detail}", flush=True)

    def table(self, title: str, rows: list[dict[str, Any]]) -> None:
        self.tables[title] = rows
        cells = [list(rows[0])] + [[_shown(value) for value in row.values()] for row in rows]
        widths = [max(len(line[at]) for line in cells) for at in range(len(cells[0]))]
        print(f"\n{title}")
        for line in cells:
            print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        print(flush=True)

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check["passed"] for check in self.checks)

    def write(self) -> None:
        if not (folder := os.environ.get("OUT")):
            return
        found = {"stage": self.stage, "passed": self.passed, "machine": machine()}
        content = found | {"checks": self.checks, "tables": self.tables}
        (Path(folder) / f"gpu-{self.stage}.json").write_text(json.dumps(content, indent=2))


def _shown(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def machine() -> dict[str, Any]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda}


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The median time of `work`, which is run three times before."""
    settle = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for _ in range(3):
        work()
    took = []
    for _ in range(repeats):
        settle()
        began = time.perf_counter()
        work()
        settle()
        took.append(time.perf_counter() - began)
    return sorted(took)[len(took) // 2]


# --- kernels -------------------------------------------------------------------------------------


@torch.inference_mode()
def attention(report: Report) -> None:
    device = torch.device("cuda")
    cuda_kernels.make_exact()
    for heads, kv_heads, head_dim in ((32, 8, 128), (9, 3, 64), (16, 8, 256)):
        shape = f"{heads} heads, {kv_heads} KV heads, head_dim {head_dim}"
        for page in (TILE, cuda_kernels.FLASH_PAGE):
            for kernel in cuda_kernels.kernels(page):
                wrong = cuda_kernels.flaw(kernel, heads, kv_heads, head_dim, torch.bfloat16, device, 8192, page)
                print(f"     {shape}, {kernel.name}: {wrong or 'exact'}")
        chosen = cuda_kernels.choose(heads, kv_heads, head_dim, torch.bfloat16, device, 8192)
        report.check(f"an exact kernel for {shape}", True, chosen.name)
    long_context(report)
    products(report)
    norms(report)


def long_context(report: Report, length: int = 4000, width: int = 64) -> None:
    """The last rows of a long run one by one, eight at once, and beside many others; times of a layer."""
    device, heads, kv_heads, head_dim = torch.device("cuda"), 32, 8, 128
    pages = -(-length // TILE)
    kernel = cuda_kernels.choose(heads, kv_heads, head_dim, torch.bfloat16, device, 8192)
    held = VarlenAttention(
        kernel,
        layers=1,
        pages=pages + width,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_limit=8192,
        dtype=torch.bfloat16,
        device=device,
    )
    held.keys.normal_()
    held.values.normal_()
    query, key, value = (
        torch.randn((n, 8, head_dim), device=device, dtype=torch.bfloat16) for n in (heads, kv_heads, kv_heads)
    )

    def begin(first: int, rows: int, others: int, at: int) -> Tensor:
        """A run of `rows` rows from the first on of the last eight of `at`, after `others` runs of one row."""
        own = at - 8 + first + np.arange(rows)
        table = np.full((others + 1, pages), -1)
        table[:others, 0] = pages + np.arange(others)
        table[others, : -(-at // TILE)] = np.arange(-(-at // TILE))
        writes = [(row, pages + row, 5) for row in range(others)]
        writes += [(others + i, position // TILE, position % TILE) for i, position in enumerate(own.tolist())]
        held.begin(
            Batch(
                np.zeros(others + rows, dtype=np.int64),
                np.concatenate([np.full(others, 5), own]),
                np.zeros(0, dtype=np.int64),
                np.array([*range(others + 1), others + rows]),
                table,
                np.array(writes),
                np.zeros((0, 2), dtype=np.int64),
            )
        )
        which = np.concatenate([np.zeros(others, dtype=np.int64), first + np.arange(rows)])
        return torch.from_numpy(np.pad(which, (0, held.tile - len(which)))).to(device)

    def attend(which: Tensor, window: int | None) -> Tensor:
        q, k, v = (part.index_select(1, which) for part in (query, key, value))
        return held.attend(0, q, k, v, head_dim**-0.5, window, None)

    def outputs(sizes: Sequence[int], others: int, window: int | None) -> Tensor:
        found, first = [], 0
        for rows in sizes:
            found.append(attend(begin(first, rows, others, length), window)[others : others + rows].clone())
            first += rows
        return torch.cat(found)

    for window in (None, 1024):
        eight = outputs([8], 0, window)
        for name, sizes, others in (("one by one", [1] * 8, 0), ("3 and 5", [3, 5], 0), ("of 40 runs", [8], 39)):
            same = torch.equal(outputs(sizes, others, window), eight)
            report.check(f"attention over {length}, window {window}: 8 rows and {name}", same)
    times = []
    for at in (128, 1024, length):
        for rows in (1, 8):
            which = begin(8 - rows, rows, 0, at)
            micro = seconds(lambda which=which: attend(which, None), 20) * 1e6
            times.append({"context": at, "rows": rows, "microseconds": round(micro, 1)})
    report.table(f"Attention of a layer, one run, {kernel.name} (launches included)", times)


def products(report: Report) -> None:
    """Are bits equal inside a tile, and would they be over other row counts?"""
    draw = torch.Generator("cuda").manual_seed(0)

    def random_(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    rows = []
    for out, into in ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (128256, 4096)):
        weight, x = random_(out, into) * into**-0.5, random_(max(ROW_COUNTS), into)
        usual = functional.linear(x[:ROW_TILE], weight)
        order = torch.randperm(ROW_TILE, generator=draw, device="cuda")
        moved = functional.linear(x[order].contiguous(), weight)
        report.check(f"product {into} x {out}: a row's place in the tile", torch.equal(moved, usual[order]))
        other = torch.cat([x[:3], random_(ROW_TILE - 3, into)])
        report.check(
            f"product {into} x {out}: the other rows of a tile",
            torch.equal(functional.linear(other, weight)[:3], usual[:3]),
        )
        same = {"product": f"{into} x {out}"}
        for count in ROW_COUNTS:
            found = functional.linear(x[:count], weight)
            known = min(count, ROW_TILE)
            same[f"{count}"] = "=" if torch.equal(found[:known], usual[:known]) else "differs"
        rows.append(same)
    report.table(f"Plain products: bits at other numbers of rows, against {ROW_TILE}", rows)


def norms(report: Report) -> None:
    for width in (96, 4096):
        norm = LlamaRMSNorm(width).to("cuda", torch.bfloat16)
        x = torch.randn((1, ROW_TILE, width), device="cuda", dtype=torch.bfloat16)
        order = torch.randperm(ROW_TILE, device="cuda")
        report.check(
            f"RMSNorm of {width}: a row's place in the tile", torch.equal(norm(x[:, order]), norm(x)[:, order])
        )
        other = torch.cat([x[:, :3], torch.randn_like(x[:, 3:])], dim=1)
        report.check(f"RMSNorm of {width}: the other rows", torch.equal(norm(other)[:, :3], norm(x)[:, :3]))


# --- whole passes --------------------------------------------------------------------------------


class Sequence_:
    """A text that grows, with its KV."""

    def __init__(self, model: TransformersModel) -> None:
        self.model, self.kv, self.tokens = model, KV(model.pages), list[int]()

    def run(self, tokens: Sequence[int], wanted: int, parent: Run | None = None) -> Run:
        """In the trunk, after what is committed."""
        return Run(self.kv.extend(len(tokens)), tuple(tokens), self.kv.cached_len, wanted, parent)

    def commit(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.kv.commit(self.tokens, len(self.tokens))

    def close(self) -> None:
        self.kv.release()


def prefill(model: TransformersModel, tokens: Sequence[int], sizes: Sequence[int], wanted: bool = True) -> np.ndarray:
    """Logits of all rows of a prompt, in chunks of these sizes in turn. Pages are new: nothing is found again."""
    sequence, rows, turn = Sequence_(model), [], 0
    while len(sequence.tokens) < len(tokens):
        chunk = tokens[len(sequence.tokens) :][: sizes[turn % len(sizes)]]
        rows += model.forward([sequence.run(chunk, len(chunk) if wanted else 0)])
        sequence.commit(chunk)
        turn += 1
    sequence.close()
    return np.concatenate(rows)


def exactness(report: Report, name: str, model: TransformersModel, prompt: Sequence[int], count: int) -> None:
    """Chunked prefill, company, chains of every length and trees, against token by token: bits of every logit."""
    plain = prefill(model, prompt, [1])
    for sizes in ([len(prompt)], [5], [16, 1, 33]):
        same = np.array_equal(prefill(model, prompt, sizes), plain)
        report.check(f"{name}: prompt in chunks of {sizes} and token by token", same)

    alone = Sequence_(model)
    model.forward([alone.run(prompt[:-1], 0)])
    alone.commit(prompt[:-1])
    text, expected = [prompt[-1]], []
    while len(text) <= count:
        row = model.forward([alone.run(text[-1:], 1)])[0][0]
        alone.commit(text[-1:])
        expected.append(row)
        text.append(int(row.argmax()))
    alone.close()
    report.check(f"{name}: tokens differ", len(set(text)) > count // 8, f"{len(set(text))} of {len(text)}")

    company = Sequence_(model)
    company.commit([])
    for kind in ("chains", "chains in company", "trees"):
        found, passes = speculate(model, prompt, text, kind, company)
        same = len(found) == len(expected) and all(map(np.array_equal, found, expected))
        report.check(f"{name}: {kind} on and off", same, f"{len(expected)} tokens in {passes} passes")
    company.close()


def speculate(
    model: TransformersModel, prompt: Sequence[int], text: Sequence[int], kind: str, company: Sequence_
) -> tuple[list[np.ndarray], int]:
    """Logits at every position of `text`, whose guesses are right up to a drawn place; and the passes it took."""
    draw = random.Random(len(text))
    sequence, found, passes, window = Sequence_(model), [], 0, 0
    model.forward([sequence.run(prompt[:-1], 0)])
    sequence.commit(prompt[:-1])
    while len(found) < len(text) - 1:
        at = len(found)
        window = window % 16 + 1
        right = draw.randint(0, window)
        guesses = [*text[at + 1 : at + 1 + right], *(draw.randrange(model.vocab_size) for _ in range(16))][:window]
        run = sequence.run([text[at], *guesses], window + 1)
        runs = [run]
        if kind == "chains in company":
            others = [draw.randrange(model.vocab_size) for _ in range(draw.randint(1, 30))]
            runs.insert(draw.randint(0, 1), company.run(others, 1))
        path = None
        if kind == "trees":  # the trunk guesses wrongly from the first node on, a branch holds the guesses
            wrong = [(token + 1) % model.vocab_size for token in guesses]
            run = sequence.run([text[at], *wrong], 1 + window)
            path = sequence.kv.branch(sequence.kv.trunk, sequence.kv.cached_len + 1, window)
            runs = [run, Run(path, tuple(guesses), sequence.kv.cached_len + 1, window, run)]
        logits = model.forward(runs)
        passes += 1
        rows = np.concatenate([logits[0][:1], logits[1]]) if path else logits[runs.index(run)]
        accepted = 0
        while accepted < window and at + accepted + 1 < len(text) and guesses[accepted] == text[at + accepted + 1]:
            accepted += 1
        accepted = min(accepted, len(text) - 2 - at)
        found += list(rows[: accepted + 1])
        sequence.tokens += text[at : at + accepted + 1]
        sequence.kv.commit(sequence.tokens, len(sequence.tokens), path)
        if kind == "chains in company":
            company.commit(others)
            if len(company.tokens) > 60:
                company.kv.truncate(10)
                del company.tokens[10:]
    sequence.close()
    return found, passes


def model(report: Report, device: str = "cuda", dtype: str = "bfloat16") -> None:
    """Tiny models of several architectures, whole; sliding windows; against the CPU."""
    draw = random.Random(3)
    prompt = [draw.randrange(256) for _ in range(TILE + 22)]
    for arch, window in (("llama", None), ("qwen3", 16), ("gemma3_text", 16)):
        with tempfile.TemporaryDirectory() as folder:
            tiny_model(folder, arch=arch, sliding_window=window, layers=3, hidden=128, heads=8)
            tested = TransformersModel(load_causal_lm(folder, dtype).to(device), 512, pages=24)
            exactness(report, f"tiny {arch}", tested, prompt, 60)
            plain = TransformersModel(load_causal_lm(folder, "float32"), 512, pages=24)
            off = float(np.abs(prefill(tested, prompt, [64]) - prefill(plain, prompt, [64])).mean())
            report.check(f"tiny {arch}: near the CPU in float32", off < 0.15, f"mean difference of a logit {off:.4f}")


def speed(report: Report) -> None:
    """An 8B shape: is it exact, and what does a pass cost?"""
    cuda_kernels.make_exact()
    config = LlamaConfig(**EIGHT_B, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None)
    began = time.perf_counter()
    with torch.device("cuda"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="forerun")
    made.eval().requires_grad_(False)
    print(f"     random weights in {time.perf_counter() - began:.1f} s", flush=True)
    read = sum(p.nbytes for name, p in made.named_parameters() if "embed_tokens" not in name)
    tiles(report, made, read)
    began = time.perf_counter()
    served = TransformersModel(made, 4096, pages=320)
    print(f"     ready in {time.perf_counter() - began:.1f} s", flush=True)
    draw = random.Random(7)
    prompt = [draw.randrange(served.vocab_size) for _ in range(1024)]
    decode(report, served, prompt, read)
    exactness(report, "8B shape", served, prompt[: TILE + 22], 64)


@torch.inference_mode()
def tiles(report: Report, made: torch.nn.Module, read: int) -> None:
    """All products of a pass, by the number of rows: what one tile of rows costs against one row."""
    linears = [module for module in made.modules() if isinstance(module, torch.nn.Linear)]
    rows, least = [], 0.0
    for count in ROW_COUNTS:
        inputs = {n: torch.randn((count, n), device="cuda", dtype=torch.bfloat16) for n in (4096, 14336)}
        graph = torch.cuda.CUDAGraph()
        for linear in linears[:8] + linears[-1:]:
            linear(inputs[linear.in_features])
        with torch.cuda.graph(graph):
            for linear in linears:
                linear(inputs[linear.in_features])
        took = seconds(graph.replay, 10)
        least = least or took
        rows.append({"rows": count, "ms": took * 1e3, "GB/s": round(read / took / 1e9), "against 1": took / least})
    report.table("All matrix products of an 8B pass, by rows", rows)


def decode(report: Report, served: TransformersModel, prompt: list[int], read: int) -> None:
    streams = [Sequence_(served) for _ in range(16)]
    began = time.perf_counter()
    for stream in streams:
        served.forward([stream.run(prompt, 1)])
        stream.commit(prompt)
    took = (time.perf_counter() - began) / len(streams)
    rows = [{"pass": "prompt of 1,024", "ms": took * 1e3, "GB/s": "", "against 1": ""}]

    def timed(count: int, nodes: int) -> float:
        return seconds(lambda: served.forward([stream.run(prompt[:nodes], nodes) for stream in streams[:count]]), 15)

    one = timed(1, 1)
    for count, nodes in ((1, 1), (1, 4), (1, 8), (1, 16), (4, 4), (16, 1), (16, 4)):
        took = one if (count, nodes) == (1, 1) else timed(count, nodes)
        name = f"{count} stream{'s' * (count > 1)}, {nodes} row{'s' * (nodes > 1)} each"
        rows.append({"pass": name, "ms": took * 1e3, "GB/s": round(read / took / 1e9), "against 1": took / one})
    report.table(f"Passes of an 8B shape in bfloat16 behind 1,024 tokens ({read / 1e9:.1f} GB of weights)", rows)
    sixteen = float(rows[4]["against 1"])
    report.check("verifying 16 tokens costs at most 1.25 of one", sixteen <= 1.25, f"{sixteen:.3f}")
    for stream in streams:
        stream.close()


def main(stage: str) -> int:
    if not torch.cuda.is_available():
        print(f"FAIL {stage}: torch {torch.__version__} sees no CUDA device here")
        return 1
    report = Report(stage)
    print(f"     {machine()}", flush=True)
    try:
        {"attention": attention, "model": model, "speed": speed}[stage](report)
    except Exception as error:
        report.check(f"{stage} ran to its end", False, f"{type(error).__name__}: {error}")
        raise
    finally:
        report.write()
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
