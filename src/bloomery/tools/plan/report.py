"""The report of `bloomery plan`: an estimate as text, as advice, and as a plot."""

from __future__ import annotations

from math import ceil
from pathlib import Path
from textwrap import fill

from bloomery.config import default_batch_limits
from bloomery.errors import ConfigError
from bloomery.hardware import HARDWARE_SPECS, HardwareSpec
from bloomery.roofline import (
    LIBRARY_PRECISIONS,
    count_parameters,
    kv_bytes_per_token,
    peak_bytes,
    weights_bytes,
)
from bloomery.tools.plan.estimate import (
    DEVICE_COUNTS,
    READING_SPEED,
    DeviceLayout,
    PlanEstimate,
    device_layouts,
    largest_step,
)
from bloomery.tools.plot import ChartSeries, draw_chart

ADVICE_WIDTH = 116  # columns
MIN_CPU_KV_POSITIONS = 8192  # positions a CPU's default KV cache holds at least

# ---- advice --------------------------------------------------------------------------------------


def give_advice(plan: PlanEstimate) -> list[str]:
    """Sentences that explain the chosen layout of TP, PP and replicas."""
    chosen = plan.chosen
    options = plan.options
    layout = chosen.layout
    if not plan.fitting and not options.layout:
        return [
            f"{plan.source.name} in {options.precision.name} does not fit "
            f"{layout.devices} x {options.hardware.title} at a context of {plan.context:,}: "
            "take a narrower precision (--precision int4) or a larger device."
        ]
    alone_ms = chosen.decode_seconds(1, plan.context) * 1e3
    sentences = []
    if options.context > plan.context:
        sentences.append(
            f"The model supports a context of at most {plan.context:,}: "
            f"this plan uses it instead of {options.context:,}."
        )
    if layout.devices == 1:
        sentences.append(
            "The model fits one device, so neither TP nor PP is needed; "
            f"{format_quantity(chosen.free_kv_bytes)} are left for the KV cache."
        )
    if layout.tp > 1:
        num_messages, _ = chosen.roofline.count_messages(1, 1)
        messages_ms = chosen.roofline.communication_seconds(1, 1) * 1e3
        sentences.append(
            f"TP {layout.tp} is good for latency: {layout.tp} devices read every matrix at once. "
            f"It needs much communication: {num_messages} messages a token take "
            f"{messages_ms:.2f} of {alone_ms:.2f} ms."
        )
    if layout.pp > 1:
        sentences.append(
            f"PP {layout.pp} is good for throughput: it adds only {layout.pp - 1} messages a "
            f"token. But a token passes the stages one after another, in {alone_ms:.1f} ms at "
            "batch 1, and only many streams keep all stages busy."
        )
    if layout.replicas > 1:
        sentences.append(
            f"The {layout.replicas} replicas do not communicate: each serves its own streams."
        )
    return sentences + _advise_on_pipeline(plan) + _advise_on_second_device(plan)


def _advise_on_pipeline(plan: PlanEstimate) -> list[str]:
    """Explain why a pipeline without TP was not chosen for throughput."""
    chosen = plan.chosen.layout
    pipelines = [
        placed for placed in plan.fitting if placed.layout.tp == placed.layout.replicas == 1
    ]
    if plan.options.goal != "throughput" or not pipelines or chosen.pp > 1 or chosen.tp == 1:
        return []
    pipeline = pipelines[0]
    stages = pipeline.layout.pp
    max_batch = pipeline.max_batch_size(plan.context)
    return [
        f"PP {stages} would send only {stages - 1} messages a token, but each stage reads its "
        f"weights again for every {ceil(max_batch / stages)} of the {max_batch} sequences that "
        f"fit: {plan.throughput(pipeline):,.0f} tokens/s against "
        f"{plan.throughput(plan.chosen):,.0f}."
    ]


def _advise_on_second_device(plan: PlanEstimate) -> list[str]:
    """Estimate what a second device would gain where one is enough."""
    if plan.chosen.layout.devices > 1:
        return []
    sentences = []
    possible = list(device_layouts(plan.model, 2))
    for layout in (DeviceLayout(tp=2), DeviceLayout(replicas=2)):
        if layout not in possible:
            continue
        placed = plan.place(layout)
        alone_ms = placed.decode_seconds(1, plan.context) * 1e3
        sentences.append(
            f"With a second device, {layout}: {alone_ms:.2f} ms a token at batch 1, "
            f"{plan.throughput(placed):,.0f} tokens/s in all."
        )
    return sentences


# ---- text ----------------------------------------------------------------------------------------


def format_quantity(value: float, unit: str = "B") -> str:
    """A number with a decimal prefix: 16.06 GB."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:.0f} {unit}"


def format_gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.4g}"


def format_report(plan: PlanEstimate) -> str:
    model = plan.model
    options = plan.options
    context = plan.context
    attention = next(iter(model.attentions), None)
    num_billions = count_parameters(model).total / 1e9
    weights = weights_bytes(model, options.precision)
    token_bytes = kv_bytes_per_token(model, options.kv_bits)
    step_tokens, activations = largest_step(model, options.hardware)
    heads = f"{attention.num_heads} heads" if attention else "no attention"
    if attention and attention.num_kv_heads != attention.num_heads:
        heads += f" over {attention.num_kv_heads} KV heads"
    lines = [
        f"{plan.source.name}: {num_billions:.3g} billion parameters, {len(model.layers)} layers of "
        f"{model.hidden}, {heads}, context {model.context:,}",
        *_vision_lines(plan),
        "",
        f"  weights          {format_quantity(weights):>9}  ({format_gib(weights)} GiB) in "
        f"{options.precision.name}, {options.precision.bits / 8:.3g} bytes a parameter of the "
        "layers",
        f"  KV cache         {format_quantity(token_bytes):>9}  a token, "
        f"{format_quantity(plan.sequence_kv_bytes())} for {context:,}",
        *_cache_group_lines(plan),
        f"  activations      {format_quantity(activations):>9}  in a step of "
        f"{step_tokens:,} tokens",
        *_adapter_lines(plan),
        *_prompt_memory_lines(plan),
        "",
        *_hardware_lines(plan),
        "",
        f"Decode steps at context {context:,}, {options.precision.name}, {plan.chosen.layout} of "
        f"{options.hardware.title}",
        *_batch_lines(plan),
        "",
        *_capacity_lines(plan),
        "",
        *_layout_lines(plan),
        *(fill(sentence, ADVICE_WIDTH) for sentence in give_advice(plan)),
    ]
    return "\n".join(lines)


def _vision_lines(plan: PlanEstimate) -> list[str]:
    if not plan.source.text_part_only:
        return []
    return ["  text only: the vision part of this model is neither loaded nor counted"]


def _cache_group_lines(plan: PlanEstimate) -> list[str]:
    """What layers with a sliding window or a recurrent state keep, if there are any."""
    groups = [group for group in plan.chosen.cache_layout.groups if not group.state_blocks]
    if all(group.window is None for group in groups):
        return _state_lines(plan)
    parts = [
        ("1 layer keeps " if group.num_layers == 1 else f"{group.num_layers} layers keep ")
        + ("all positions" if group.window is None else f"the last {group.window:,}")
        for group in groups
    ]
    return [f"{'':29}{', '.join(parts)}", *_state_lines(plan)]


def _state_lines(plan: PlanEstimate) -> list[str]:
    """The memory of recurrent states, and how many checkpoints of them fit."""
    chosen = plan.chosen
    if chosen.cache_layout.states is None:
        return []
    num_layers = len(plan.model.recurrents)
    num_ranks = chosen.layout.tp * chosen.layout.pp
    state = chosen.state_bytes_per_sequence * num_ranks
    num_users = max(chosen.max_users(plan.context) // chosen.layout.replicas // 2, 1)
    num_checkpoints = chosen.count_checkpoints(num_users, plan.context)
    users = "1 user" if num_users == 1 else f"{num_users:,} users"
    return [
        f"{'':29}of which {format_quantity(state)} the state of {num_layers} recurrent layers",
        f"  checkpoints      {format_quantity(state):>9}  a state to resume a prefix from; "
        f"{num_checkpoints:,} fit beside {users}",
    ]


def _adapter_lines(plan: PlanEstimate) -> list[str]:
    """The memory of LoRA adapters on a device and in its host, and what the times assume."""
    adapters = plan.chosen.adapters
    if adapters is None:
        return []
    limits = adapters.limits
    each = "" if plan.chosen.layout.devices == 1 else " on each device"
    device_bytes = adapters.slots_bytes + adapters.step_bytes
    return [
        f"  LoRA adapters    {format_quantity(device_bytes):>9}  {limits.max_loras} slots of rank "
        f"{limits.max_rank}, {format_quantity(adapters.adapter_bytes)} each, and "
        f"{format_quantity(adapters.step_bytes)} in a step{each}",
        f"{'':29}host memory{each}: {format_quantity(adapters.host_bytes)} for "
        f"{limits.max_cpu_loras} adapters",
        f"{'':29}times below: each sequence has an adapter, of up to {limits.max_loras}",
    ]


def _prompt_memory_lines(plan: PlanEstimate) -> list[str]:
    """Memory that other software needs, for dequantized matrices and stored attention scores."""
    names = " / ".join(LIBRARY_PRECISIONS)
    peaks = " / ".join(
        format_gib(peak_bytes(plan.model, precision)) for precision in LIBRARY_PRECISIONS.values()
    )
    scores_title = "queries x keys, a layer"
    tiled_title = "in tiles, as it is done here"
    lines = [
        f"  (a library without fused kernels peaks at {peaks} GiB in {names})",
        "",
        f"  memory for a prompt of  {'tokens':>8}{scores_title:>36}{tiled_title:>32}",
    ]
    for row in plan.prompt_memory():
        scores = f"{format_quantity(row['scores_bytes'])} ({format_gib(row['scores_bytes'])} GiB)"
        tiled = format_quantity(row["tiled_bytes"])
        lines.append(f"  {'':22}  {row['tokens']:>8,}{scores:>36}{tiled:>32}")
    return lines


def _rates_origin(hardware: HardwareSpec) -> str:
    if hardware.measured:
        return "measured"
    if hardware.is_cpu:
        return "an estimate: `bloomery plan --measure` measures it in seconds"
    return "by its data sheet"


def _hardware_lines(plan: PlanEstimate) -> list[str]:
    """The capacity of this hardware at each precision, then the fewest devices of every kind."""
    hardware = plan.options.hardware
    context = plan.context
    rate = hardware.rate(plan.options.precision.compute_format)
    sequences_title = f"sequences of {context:,}"
    lines = [
        f"{hardware.title}: {format_quantity(hardware.memory_bytes)}, "
        f"reads {format_quantity(hardware.bandwidth)}/s, "
        f"{format_quantity(rate, 'FLOP')}/s ({_rates_origin(hardware)})",
        f"  {'precision':12}{'weights':>10}{'devices':>9}{'longest':>11}{sequences_title:>21}"
        f"{'ms a token (TPOT), alone':>27}",
    ]
    for precision in plan.compared_precisions():
        num_devices = plan.devices_for(hardware, precision)
        weights = format_quantity(weights_bytes(plan.model, precision))
        start = f"  {precision.name:12}{weights:>10}"
        if num_devices is None:
            lines.append(f"{start}{f'> {DEVICE_COUNTS[-1]}':>9}")
            continue
        candidates = [
            plan.place(layout, precision=precision)
            for layout in device_layouts(plan.model, num_devices)
        ]
        fitting = [placed for placed in candidates if placed.max_batch_size(context)]
        longest = max(placed.max_context() for placed in candidates)
        largest = max(
            candidates, key=lambda placed: placed.max_batch_size(context) * placed.layout.replicas
        )
        alone_ms = min(placed.decode_seconds(1, context) for placed in fitting) * 1e3
        max_batch = largest.max_batch_size(context)
        lines.append(f"{start}{num_devices:>9}{longest:>11,}{max_batch:>21,}{alone_ms:>27.2f}")
    return [*lines, "", *_min_devices_lines(plan)]


def _min_devices_lines(plan: PlanEstimate) -> list[str]:
    """The fewest devices of every kind in the table."""
    precisions = plan.compared_precisions()
    min_devices = {
        name: [plan.devices_for(hardware, precision) for precision in precisions]
        for name, hardware in HARDWARE_SPECS.items()
    }
    if all(count == 1 for counts in min_devices.values() for count in counts):
        return [
            "The model fits one device of every kind in the table, at every precision and a "
            f"context of {plan.context:,}."
        ]
    lines = [
        f"Fewest devices for a sequence of {plan.context:,}",
        f"  {'':12}" + "".join(f"{precision.name:>8}" for precision in precisions),
    ]
    for name, counts in min_devices.items():
        lines.append(f"  {name:12}" + "".join(f"{count or '-':>8}" for count in counts))
    return lines


def _layout_lines(plan: PlanEstimate) -> list[str]:
    if len(plan.fitting) < 2:
        return []
    lines = [
        f"Possible layouts of {plan.chosen.layout.devices} devices",
        f"  {'':28}{'ms alone':>10}{'tokens/s in all':>17}{'messages':>10}",
    ]
    for placed in plan.fitting:
        alone_ms = placed.decode_seconds(1, plan.context) * 1e3
        throughput = plan.throughput(placed)
        num_messages = placed.roofline.count_messages(1, 1)[0]
        is_chosen = placed.layout == plan.chosen.layout
        mark = f"  <- {plan.options.goal}" if is_chosen else ""
        lines.append(
            f"  {placed.layout!s:28}{alone_ms:>10.2f}{throughput:>17,.0f}{num_messages:>10}{mark}"
        )
    return [*lines, ""]


def _batch_lines(plan: PlanEstimate) -> list[str]:
    header = (
        f"  {'batch':>6}{'floor ms':>10}{'expected ms (TPOT)':>20}{'share':>7}{'tokens/s':>10}"
        f"{'bound by':>11}"
    )
    if plan.options.price is not None:
        header += f"{'cost of a million':>19}"
    lines = [header]
    for row in plan.batch_estimates((plan.context,)):
        share = row.floor_ms / row.expected_ms
        line = (
            f"  {row.batch:>6}{row.floor_ms:>10.2f}{row.expected_ms:>20.2f}{share:>7.0%}"
            f"{row.tokens_per_second:>10,.0f}{row.bound:>11}"
        )
        if row.cost is not None:
            line += f"{row.cost:>19.2f}"
        if not row.fits:
            line += "  does not fit"
        lines.append(line)
    return lines


def _capacity_lines(plan: PlanEstimate) -> list[str]:
    chosen = plan.chosen
    context = plan.context
    replicas = chosen.layout.replicas
    floor, expected = chosen.prefill_seconds(context)
    num_users = chosen.max_users(context)
    users_per_replica = num_users // replicas
    max_batch = chosen.max_batch_size(context) * replicas
    lines = [
        f"  largest batch    {max_batch:,} sequences of {context:,}",
        f"  users            {num_users:,} reading {READING_SPEED:g} tokens/s each",
    ]
    if flags := serve_flags(plan, users_per_replica):
        lines.append(f"  for all of them  bloomery serve {flags}")
    lines.append(
        f"  prefill (TTFT)   {context:,} tokens: floor {floor * 1e3:.1f} ms, "
        f"expected {expected * 1e3:.1f} ms"
    )
    price = plan.options.price
    if price is not None and num_users:
        cost = chosen.estimate_batch(max(1, users_per_replica), context, price).cost
        lines.append(
            f"  cost             {cost:.2f} a million tokens with that many users, "
            f"{price:g} an hour a device"
        )
    return lines


def serve_flags(plan: PlanEstimate, num_users: int) -> str:
    """Flags of `bloomery serve` without which an engine takes fewer users than estimated."""
    chosen = plan.chosen
    hardware = chosen.hardware
    flags = []
    _, default_num_seqs = default_batch_limits(hardware.is_cpu)
    if num_users > default_num_seqs:
        flags.append(f"--max-num-seqs {num_users}")
    # A CPU's default KV cache holds no more positions than one longest sequence needs.
    default_positions = max(MIN_CPU_KV_POSITIONS, plan.model.context)
    if hardware.is_cpu and num_users * plan.context > default_positions:
        num_ranks = chosen.layout.tp * chosen.layout.pp
        kv_bytes = num_users * chosen.kv_bytes_per_sequence(plan.context) * num_ranks
        flags.append(f"--kv-cache-gib {kv_bytes / 2**30 + 0.05:.1f}")
    return " ".join(flags)


# ---- plot ----------------------------------------------------------------------------------------


def latency_curves(plan: PlanEstimate) -> list[ChartSeries]:
    """Latency over throughput: one point for each batch size, expected and floor."""
    max_batch = max(plan.chosen.max_batch_size(plan.context), 1)
    powers = {2**i for i in range(13) if 2**i <= max_batch}
    rows = [
        plan.chosen.estimate_batch(batch, plan.context) for batch in sorted({*powers, max_batch})
    ]
    replicas = plan.chosen.layout.replicas
    expected = [(row.tokens_per_second, row.expected_ms) for row in rows]
    floor = [(row.batch * replicas / row.floor_ms * 1e3, row.floor_ms) for row in rows]
    labels = [str(row.batch) for row in rows]
    return [
        ChartSeries("expected", expected, labels),
        ChartSeries("floor", floor, dashed=True),
    ]


def write_plot(plan: PlanEstimate, path: Path) -> None:
    """Write the latency curves as .svg, or as .png if matplotlib is installed."""
    title = ", ".join(
        (
            plan.source.name,
            plan.options.precision.name,
            str(plan.chosen.layout),
            plan.options.hardware.title,
        )
    )
    x_label = "tokens/s of the whole batch"
    y_label = f"ms a token (TPOT), context {plan.context:,}"
    curves = latency_curves(plan)
    if path.suffix == ".svg":
        path.write_text(draw_chart(title, x_label, y_label, curves, log_x=True, log_y=True))
    elif path.suffix == ".png":
        _write_png(path, title, (x_label, y_label), curves)
    else:
        raise ConfigError(f"--plot {path}: the name must end in .svg or .png")


def _write_png(
    path: Path, title: str, axis_labels: tuple[str, str], curves: list[ChartSeries]
) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            f"--plot {path}: PNG needs matplotlib (pip install matplotlib); .svg needs nothing"
        ) from None
    figure = Figure(figsize=(8, 5))
    axis = figure.add_subplot()
    for curve in curves:
        xs, ys = zip(*curve.points)
        axis.loglog(xs, ys, "--" if curve.dashed else "o-", label=curve.name)
        for point, label in zip(curve.points, curve.labels):
            axis.annotate(label, point, textcoords="offset points", xytext=(4, 4))
    axis.set(title=title, xlabel=axis_labels[0], ylabel=axis_labels[1])
    axis.legend()
    figure.savefig(path, dpi=120)
