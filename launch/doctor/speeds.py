"""What measured links mean: which are slow, which are unlike the others, and what is kept for the plan."""

from __future__ import annotations

from launch.doctor.finding import Finding, ok, warning
from launch.doctor.kept import Links
from launch.doctor.link_workers import Measured
from launch.doctor.links import PROBE, slowest
from suite.pipeline.simulate import Link

SLOW = 100e6
"""Bytes a second. A gigabit port gives 117 million: below, a port or a cable fell back to less, or somebody shapes it;
and a stage's 16 MiB take a sixth of a second, which no schedule hides."""

LATE_S = 2e-3
"""Seconds. Nodes of one hall answer in a tenth of a millisecond: above, they are far apart, or in a tunnel."""

UNLIKE = 3.0
"""How many times slower than the fastest of its kind a link is told: noise of a busy machine is below."""

BY_RAY = 1 / UNLIKE
"""The share of the bandwidth outside Ray that workers of Ray should have at least: they use the same sockets."""


def judged(measured: Measured | None, alone: Measured | None) -> list[Finding]:
    """Returns lines for links within nodes, between nodes, and for all workers together."""
    found: list[Finding] = []
    if measured is not None:
        within = {names: link for names, link in measured.pairs.items() if names[0] == names[1]}
        between = {names: link for names, link in measured.pairs.items() if names[0] != names[1]}
        found += _alike("links within a node", within) + _alike("links between nodes", between)
        if measured.reduced is not None:
            found.append(ok("all-reduce", f"{measured.reducers} workers of Ray: {shown(measured.reduced)}"))
    if alone is not None:
        ((names, link),) = alone.pairs.items()
        found.append(ok("links outside Ray", f"two processes of {names[0]}: {shown(link)}"))
        same = measured.pairs.get(names) if measured is not None else None
        if same is not None and same.bytes_per_s < BY_RAY * link.bytes_per_s:
            found.append(
                warning("links outside Ray", f"workers of Ray on {names[0]} get {_rate(same)}, plain processes there "
                        f"{_rate(link)}", "look at what Ray's workers inherit: thread counts, cores, interface")
            )  # fmt: skip
    return found


def _alike(subject: str, pairs: dict[tuple[str, str], Link]) -> list[Finding]:
    if not pairs:
        return []
    best = max(link.bytes_per_s for link in pairs.values())
    found = []
    for names, link in pairs.items():
        told = f"{_names(names)}: {shown(link)}"
        look = (
            "see what else runs there (top), and how its GPUs are joined (nvidia-smi topo -m)"
            if names[0] == names[1]
            else "look at its ports and cables (ethtool), its limits (tc qdisc), and for other traffic"
        )
        if link.bytes_per_s < SLOW:
            found.append(warning(subject, f"{told}; less than a gigabit port's {SLOW / 1e6:.0f} MB/s", look))
        elif link.bytes_per_s < best / UNLIKE:
            times = best / link.bytes_per_s
            found.append(warning(subject, f"{told}; {times:.1f} times slower than the fastest of its kind", look))
        elif link.latency_s > LATE_S:
            closer = "place the nodes closer: one zone, one placement group"
            found.append(warning(subject, f"{told}; more than {LATE_S * 1e3:g} ms", closer))
    if found:
        return found
    which, worst = max(pairs.items(), key=lambda pair: pair[1].seconds(PROBE))
    return [ok(subject, f"{len(pairs)} measured between workers of Ray, the slowest ({_names(which)}): {shown(worst)}")]


def kept(measured: Measured | None, alone: Measured | None, cluster: str) -> Links:
    """Returns what the plan is given: the slowest of each kind."""
    pairs = measured.pairs if measured is not None else {}
    by_hand = next(iter(alone.pairs.values())) if alone is not None else None
    within = slowest([link for names, link in pairs.items() if names[0] == names[1]])
    own = alone if measured is None else measured
    return Links(
        cluster=cluster,
        pairs=tuple(sorted({name for names in (pairs or (alone.pairs if alone else {})) for name in names})),
        within=within if measured is not None else by_hand,
        between=slowest([link for names, link in pairs.items() if names[0] != names[1]]),
        all_reduce=own.reduced if own is not None else None,
        alone=by_hand,
    )


def shown(link: Link) -> str:
    """Returns latency and bandwidth for people."""
    return f"{link.latency_s * 1e3:.3g} ms, {_rate(link)}"


def _rate(link: Link) -> str:
    return f"{link.bytes_per_s / 1e6:,.0f} MB/s"


def _names(names: tuple[str, str]) -> str:
    return names[0] if names[0] == names[1] else f"{names[0]} - {names[1]}"
