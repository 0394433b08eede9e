"""What `plan` shows: one worker's two strokes, the gain of drafts, and the fleets that serve a load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from twostroke.cli.terminal import console
from twostroke.cost.model.weight_formats import HELD, PUBLISHED
from twostroke.cost.units import per_second, seconds
from twostroke.kv.layout import KVLayout
from twostroke.model.compressed import CompressedArch
from twostroke.model.latent import LatentArch
from twostroke.ops.interface import KV_BITS
from twostroke.record import replace

if TYPE_CHECKING:
    from twostroke.cost.answers.sizing import Sizing
    from twostroke.cost.answers.workers import Demand, Need, WorkerPlan
    from twostroke.cost.simulation.deployment import Deployment

MOST_ROWS = 12


def label(deployment: Deployment) -> str:
    return f"{devices(deployment)}{deployment.device.name}, {weights(deployment)}"


def devices(deployment: Deployment) -> str:
    return f"{deployment.gpus} × " if deployment.gpus > 1 else ""


def weights(deployment: Deployment) -> str:
    if deployment.config.quantize is None and deployment.stored_bytes is not None:
        return "as stored"
    if deployment.config.quantize is None and deployment.precision in PUBLISHED:
        return "as published"
    return deployment.config.quantize or deployment.precision


def show_sizing(found: Sizing) -> None:
    deployment = found.deployment
    console.print(f"[bold]{devices(deployment)}{deployment.device.title}, weights {weights(deployment)}: one worker[/]")
    table = Table(header_style="bold")
    for name in ("", "prefill", "decode"):
        table.add_column(name, justify="right" if name else "left")
    p, d = found.prefill, found.decode
    table.add_row("alone", f"TTFT {seconds(p.seconds)}", f"TPOT {seconds(d.seconds)}")
    table.add_row(f"batch of {found.batch}", f"TTFT ≥ {seconds(p.batch_seconds)}", f"TPOT {seconds(d.batch_seconds)}")
    table.add_row("FLOP per byte", f"{p.intensity:,.0f}", f"{d.intensity:,.1f}")
    table.add_row(f"bound by (ridge {found.ridge:,.0f})", p.bound, d.bound)
    table.add_row("tokens/s at most", f"{p.tokens_rate:,.0f}", f"{d.tokens_rate:,.0f}")
    table.add_row("$ per million tokens", f"{p.dollars_per_million:,.3f}", f"{d.dollars_per_million:,.3f}")
    console.print(table)
    console.print(
        f"{found.parameters:,} parameters, weights {found.weight_bytes:,} bytes · "
        f"KV {kv_text(deployment.settings.layout)}, {found.kv_bytes:,} bytes in all · "
        f"memory holds the K and V of {found.largest_batch:,} requests of {found.prompt:,} + {found.output:,} tokens; "
        f"at most {deployment.settings.max_requests:,} run at once (max_requests)"
    )
    for told in (published_text(deployment), context_text(deployment)):
        if told is not None:
            console.print(told)
    prices = (
        "this machine counts as one dollar an hour"
        if deployment.device.price is None
        else "prices are typical on-demand ones, yours may differ"
    )
    console.print(f"[dim]Times by {source(deployment)}; {prices}.[/dim]")


def published_text(deployment: Deployment) -> str | None:
    """What a published format is, and what the engine holds of it where that is more."""
    if weights(deployment) != "as published":
        return None
    now = deployment.precision
    told = f"Weights as published: {PUBLISHED[now]}."
    if HELD[now] == now:
        return told
    held = replace(deployment, precision=HELD[now]).model.bytes
    narrow = "; -s quantize=fp8 keeps a byte a weight" if HELD[now] == "bfloat16" else ""
    return f"{told} This engine decodes squares of fp8 to bfloat16, and would hold {held:,} bytes{narrow}."


def context_text(deployment: Deployment) -> str | None:
    """Why a long context is cheap, where attention makes it so."""
    arch, size = deployment.arch, KV_BITS["bfloat16"] // 8
    latent = [(mixer, layers) for mixer, layers in arch.mixers if isinstance(mixer, LatentArch)]
    if latent:
        mixer, _ = latent[0]
        heads = sum(layers * one.heads * (one.plain_dim + one.rope_dim + one.value_dim) for one, layers in latent)
        return (
            f"Long contexts are cheap: latent attention caches {mixer.cached} numbers of a token in a layer for all "
            f"{mixer.heads} heads. K and V of each head would take {size * heads:,} bytes a token."
        )
    compressed = [(mixer, layers) for mixer, layers in arch.mixers if isinstance(mixer, CompressedArch)]
    ratios = " or ".join(str(ratio) for ratio in sorted({one.ratio for one, _ in compressed if one.ratio}))
    if not ratios:
        return None
    keys = sum(layers * one.dim for one, layers in compressed)
    return (
        f"Long contexts are cheap: beside a window of {compressed[0][0].window} tokens, an entry stands for {ratios} "
        f"tokens. A key for each token would take {size * keys:,} bytes a token."
    )


def kv_text(layout: KVLayout) -> str:
    """Bytes of a token, and of what a window bounds."""
    from twostroke.cost.model.roofline import lasting_bytes, window_bytes

    in_windows = f" and {window_bytes(layout):,} bytes a request in windows" if window_bytes(layout) else ""
    return f"{round(lasting_bytes(layout)):,} bytes a token{in_windows}"


def source(deployment: Deployment) -> str:
    """Where the times come from, with the shares of the datasheet's peaks that are assumed."""
    from twostroke.cost.model.rates import BANDWIDTH_REACHED, COMPUTE_REACHED

    rates, device = deployment.roofline().rates, deployment.device
    if deployment.rates is not None:
        return rates.source
    peak = device.peak(deployment.model.precision) / 1e12
    return (
        f"{rates.source}: {BANDWIDTH_REACHED[device.kind]:.0%} of {device.bandwidth / 1e9:,.0f} GB/s and "
        f"{COMPUTE_REACHED[device.kind]:.0%} of {peak:,.0f} TFLOP/s are assumed"
    )


def show_needs(found: WorkerPlan, demand: Demand, highest: float | None, search: bool) -> None:
    title = f"{per_second(demand.per_second)} with {demand.targets} for 95 % of requests"
    table = Table(title=title, header_style="bold", title_justify="left")
    for name in ("worker", "workers", "$/hour", "$/M out", "TTFT p95", "TPOT p95", "hits"):
        table.add_column(name, justify="left" if name == "worker" else "right")
    for need in found.needs[:MOST_ROWS]:
        s = need.outcome.summary
        count = f"{need.prefill} prefill + {need.workers} decode" if need.prefill else str(need.workers)
        money = [f"{value:,.2f}" for value in (need.dollars_per_hour, need.dollars_per_million)]
        times = [seconds(s.ttft.p95), seconds(s.tpot.p95)]
        table.add_row(label(need.deployment), count, *money, *times, f"{s.hit_rate:.0%}")
    if found.needs:
        console.print(table)
        console.print(f"[dim]{simulated(found.needs)}[/dim]")
        if any(need.prefill for need in found.needs):
            console.print("[dim]`twostroke cluster --prefill P --decode D` runs two pools.[/dim]")
    if highest is not None:
        best = found.needs[0]
        count = f"{best.prefill} prefill + {best.workers} decode" if best.prefill else f"{best.workers}"
        console.print(
            f"The first row ({count} × {label(best.deployment)}) serves up to about {highest:,.3g} requests/s within "
            "the targets."
        )
    show_dropped(found, search)


def simulated(needs: list[Need]) -> str:
    """How long was simulated, and what hits are."""
    requests, times = [need.trial.requests for need in needs], [need.trial.seconds for need in needs]
    least, most = (f"{min(requests):,}", f"{max(requests):,}")
    count = most if least == most else f"{least} to {most}"
    span = seconds(max(times)) if max(times) < 1.2 * min(times) else f"{seconds(min(times))} to {seconds(max(times))}"
    closely = len({need.trial.close for need in needs}) > 1
    how = ", the first row more closely than the others" if closely else ""
    return (
        f"Each fleet was simulated until its percentiles were steady or the load ended{how}: {count} requests, "
        f"{span} of load. hits: the share of prompt tokens that this load finds in the prefix cache."
    )


def show_dropped(found: WorkerPlan, search: bool) -> None:
    """One line for each kind of worker that is not in the table; in a search only how many there are."""
    pricier = [one for one in found.dropped if one.reason.startswith("not simulated")]
    rest = [one for one in found.dropped if one not in pricier]
    if search:
        if found.dropped:
            console.print(
                f"[dim]{len(pricier)} kinds of workers were not simulated: their estimate is far above the cheapest. "
                f"{len(rest)} do not meet the targets.[/dim]"
            )
        return
    for one in found.dropped:
        pools = " with two pools" if one.split else ""
        console.print(f"{label(one.deployment)}{pools}: [yellow]left out[/], {escape(one.reason)}")


def show_drafts(deployment: Deployment, draft: str, acceptance: float, context: int) -> None:
    """TPOT with drafts beside that without, for several batches."""
    from twostroke.cli.deployment import describe
    from twostroke.cost.model.drafts import DraftQuality, DraftSource, best_length
    from twostroke.cost.simulation.deployment import Deployment as Kind
    from twostroke.draft.speculate import STREAMS

    line, helper = deployment.roofline(), None
    if draft != "lookup":
        arch, stored, published = describe(draft, deployment.device.kind)
        precision = deployment.config.quantize or deployment.precision
        if precision in PUBLISHED:  # of the target's file, not of the draft's
            precision = published or "bfloat16"
        exact = stored if deployment.stored_bytes is not None else None  # --precision and dtype hold for both
        helper = Kind(arch, deployment.device, deployment.config, precision, exact, gpus=deployment.gpus).roofline()
    how = "prompt lookup" if helper is None else f"drafts of {draft}"
    table = Table(
        title=f"TPOT with {how}, {acceptance:.0%} of the drafted tokens right, {context:,} tokens of context",
        header_style="bold", title_justify="left",
    )  # fmt: skip
    for name in ("streams", "without", "with", "speed-up", "drafted", "tokens/step"):
        table.add_column(name, justify="right")
    drafts = DraftQuality((DraftSource(1.0, acceptance),), STREAMS[deployment.device.kind], helper)
    for streams in (1, 2, 4, 8, 16, 32, 64):
        if streams > deployment.settings.max_requests:
            break
        alone = line.decode_seconds(streams, context)
        best = best_length(line, drafts, streams, context)
        table.add_row(
            str(streams), seconds(alone), seconds(best.tpot), f"×{alone / best.tpot:.2f}", str(best.length),
            f"{best.tokens:.2f}",
        )  # fmt: skip
    console.print(table)
