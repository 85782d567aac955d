"""`forerun bench`: measure speed, exactness, shared prefixes and interference. Here options become a plan."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.commands import bench_interfere, bench_prefix, failure, measure, throughput
from forerun.commands.bench_interfere import InterferePlan
from forerun.commands.bench_prefix import PrefixPlan
from forerun.commands.exact import SCENARIOS
from forerun.commands.options import (
    Chains,
    Draft,
    DraftCores,
    KvMemory,
    Layers,
    Lookahead,
    MaxSequences,
    TargetCores,
    Tp,
    parse_cores,
    parse_size,
)
from forerun.commands.own import Services
from forerun.commands.report import Measured
from forerun.commands.runs import Asked, Decoding
from forerun.commands.scenarios import BATCH, ScenarioPlan, run_scenarios
from forerun.core.errors import InvalidRequest
from forerun.runtime.models import resolve, revision
from forerun.up import UpOptions, default_sources, draft_folder, source_names

OF_OWN_SERVICES = {"target", "draft", "layers", "lookahead", "chains", "max_sequences", "kv_memory", "tp"}
OF_OWN_SERVICES |= {"target_cores", "draft_cores"}
"""Options that say how services of our own are started."""


_OF_PROMPTS = {"prompts", "skip", "every", "limit", "max_tokens", "temperature", "sources", "ignore_eos", "check_exact"}
_OF_SPEED = {"single", "compare", "model"}
_OF_SCENARIOS = {"preempt_kv", "fail_every", "fail_rounds"}
_OF_LENGTHS = {"prompt_tokens", "rounds"}
UNUSED = {
    "speed": _OF_SCENARIOS | _OF_LENGTHS,
    "scenarios": _OF_SPEED | _OF_LENGTHS,
    "prefix": _OF_PROMPTS | _OF_SPEED | _OF_SCENARIOS | {"streams"},
    "interfere": _OF_PROMPTS | _OF_SPEED | _OF_SCENARIOS,
}
"""Options that say nothing to a mode, and are refused there."""


class Compare(StrEnum):
    """What --compare takes."""

    TRANSFORMERS = "transformers"
    ASSISTED = "assisted"


class Dtype(StrEnum):
    """What --dtype takes."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


def bench(
    context: typer.Context,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines: `turns` (the first is the user's message, through the chat template) or `prompt` (raw"
            " text); `question_id` and `category` if known. Needed unless --prefix or --interfere is given.",
            show_default=False,
        ),
    ] = None,
    skip: Annotated[int, typer.Option(min=0, help="Leave out the first prompts; the others keep their seeds.")] = 0,
    every: Annotated[int, typer.Option(min=1, help="Take one of so many of the others.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the first prompt of the file; each has the next one.")] = 0,
    streams: Annotated[
        int | None,
        typer.Option(min=1, help=f"Requests in flight, closed loop. Default 1; scenarios {BATCH}, --interfere 4."),
    ] = None,
    sources: Annotated[
        list[str] | None,
        typer.Option(help="Hint sources as a,b. Repeated, or separated by ;, they are a run each. Default: all."),
    ] = None,
    single: Annotated[bool, typer.Option("--single", help="Also plain with one stream: what a batch gains.")] = False,
    compare: Annotated[
        Compare | None,
        typer.Option(
            help="Also the usual library in this process: plain, with prompt lookup and the same draft, or in batches;"
            " assisted: with the same draft alone."
        ),
    ] = None,
    check_exact: Annotated[
        bool, typer.Option("--check-exact", help="Exit status 1 if ids or logits of an answer differ from plain's.")
    ] = False,
    scenarios: Annotated[
        str | None,
        typer.Option(help=f"Check exactness instead of speed in these: {','.join(SCENARIOS)}.", show_default=False),
    ] = None,
    preempt_kv: Annotated[
        str | None, typer.Option(help="KV memory of the preempt scenario. Default: 2.5 times the longest sequence.")
    ] = None,
    fail_every: Annotated[
        int, typer.Option(min=1, help="Failover scenario: kill a target in every so many blocks of answers.")
    ] = 1,
    fail_rounds: Annotated[
        int, typer.Option(min=1, help="Failover scenario: ask again what no second worker had to continue, so often.")
    ] = 3,
    prefix: Annotated[
        bool, typer.Option("--prefix", help="Measure instead the time to first token with a shared prefix.")
    ] = False,
    interfere: Annotated[
        bool, typer.Option("--interfere", help="Measure instead what streams feel of a long prompt that arrives.")
    ] = False,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Shared ones of --prefix (default 700), all of --interfere (4000)."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Of --prefix (default 10) or --interfere (3).")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    addr: Annotated[str | None, typer.Option(help="A running coordinator. Default: start services of our own.")] = None,
    target: Annotated[str, typer.Option(help="The model of our own services.")] = "demo",
    draft: Draft = None,
    layers: Layers = 8,
    lookahead: Lookahead = 8,
    chains: Chains = False,
    max_sequences: MaxSequences = 16,
    kv_memory: KvMemory = "auto",
    tp: Tp = 1,
    target_cores: TargetCores = "",
    draft_cores: DraftCores = "",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Every answer has --max-tokens tokens.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub id for --compare. Default: the one that is served.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of our own services, and for --compare.")] = Dtype.BFLOAT16,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of our own target, and for --compare unless workers are pinned: then it has as many as they have"
            " cores. Default: what the draft leaves; all cores.",
        ),
    ] = None,
) -> None:
    """Answer the prompts plainly, speculatively and as compared, by turns, and print a table.

    The runs take turns prompt by prompt (with several streams: by blocks of 4 prompts a stream), and who is
    first rotates, so that noise hits all alike; the run whose turn it is has the machine to itself. TTFT and ITL are
    the client's: TTFT from sending to the first token; a chunk of m tokens that came dt after the one before
    counts m tokens at dt/m each. tokens/s is all tokens over the time of a run's turns, prefill included.
    transformers answers one prompt at a time, or with several streams as many in a batch. A short answer of each
    run warms it up.
    """

    async def main() -> bool:
        modes = {"scenarios": scenarios is not None, "prefix": prefix, "interfere": interfere}
        chosen = [mode for mode, on in modes.items() if on] or ["speed"]
        if len(chosen) > 1:
            raise InvalidRequest(f"--{' and --'.join(chosen)} do not go together; give one")
        why = f"not used with --{chosen[0]}" if any(modes.values()) else f"needs one of --{', --'.join(modes)}"
        _refuse_stray(context, UNUSED[chosen[0]], why)
        if addr is not None:
            _refuse_stray(context, OF_OWN_SERVICES, "of services of our own, but --addr names running ones")
        if json_out is not None and not json_out.absolute().parent.is_dir():
            raise InvalidRequest(f"--json {json_out}: there is no folder {json_out.absolute().parent}")
        if addr is None and dtype is Dtype.FLOAT16:
            raise InvalidRequest("--dtype float16 is for --compare with --addr; our services take bfloat16 and float32")
        options = UpOptions(
            target,
            source_names(draft) or (default_sources(resolve(target)) if addr is None else ()),
            port=0,
            dtype=dtype.value,
            lookahead=lookahead,
            chains=chains,
            early_exit_layers=layers,
            threads=threads or 0,
            max_sequences=max_sequences,
            kv_memory=parse_size(kv_memory),
            tp=tp,
            target_cores=parse_cores(target_cores),
            draft_cores=parse_cores(draft_cores),
        )
        services = Services(options, addr)
        measured = await measuring(services)
        if json_out is not None:
            measured.write(json_out, {"addr": addr} if addr else _as_json(options))
        return measured.passed

    async def measuring(services: Services) -> Measured:
        if prefix:
            shared = PrefixPlan(prompt_tokens or 700, rounds=rounds or 10, seed=seed)
            return await bench_prefix.run(services, shared)
        if interfere:
            arrivals = InterferePlan(streams or 4, prompt_tokens or 4000, rounds=rounds or 3, seed=seed)
            return await bench_interfere.run(services, arrivals)
        chosen = _read(prompts)[skip::every][:limit]
        asked = Asked(str(prompts), skip, every, chosen, measure.parse_sources(sources or []))
        decoding = Decoding(max_tokens, temperature, seed, ignore_eos)
        if not asked.prompts:
            raise InvalidRequest(f"--skip {skip} leaves none of the prompts in {prompts}")
        if scenarios is not None:
            company = streams or BATCH
            scarce = None if preempt_kv is None else parse_size(preempt_kv)
            names = _scenarios(scenarios)
            losses = (fail_every, fail_rounds)
            return await run_scenarios(services, ScenarioPlan(names, asked, decoding, company, scarce, *losses))
        comparison = None if compare is None else _comparison(services, model, dtype, threads, streams or 1)
        if compare is Compare.ASSISTED:
            if comparison is None or comparison.draft is None:
                raise InvalidRequest("--compare assisted is for one stream and services of our own with a draft model")
            comparison = replace(comparison, assisted_alone=True)
        plan = throughput.Plan(asked, decoding, streams or 1, single, check_exact, comparison)
        return await throughput.run(services, plan)

    if not failure.run(main()):
        raise typer.Exit(failure.FAILED)


def _refuse_stray(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Options of the command line that would be ignored."""
    sources = {name: context.get_parameter_source(name) for name in names}
    given = sorted(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
    if given:
        raise InvalidRequest(f"{', '.join('--' + name.replace('_', '-') for name in given)}: {why}")


def _read(path: Path | None) -> list[measure.Prompt]:
    if path is None:
        raise InvalidRequest("--prompts is missing: a file of prompts, a line each")
    try:
        return measure.parse_prompts(path.read_text(encoding="utf-8").split("\n"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prompts {path}: {error}") from error


def _as_json(options: UpOptions) -> dict[str, Any]:
    """Services of our own, and which draft they had."""
    draft = draft_folder(options)
    made = None if draft is None else revision(draft)
    return {"addr": None, "services": {**asdict(options), "port": None}, "draft_revision": made}


def _comparison(
    services: Services, model: str | None, dtype: Dtype, threads: int | None, streams: int
) -> throughput.Comparison:
    """With the threads and the draft that our services have."""
    options = services.options
    cores = {*options.target_cores, *options.draft_cores}
    given = len(cores) if cores else threads or len(os.sched_getaffinity(0))
    ours = services.addr is None and model is None
    draft = draft_folder(options) if ours and streams == 1 else None
    return throughput.Comparison(model, dtype.value, given, draft)


def _scenarios(text: str) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    if not set(names) <= set(SCENARIOS):
        raise InvalidRequest(f"--scenarios takes some of {','.join(SCENARIOS)}, not {text!r}")
    return names
