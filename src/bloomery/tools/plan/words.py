"""A forecast in words, as a table a person reads, and as a picture."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from textwrap import fill

from bloomery.config import sizes
from bloomery.errors import ConfigError
from bloomery.tools.plan.forecast import COUNTS, READING, Forecast, Layout, largest_step, layouts
from bloomery.tools.plot import Series, chart
from bloomery.roofline import (
    LIBRARY,
    MACHINES,
    Machine,
    kv_bytes_per_token,
    parameters,
    peak_bytes,
    weights_bytes,
)


def advice(plan: Forecast) -> list[str]:
    """TP, PP or replicas, in the terms of the talk the project began with."""
    chosen = plan.chosen
    context = plan.context
    wish = plan.wish
    if not plan.fitting and not wish.layout:
        return [
            f"{plan.subject.name} in {wish.precision.name} does not fit {chosen.layout.devices} x {wish.machine.title} "
            f"at a context of {context:,}: take a narrower precision (--precision int4) or a larger device."
        ]
    alone = chosen.expected(1, context) * 1e3
    layout = chosen.layout
    lines = []
    if wish.context > context:
        lines.append(
            f"A context of {wish.context:,} is beyond what it was made for: planned for {context:,}."
        )
    if layout.devices == 1:
        lines.append(
            f"It fits one device: neither TP nor PP is needed, {size(chosen.room)} are left for the cache."
        )
    if layout.tp > 1:
        count, _ = chosen.roofline.messages(1, 1)
        spent = chosen.roofline.communication(1, 1) * 1e3
        lines.append(
            f"TP {layout.tp} is good for latency: every matrix is read by {layout.tp} devices at once. Lots of "
            f"communication is its price: {count} messages a token, {spent:.2f} of {alone:.2f} ms."
        )
    if layout.pp > 1:
        lines.append(
            f"PP {layout.pp} is good for throughput: little communication, {layout.pp - 1} more a token; but a "
            f"token passes the stages one after another, {alone:.1f} ms alone, and only many streams keep them busy."
        )
    if layout.replicas > 1:
        lines.append(
            f"The {layout.replicas} replicas do not talk to each other: each serves its own streams."
        )
    return lines + _spared(plan) + _more(plan)


def _spared(plan: Forecast) -> list[str]:
    """Why the simple way, stage after stage, was not taken for throughput."""
    plain = next(
        (option for option in plan.fitting if option.layout.tp == option.layout.replicas == 1), None
    )
    chosen = plan.chosen.layout
    if plan.wish.goal != "throughput" or plain is None or chosen.pp > 1 or chosen.tp == 1:
        return []
    stages = plain.layout.pp
    most = plain.largest(plan.context)
    return [
        f"PP {stages} would send only {stages - 1} messages a token, but each stage reads its weights anew for every "
        f"{ceil(most / stages)} of the {most} sequences that fit: {plan.throughput(plain):,.0f} tokens/s against "
        f"{plan.throughput(plan.chosen):,.0f}."
    ]


def _more(plan: Forecast) -> list[str]:
    """What a second device would bring where one is enough."""
    if plan.chosen.layout.devices > 1:
        return []
    options = [
        plan.placed(layout)
        for layout in (Layout(2), Layout(1, 1, 2))
        if layout in layouts(plan.model, 2)
    ]
    return [
        f"With a second device, {option.layout}: {option.expected(1, plan.context) * 1e3:.2f} ms a token alone, "
        f"{plan.throughput(option):,.0f} tokens/s in all."
        for option in options
    ]


def size(count: float, unit: str = "B") -> str:
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.4g} {prefix}{unit}"
    return f"{count:.0f} {unit}"


def text(plan: Forecast) -> str:
    model = plan.model
    wish = plan.wish
    chosen = plan.chosen
    context = plan.context
    attention = model.layers[0].attention
    count = parameters(model)
    weights = weights_bytes(model, wish.precision)
    tokens, activations = largest_step(model, wish.machine)
    heads = f"{attention.num_heads} heads"
    if attention.num_kv_heads != attention.num_heads:
        heads += f" over {attention.num_kv_heads} of keys and values"
    lines = [
        f"{plan.subject.name}: {count.total / 1e9:.3g} billion parameters, {len(model.layers)} layers of "
        f"{model.hidden}, {heads}, context {model.context:,}",
        "",
        f"  weights          {size(weights):>9}  ({gib(weights)} GiB) in {wish.precision.name}, "
        f"{wish.precision.bits / 8:.3g} bytes a parameter of the layers",
        f"  keys and values  {size(kv_bytes_per_token(model, wish.kv_bits)):>9}  a token, "
        f"{size(context * kv_bytes_per_token(model, wish.kv_bits))} for {context:,}",
        f"  activations      {size(activations):>9}  in a step of {tokens:,} tokens",
        *_memory_lines(plan),
        "",
        *_machine_lines(plan),
        "",
        f"A token at context {context:,}, {wish.precision.name}, {chosen.layout} of {wish.machine.title}",
        *_row_lines(plan),
        "",
        *_capacity_lines(plan),
        "",
        *_option_lines(plan),
        *(fill(line, 116) for line in advice(plan)),
    ]
    return "\n".join(lines)


def gib(count: float) -> str:
    return f"{count / 2**30:.4g}"


def _memory_lines(plan: Forecast) -> list[str]:
    """What others need: libraries that unpack to multiply, and attention that stores its scores."""
    peaks = " / ".join(gib(peak_bytes(plan.model, precision)) for precision in LIBRARY.values())
    lines = [
        f"  (in {' / '.join(LIBRARY)} a library without kernels of its own peaks at {peaks} GiB)",
        "",
        f"  memory for a prompt of  {'tokens':>8}{'queries x keys, a layer':>36}{'in tiles, as it is done here':>32}",
    ]
    for row in plan.prompt_memory():
        scores = f"{size(row['scores_bytes'])} ({gib(row['scores_bytes'])} GiB)"
        lines.append(f"  {'':22}  {row['tokens']:>8,}{scores:>36}{size(row['tiled_bytes']):>32}")
    return lines


def _known(machine: Machine) -> str:
    if machine.measured:
        return "measured"
    return (
        "an estimate: `bloomery plan --measure` knows in seconds"
        if machine.cpu
        else "by its data sheet"
    )


def _machine_lines(plan: Forecast) -> list[str]:
    """What fits: this machine by precision, then the fewest devices of every kind."""
    wish = plan.wish
    context = plan.context
    rate = wish.machine.rate(wish.precision.compute)
    lines = [
        f"{wish.machine.title}: {size(wish.machine.memory)}, reads {size(wish.machine.bandwidth)}/s, "
        f"{size(rate, 'FLOP')}/s ({_known(wish.machine)})",
        f"  {'precision':12}{'weights':>10}{'devices':>9}{'longest':>11}{f'sequences of {context:,}':>21}"
        f"{'ms a token, alone':>20}",
    ]
    for precision in plan.precisions():
        count = plan.devices_for(wish.machine, precision)
        weights = size(weights_bytes(plan.model, precision))
        if count is None:
            lines.append(f"  {precision.name:12}{weights:>10}{f'> {COUNTS[-1]}':>9}")
            continue
        ways = [plan.placed(layout, precision=precision) for layout in layouts(plan.model, count)]
        best = max(ways, key=lambda placed: placed.largest(context) * placed.layout.replicas)
        longest = max(placed.longest() for placed in ways)
        alone = min(placed.expected(1, context) for placed in ways if placed.largest(context)) * 1e3
        fits = f"{longest:>11,}{best.largest(context):>21,}{alone:>20.2f}"
        lines.append(f"  {precision.name:12}{weights:>10}{count:>9}{fits}")
    return [*lines, "", *_elsewhere(plan)]


def _elsewhere(plan: Forecast) -> list[str]:
    """The fewest devices of every kind in the table."""
    precisions = plan.precisions()
    needed = {
        name: [plan.devices_for(known, p) for p in precisions] for name, known in MACHINES.items()
    }
    if all(count == 1 for counts in needed.values() for count in counts):
        return [
            f"It fits one device of every kind in the table, at every precision and a context of {plan.context:,}."
        ]
    lines = [
        f"Fewest devices for a sequence of {plan.context:,}",
        f"  {'':12}" + "".join(f"{p.name:>8}" for p in precisions),
    ]
    for name, counts in needed.items():
        lines.append(f"  {name:12}" + "".join(f"{count or '-':>8}" for count in counts))
    return lines


def _option_lines(plan: Forecast) -> list[str]:
    if len(plan.fitting) < 2:
        return []
    devices = plan.chosen.layout.devices
    lines = [
        f"{devices} devices can be used so",
        f"  {'':28}{'ms alone':>10}{'tokens/s in all':>17}{'messages':>10}",
    ]
    for option in plan.fitting:
        alone = option.expected(1, plan.context) * 1e3
        count = option.roofline.messages(1, 1)[0]
        mark = "  <- " + plan.wish.goal if option.layout == plan.chosen.layout else ""
        lines.append(
            f"  {option.layout!s:28}{alone:>10.2f}{plan.throughput(option):>17,.0f}{count:>10}{mark}"
        )
    return [*lines, ""]


def _row_lines(plan: Forecast) -> list[str]:
    priced = plan.wish.price is not None
    head = f"  {'batch':>6}{'floor ms':>10}{'expected ms':>13}{'share':>7}{'tokens/s':>10}{'bound by':>11}"
    lines = [head + (f"{'cost of a million':>19}" if priced else "")]
    for row in plan.rows((plan.context,)):
        line = (
            f"  {row.batch:>6}{row.floor_ms:>10.2f}{row.expected_ms:>13.2f}{row.floor_ms / row.expected_ms:>7.0%}"
            f"{row.tokens_per_second:>10,.0f}{row.bound:>11}"
        )
        cost = f"{row.cost:>19.2f}" if row.cost is not None else ""
        lines.append(line + cost + ("" if row.fits else "  does not fit"))
    return lines


def _capacity_lines(plan: Forecast) -> list[str]:
    chosen = plan.chosen
    context = plan.context
    floor, expected = chosen.prefill(context)
    users = chosen.users(context)
    lines = [
        f"  largest batch    {chosen.largest(context) * chosen.layout.replicas:,} sequences of {context:,}",
        f"  users            {users:,} reading {READING:g} tokens/s each",
        f"  a prompt         {context:,} tokens: floor {floor * 1e3:.1f} ms, expected {expected * 1e3:.1f} ms",
    ]
    if asked := wanted(plan, users // chosen.layout.replicas):
        lines.insert(2, f"  for all of them  bloomery serve {asked}")
    if plan.wish.price is not None and users:
        each = max(1, users // chosen.layout.replicas)
        cost = chosen.row(each, context, plan.wish.price).cost
        lines.append(
            f"  cost             {cost:.2f} a million tokens with that many users, {plan.wish.price:g} an hour a device"
        )
    return lines


def wanted(plan: Forecast, users: int) -> str:
    """Flags without which an engine takes fewer users: a CPU's keeps no more positions than it must."""
    chosen = plan.chosen
    context = plan.context
    most = max(8192, plan.model.context)
    flags = [f"--max-sequences {users}"] if users > sizes(chosen.machine.cpu)[1] else []
    if chosen.machine.cpu and users * context > most:
        held = users * chosen.sequence_bytes(context) * chosen.layout.tp * chosen.layout.pp
        flags.append(f"--kv-cache-gib {held / 2**30 + 0.05:.1f}")
    return " ".join(flags)


# ---- as a picture ----------------------------------------------------------------------------------


def curves(plan: Forecast) -> list[Series]:
    """Latency against throughput, a point a batch."""
    most = max(plan.chosen.largest(plan.context), 1)
    batches = sorted({*(2**i for i in range(13) if 2**i <= most), most})
    rows = [plan.chosen.row(batch, plan.context) for batch in batches]
    labels = [str(row.batch) for row in rows]
    replicas = plan.chosen.layout.replicas
    return [
        Series("expected", [(row.tokens_per_second, row.expected_ms) for row in rows], labels),
        Series(
            "floor",
            [(row.batch * replicas / row.floor_ms * 1e3, row.floor_ms) for row in rows],
            dashed=True,
        ),
    ]


def plot(plan: Forecast, path: Path) -> None:
    title = f"{plan.subject.name}, {plan.wish.precision.name}, {plan.chosen.layout}, {plan.wish.machine.title}"
    axes = ("tokens/s of the whole batch", f"ms a token, context {plan.context:,}")
    if path.suffix == ".svg":
        path.write_text(chart(title, *axes, curves(plan), log_x=True, log_y=True))
    elif path.suffix == ".png":
        _png(path, title, axes, curves(plan))
    else:
        raise ConfigError(f"--plot {path}: the name must end in .svg or .png")


def _png(path: Path, title: str, axes: tuple[str, str], series: list[Series]) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"--plot {path}: PNG needs matplotlib (pip install matplotlib); .svg needs nothing"
        ) from None
    figure = Figure(figsize=(8, 5))
    axis = figure.add_subplot()
    for line in series:
        xs, ys = zip(*line.points)
        axis.loglog(xs, ys, "--" if line.dashed else "o-", label=line.name)
        for (a, b), label in zip(line.points, line.labels):
            axis.annotate(label, (a, b), textcoords="offset points", xytext=(4, 4))
    axis.set(title=title, xlabel=axes[0], ylabel=axes[1])
    axis.legend()
    figure.savefig(path, dpi=120)
