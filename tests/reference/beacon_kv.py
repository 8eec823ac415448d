"""BeaconKV for one KV head, written for the eye and not for speed.

1. Every query, those of the prompt too, is first assigned to its nearest current beacon and then enters its query
   head's selector. A selector that is a pool may be thinned by that, which renews the beacons.
2. A compression fires when a step (the prompt, a piece of it, or one token) leaves B + I entries or more.
3. The observation of each query head is its R most recent queries and its K beacons.
4. A cached entry's score is its softmax attention, pooled over the observation and then over the group.
5. The last R entries and the first ``sinks`` positions stay, then the highest scores, up to B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import softmax

from .rotary import Array, Style, rotate, unrotate

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Settings:
    """The options of BeaconKV."""

    budget: int = 1024
    interval: int = 128
    beacons: int = 16
    recent: int = 16
    sinks: int = 0
    selector: Literal["fps", "kmeans", "random", "none"] = "fps"
    query_space: Literal["pre-rope", "post-rope"] = "pre-rope"
    beacon_rotation: Literal["current", "own"] = "current"
    query_pooling: Literal["max", "mean"] = "max"
    group_pooling: Literal["max", "mean"] = "max"
    pool_low: int | None = None
    pool_high: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.interval < 1 or min(self.beacons, self.recent, self.sinks) < 0:
            raise ValueError("interval must be 1 or more, the other counts 0 or more")
        if self.recent + self.sinks > self.budget:
            raise ValueError("recent + sinks are always kept, so they must fit the budget")
        if self.recent == 0 and (self.beacons == 0 or self.selector == "none"):
            raise ValueError("nothing observes: give recent or beacons")
        if self.selector == "kmeans" and self.beacon_rotation == "own":
            raise ValueError("a centroid has no position of its own")
        low, high = self.pool_bounds
        if not max(self.beacons, 1) <= low < high:
            raise ValueError("give beacons <= pool_low < pool_high")

    @property
    def pool_bounds(self) -> tuple[int, int]:
        """``pool_low`` and ``pool_high`` with their defaults filled in."""
        low = max(self.beacons, 32) if self.pool_low is None else self.pool_low
        return low, low + 128 if self.pool_high is None else self.pool_high


class Beacon(NamedTuple):
    """A representative of past queries."""

    source: int
    """Position of the query that it is, -1 for a centroid."""
    vector: Array
    """[D], in the query space of the settings."""


@dataclass(frozen=True)
class BeaconChange:
    """New current beacons."""

    position: int
    """Of the newest token."""
    beacons: list[list[Beacon]] = field(default_factory=list)
    """Per query head."""
    members: list[list[int]] = field(default_factory=list)
    """Per query head, the queries assigned to each *former* beacon since the last change."""


@dataclass(frozen=True, kw_only=True)
class Compression(BeaconChange):
    """What a compression did."""

    kept: Positions
    evicted: Positions


class Simulation(NamedTuple):
    """All that happened in one KV head."""

    compressions: list[Compression]
    thinnings: list[BeaconChange]
    """Pool thinnings that renewed the beacons, so none before the first compression."""
    assignment: Positions
    """[T, G], index of the nearest current beacon, -1 for null."""
    similarity: Array
    """[T, G], its cosine, nan for null."""


def normalise(x: ArrayLike) -> Array:
    """Bring vectors [..., D] to length 1; a zero vector stays zero and so has cosine 0 with everything."""
    x = np.asarray(x, dtype=np.float64)
    length = np.linalg.norm(x, axis=-1, keepdims=True)
    return x / np.where(length == 0, 1, length)


def cosines(vectors: ArrayLike, one: ArrayLike) -> Array:
    """Cosine of each of ``vectors`` [N, D] with ``one`` [D]; [N]."""
    # A matrix product is faster, but a BLAS does not promise equal bits for equal rows, and ties hang on that.
    return np.sum(normalise(vectors) * normalise(one), axis=-1)  # type: ignore[no-any-return]


def first_largest(values: ArrayLike, tie: float = 1e-5) -> int:
    """Index of the largest of ``values`` [N]; the lowest index among those that rounding may have moved below it."""
    values = np.asarray(values)
    return int(np.argmax(values >= values.max() - tie))


def farthest_points(vectors: ArrayLike, count: int) -> list[int]:
    """Farthest-point sampling on cosine distance among ``vectors`` [N, D], newest last.

    Returns
    -------
    list of int
        ``min(count, N)`` indices in the order of choice: the newest, then again and again the one that is farthest
        from its nearest chosen one, the lowest index in a tie.
    """
    vectors = np.asarray(vectors, dtype=np.float64)
    chosen: list[int] = []
    distance = np.full(len(vectors), np.inf)
    while len(chosen) < min(count, len(vectors)):
        new = first_largest(distance) if chosen else len(vectors) - 1
        chosen.append(new)
        distance = np.minimum(distance, 1 - cosines(vectors, vectors[new]))
        distance[chosen] = -np.inf
    return chosen


class Selector(Protocol):
    """What one query head remembers of its past queries."""

    def add(self, position: int, query: Array) -> bool:
        """Take the next query and say whether that renews the beacons."""

    def beacons(self) -> list[Beacon]:
        """Choose beacons from what is remembered."""


class Pool:
    """Continual FPS."""

    def __init__(self, count: int, low: int, high: int) -> None:
        self.count, self.low, self.high = count, low, high
        self.held: list[Beacon] = []

    def add(self, position: int, query: Array) -> bool:
        self.held.append(Beacon(position, query))
        if len(self.held) < self.high:
            return False
        self.held = [self.held[i] for i in sorted(farthest_points([b.vector for b in self.held], self.low))]
        return True

    def beacons(self) -> list[Beacon]:
        return [self.held[i] for i in farthest_points([b.vector for b in self.held], self.count)]


class OnlineKMeans:
    """Online spherical k-means."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.centroids: list[Array] = []
        self.sizes: list[int] = []
        self.norms: list[float] = []

    def add(self, position: int, query: Array) -> bool:
        if len(self.centroids) < self.count:
            self.centroids.append(normalise(query))
            self.sizes.append(1)
            self.norms.append(float(np.linalg.norm(query)))
            return False
        j = first_largest(cosines(self.centroids, query))
        self.sizes[j] += 1
        self.centroids[j] = normalise(self.centroids[j] + (normalise(query) - self.centroids[j]) / self.sizes[j])
        self.norms[j] += (float(np.linalg.norm(query)) - self.norms[j]) / self.sizes[j]
        return False

    def beacons(self) -> list[Beacon]:
        return [Beacon(-1, norm * centroid) for norm, centroid in zip(self.norms, self.centroids, strict=True)]


class Reservoir:
    """A uniform sample of the past queries (Algorithm R)."""

    def __init__(self, count: int, rng: np.random.Generator) -> None:
        self.count, self.rng = count, rng
        self.seen = 0
        self.held: list[Beacon] = []

    def add(self, position: int, query: Array) -> bool:
        self.seen += 1
        if len(self.held) < self.count:
            self.held.append(Beacon(position, query))
        elif (slot := int(self.rng.integers(self.seen))) < self.count:
            self.held[slot] = Beacon(position, query)
        return False

    def beacons(self) -> list[Beacon]:
        return list(self.held)


class Nothing:
    """No beacons."""

    def add(self, position: int, query: Array) -> bool:
        return False

    def beacons(self) -> list[Beacon]:
        return []


def make_selector(settings: Settings, query_head: int) -> Selector:
    """Make the selector of one query head."""
    if settings.beacons == 0 or settings.selector == "none":
        return Nothing()
    if settings.selector == "fps":
        return Pool(settings.beacons, *settings.pool_bounds)
    if settings.selector == "kmeans":
        return OnlineKMeans(settings.beacons)
    if settings.selector == "random":
        return Reservoir(settings.beacons, np.random.default_rng([settings.seed, query_head]))
    raise ValueError(f"unknown selector {settings.selector!r}")


def observe(
    recent: Array,  # [<=R, D], post-RoPE
    beacons: Sequence[Beacon],
    position: int,
    settings: Settings,
    inv_freq: ArrayLike,
    style: Style = "half",
    scaling: float = 1.0,
) -> Array:
    """Gather the observation [N, D] of one query head, ready to meet post-RoPE keys; ``position`` is the newest."""
    rows = list(recent)
    for beacon in beacons:
        if settings.query_space == "post-rope":
            rows.append(beacon.vector)
        else:
            at = position if settings.beacon_rotation == "current" else beacon.source
            rows.append(rotate(beacon.vector[None], [at], inv_freq, style, scaling)[0])
    return np.array(rows)


def score(observations: Sequence[Array], keys: Array, settings: Settings) -> Array:
    """Score the cached ``keys`` [n, D] by the observations [N, D] of the group's query heads; [n]."""
    pool: dict[str, Callable[..., Array]] = {"max": np.max, "mean": np.mean}
    over_queries, over_group = pool[settings.query_pooling], pool[settings.group_pooling]
    attention = [softmax(observation @ keys.T / np.sqrt(keys.shape[1]), axis=1) for observation in observations]
    return over_group([over_queries(a, axis=0) for a in attention], axis=0)


def keep(cached: Sequence[int], scores: ArrayLike, settings: Settings) -> Positions:
    """Choose the positions that stay, in order, from ``cached`` (in order) and their scores."""
    scores = np.asarray(scores)
    always = {p for p in cached if p < settings.sinks} | set(cached[max(len(cached) - settings.recent, 0) :])
    ranked = [p for _, p in sorted(zip(-scores, cached, strict=True)) if p not in always]
    return np.array(sorted([*always, *ranked[: settings.budget - len(always)]]), dtype=np.int64)


def steps(length: int, prompt_length: int, chunks: Sequence[int] | None = None) -> Iterator[range]:
    """Yield the positions that each step brings: the prompt (in pieces of the lengths ``chunks``), then one at a time.

    Raises
    ------
    ValueError
        When the pieces are no partition of the prompt, or the prompt is longer than everything.
    """
    pieces = [prompt_length] if chunks is None else list(chunks)
    if sum(pieces) != prompt_length or min(pieces) < 1 or prompt_length > length:
        raise ValueError(f"pieces {pieces} do not make a prompt of {prompt_length} in {length} tokens")
    start = 0
    for size in pieces + [1] * (length - prompt_length):
        yield range(start, start + size)
        start += size


def simulate(
    queries: ArrayLike,
    keys: ArrayLike,
    prompt_length: int,
    settings: Settings,
    inv_freq: ArrayLike,
    style: Style = "half",
    chunks: Sequence[int] | None = None,
    scaling: float = 1.0,
) -> Simulation:
    """Run BeaconKV over the recorded tokens of one KV head.

    Parameters
    ----------
    queries : [T, G, D], post-RoPE
    keys : [T, D], post-RoPE
    prompt_length : int
        The first tokens, attended in full and compressed once at their end, if at all.
    settings : Settings
    inv_freq, style, scaling
        See `rotate`.
    chunks : sequence of int, optional
        Lengths of the pieces of a prompt that may be compressed after each of them.
    """
    queries, keys = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    length, group, _ = queries.shape
    rope: dict[str, Any] = {"inv_freq": inv_freq, "style": style, "scaling": scaling}
    seen = queries
    if settings.query_space == "pre-rope":
        seen = unrotate(queries.swapaxes(0, 1), np.arange(length), **rope).swapaxes(0, 1)

    selectors = [make_selector(settings, g) for g in range(group)]
    current: list[list[Beacon]] = [[] for _ in range(group)]
    members: list[list[int]] = [[] for _ in range(group)]
    result = Simulation([], [], np.full((length, group), -1), np.full((length, group), np.nan))

    def renew() -> dict[str, list[list[Any]]]:
        nonlocal current, members
        former, current = members, [s.beacons() for s in selectors]
        members = [[0] * len(beacons) for beacons in current]
        return {"beacons": current, "members": former}

    cached: list[int] = []
    for step in steps(length, prompt_length, chunks):
        for t in step:
            thinned = False
            for g in range(group):
                if current[g]:
                    similar = cosines([b.vector for b in current[g]], seen[t, g])
                    nearest = first_largest(similar)
                    result.assignment[t, g], result.similarity[t, g] = nearest, similar[nearest]
                    members[g][nearest] += 1
                # The pools of a group fill in step, so one thinned means all thinned.
                thinned = selectors[g].add(t, seen[t, g])
            if thinned and result.compressions:
                result.thinnings.append(BeaconChange(t, **renew()))
        cached += step
        if len(cached) >= settings.budget + settings.interval:
            newest = cached[-1]
            recent = queries[max(newest + 1 - settings.recent, 0) : newest + 1]  # [<=R, G, D]
            beacons = [s.beacons() for s in selectors]
            observations = [observe(recent[:, g], beacons[g], newest, settings, **rope) for g in range(group)]
            kept = keep(cached, score(observations, keys[cached], settings), settings)
            evicted = np.setdiff1d(cached, kept)
            result.compressions.append(Compression(newest, **renew(), kept=kept, evicted=evicted))
            cached = kept.tolist()
    return result


def check_reservoir(simulation: Simulation, seen: Array, settings: Settings, atol: float = 0.0) -> None:
    """Assert what must hold of the ``random`` selector, whatever the random numbers.

    ``seen`` [T, G, D] are the queries in the query space of the settings.
    """
    before: dict[int, tuple[int, list[int]]] = {}
    for compression in simulation.compressions:
        for g, beacons in enumerate(compression.beacons):
            sources = [b.source for b in beacons]
            assert len(set(sources)) == len(sources) == min(settings.beacons, compression.position + 1)
            assert all(0 <= s <= compression.position for s in sources)
            for beacon in beacons:
                np.testing.assert_allclose(beacon.vector, seen[beacon.source, g], rtol=0, atol=atol)
            last, former = before.get(g, (-1, []))
            assert all(s in former or s > last for s in sources)
            before[g] = compression.position, sources
