"""Interprets measured links: finds slow and uneven ones, and selects what plans use."""

from __future__ import annotations

from launch.backends.link_cache import LinkSpeeds
from launch.diagnostics.finding import Finding, ok, warning
from launch.diagnostics.link_benchmark import LinkMeasurements
from suite.pipeline.planning.simulate import Link

SLOW = 100e6
"""Bytes a second. A gigabit port gives 117 million; below 100, a port or cable has fallen back to a lower speed or
traffic is shaped, and a stage's 16 MiB take a sixth of a second, which no schedule hides."""

LATE_S = 2e-3
"""Seconds. Nodes of one data centre answer in 0.1 ms; above 2 ms they are far apart or connected by a tunnel."""

UNLIKE = 3.0
"""A link that is this many times slower than the fastest of its kind is reported; noise of a busy machine is less."""

BY_RAY = 1 / UNLIKE
"""The share of the bandwidth without Ray that Ray workers should reach at least: they use the same sockets."""

PROBE = 2**20
"""Size in bytes of the message by which links are compared."""


def findings_of(measured: LinkMeasurements | None, plain: LinkMeasurements | None) -> list[Finding]:
    """Returns findings for links within nodes, between nodes, and for the all-reduce of all workers."""
    found: list[Finding] = []
    if measured is not None:
        within = {names: link for names, link in measured.pairs.items() if names[0] == names[1]}
        between = {names: link for names, link in measured.pairs.items() if names[0] != names[1]}
        found += _group_findings("links within a node", within) + _group_findings("links between nodes", between)
        if measured.reduced is not None:
            found.append(ok("all-reduce", f"{measured.reducers} Ray workers: {format_link(measured.reduced)}"))
    if plain is not None:
        ((names, link),) = plain.pairs.items()
        found.append(ok("links outside Ray", f"two processes of {names[0]}: {format_link(link)}"))
        ray_link = measured.pairs.get(names) if measured is not None else None
        if ray_link is not None and ray_link.bytes_per_s < BY_RAY * link.bytes_per_s:
            text = f"Ray workers on {names[0]} get {_rate(ray_link)}, plain processes there {_rate(link)}"
            remedy = "check what Ray workers inherit: thread counts, cores, interface"
            found.append(warning("links outside Ray", text, remedy))
    return found


def _group_findings(subject: str, pairs: dict[tuple[str, str], Link]) -> list[Finding]:
    if not pairs:
        return []
    best = max(link.bytes_per_s for link in pairs.values())
    found = []
    for names, link in pairs.items():
        text = f"{_names(names)}: {format_link(link)}"
        remedy = (
            "check what else runs there (top), and how its GPUs are connected (nvidia-smi topo -m)"
            if names[0] == names[1]
            else "check its ports and cables (ethtool), its limits (tc qdisc), and other traffic"
        )
        if link.bytes_per_s < SLOW:
            found.append(warning(subject, f"{text}; less than a gigabit port's {SLOW / 1e6:.0f} MB/s", remedy))
        elif link.bytes_per_s < best / UNLIKE:
            times = best / link.bytes_per_s
            found.append(warning(subject, f"{text}; {times:.1f} times slower than the fastest of its kind", remedy))
        elif link.latency_s > LATE_S:
            closer = "place the nodes closer together: in one zone and one placement group"
            found.append(warning(subject, f"{text}; more than {LATE_S * 1e3:g} ms", closer))
    if found:
        return found
    worst_names, worst = max(pairs.items(), key=lambda pair: pair[1].seconds(PROBE))
    text = f"{len(pairs)} measured between Ray workers, the slowest ({_names(worst_names)}): {format_link(worst)}"
    return [ok(subject, text)]


def to_link_speeds(measured: LinkMeasurements, cluster: str) -> LinkSpeeds:
    """Returns the link speeds for plans: the slowest link between nodes, and the all-reduce."""
    between = [link for names, link in measured.pairs.items() if names[0] != names[1]]
    slowest = max(between, key=lambda link: link.seconds(PROBE), default=None)
    return LinkSpeeds(cluster, slowest, measured.reduced)


def format_link(link: Link) -> str:
    return f"{link.latency_s * 1e3:.3g} ms, {_rate(link)}"


def _rate(link: Link) -> str:
    return f"{link.bytes_per_s / 1e6:,.0f} MB/s"


def _names(names: tuple[str, str]) -> str:
    return names[0] if names[0] == names[1] else f"{names[0]} - {names[1]}"
