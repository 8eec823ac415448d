"""The main charts as static SVG for a paper, and as PNG where a Chromium is there to draw them.

They are drawn from what the page is drawn from, so that numbers in a paper and on the page are the same.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from beaconscope.errors import BeaconScopeError
from beaconscope.files import whole_file
from beaconscope.progress import Progress
from beaconscope.report.collect import Collected, collect
from beaconscope.report.looks import Looks
from beaconscope.report.options import ReportOptions
from beaconscope.report.report import Subject
from beaconscope.report.svg import ACCENT, FAINT, INK, LOSS, MUTED, OKABE_ITO, Drawing, cividis, ticks

_WIDTH = 720.0
_DASHES = ("", "7 2", "2 2", "9 3 2 3", "12 3")
"""So that curves are told apart without their colours."""
_DARK = 0.66
"""Of cividis, what can be told from white."""
_MOST_COLUMNS = 320
"""Of the overview."""
_MOST_LIVES = 120
"""Beacons that fit a page; the first ones."""
_WORD = 14
"""Letters shown of a beacon's token."""
_PNG_SECONDS = 120.0
"""That a Chromium is given to draw one."""
_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def write_figures(
    subject: Subject, folder: Path, options: ReportOptions, *, png: bool = False, progress: Progress | None = None
) -> list[Path]:
    """Write the charts of a trace into a folder that exists.

    Parameters
    ----------
    subject
        The trace and what is known of it.
    folder
        Where the files go; those of the same names are overwritten.
    options
        Settings of the report.
    png
        Write a PNG of twice the size beside each SVG; needs a Chromium.
    progress
        Called after each KV head.

    Returns
    -------
    list of Path
        What was written. A chart of which the trace has nothing is left out.

    Raises
    ------
    BeaconScopeError
        Where PNG is wanted and no Chromium is there.
    """
    browser = _browser() if png else None
    collected = collect(subject.trace, subject.findings, options, replay=subject.replay, progress=progress)
    drawings = {
        "overview": _overview(collected),
        "attention": _attention(collected),
        "heads": _heads(collected),
        "queries": _queries(collected),
        "beacons": _beacons(collected),
        "tradeoff": _tradeoff(subject.replay),
    }
    written = []
    for name, drawing in drawings.items():
        if drawing is None:
            continue
        path = folder / f"{name}.svg"
        with whole_file(path) as partial:
            partial.write_text(str(drawing), encoding="utf-8")
        written.append(path)
        if browser is not None:
            written.append(_to_png(browser, path, drawing))
    return written


def _browser() -> str:
    found = next((path for path in map(shutil.which, _BROWSERS) if path), None)
    if found is None:
        raise BeaconScopeError("PNG needs Chromium or Chrome, and none is on the PATH; install one, or leave out --png")
    return found


def _to_png(browser: str, svg: Path, drawing: Drawing) -> Path:
    """Draw an SVG in a browser, in twice its size.

    Raises
    ------
    BeaconScopeError
        Where the browser does not, or not in time.
    """
    png = svg.with_suffix(".png")
    with tempfile.TemporaryDirectory() as profile:
        drawn = Path(profile, png.name)
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}",
            "--force-device-scale-factor=2", f"--window-size={drawing.width:.0f},{drawing.height:.0f}",
            f"--screenshot={drawn}", svg.resolve().as_uri(),
        ]  # fmt: skip
        try:
            subprocess.run(command, capture_output=True, timeout=_PNG_SECONDS, check=True)
            done = drawn.exists()
        except subprocess.SubprocessError:
            done = False
        if not done:
            raise BeaconScopeError(f"{browser} did not draw {png}; leave out --png and convert {svg} by other means")
        with whole_file(png) as partial:
            shutil.copyfile(drawn, partial)
    return png


def _axis(drawing: Drawing, low: float, high: float, left: float, right: float, y: float, label: str) -> None:
    """Ticks along the bottom."""
    for tick in ticks(low, high, 6):
        x = left + (tick - low) / max(high - low, 1e-9) * (right - left)
        drawing.line([(x, y), (x, y + 4)], MUTED)
        drawing.text(x, y + 13, f"{tick:,.0f}", anchor="middle")
    drawing.text((left + right) / 2, y + 28, label, anchor="middle")


def _overview(collected: Collected) -> Drawing:
    about = collected.about
    length = about["trace"]["length"]
    left, right = 74.0, _WIDTH - 14
    drawing = Drawing(_WIDTH, 150)
    score = np.zeros(length)
    for row in about["revisits"]:
        score[row["position"]] = row["score"]
    # Every column but the last is of so many tokens: sums compare, and each column lies where its tokens do.
    per = math.ceil(length / _MOST_COLUMNS)
    columns = [(start, min(length, start + per)) for start in range(0, length, per)]

    def bar(start: int, stop: int, base: float, tall: float, colour: str) -> None:
        wide = (right - left) / length
        drawing.rect(left + start * wide, base - tall, (stop - start) * wide * 0.9, tall, colour)

    drawing.rect(left, 8, right - left, 52, FAINT)
    sums = [float(score[start:stop].sum()) for start, stop in columns]
    for (start, stop), value in zip(columns, sums, strict=True):
        if value > 0:
            bar(start, stop, 60, max(1.0, 52 * value / max(sums)), ACCENT)
    drawing.text(left - 8, 34, "revisits", anchor="end")
    drawing.rect(left, 66, right - left, 20, FAINT)
    lost = collected.pack.numbers("lost_share")
    for start, stop in columns:
        known = lost[start:stop][np.isfinite(lost[start:stop])]
        if len(known) and known.mean() > 0:
            bar(start, stop, 86, 20 * float(known.mean()), LOSS)
    drawing.text(left - 8, 76, "lost", anchor="end")
    phase = collected.pack.array("phase")
    edges = np.flatnonzero(np.diff(phase)) + 1
    for start, stop in zip([0, *edges], [*edges, length], strict=True):
        x, wide = (left + start / length * (right - left), (stop - start) / length * (right - left))
        drawing.rect(x, 92, max(0.5, wide - 1), 10, (MUTED, "#9cc6e0", "#009e73")[phase[start]])
    drawing.text(left - 8, 97, "phase", anchor="end")
    _axis(drawing, 0, length, left, right, 104, "position (phases: grey prompt, blue thought, green answer)")
    return drawing


def _attention(collected: Collected) -> Drawing | None:
    looks: Looks = collected.full if collected.full is not None and len(collected.full) else collected.recorded
    length = collected.about["trace"]["length"]
    if not len(looks):
        return None
    size = min(length, 360)
    cells = np.zeros((size, size), np.float32)
    row = (looks.step.astype(np.int64) * size) // length
    column = (looks.source.astype(np.int64) * size) // length
    np.maximum.at(cells, (row, column), looks.mass)
    left, top, side = 60.0, 10.0, 560.0
    drawing = Drawing(left + side + 20, top + side + 50)
    drawing.shape([(left, top), (left + side, top + side), (left, top + side)], "#f6f6f4")
    cell = side / size
    for r, c in zip(*np.nonzero(cells), strict=True):
        share = float(cells[r, c]) ** 0.5
        # As on the page: weak attention recedes, strong is dark.
        opacity = min(1.0, 0.12 + 0.95 * share)
        shade = cividis(0.92 - 0.92 * share)
        drawing.rect(left + c * cell, top + r * cell, cell * 1.04, cell * 1.04, shade, fill_opacity=opacity)
    _axis(drawing, 0, length, left, left + side, top + side + 2, "position attended to")
    for tick in ticks(0, length, 6):
        drawing.text(left - 6, top + tick / length * side, f"{tick:,.0f}", anchor="end")
    drawing.text(14, top + side / 2, "token", anchor="middle", turn=-90)
    return drawing


def _heads(collected: Collected) -> Drawing:
    heads = collected.about["heads"]
    layers = sorted({head["layer"] for head in heads}, reverse=True)
    across = max(sum(head["layer"] == layer for head in heads) for layer in layers)
    wide, tall, left = min(48.0, 600 / across), 28.0, 64.0
    drawing = Drawing(max(400.0, left + across * wide + 20), 30 + tall * len(layers) + 26)
    rates = [head.get("event_rate") for head in heads if head.get("event_rate") is not None]
    most = max(rates, default=0.0) or 1.0
    for row, layer in enumerate(layers):
        drawing.text(left - 8, 24 + row * tall + tall / 2, f"layer {layer}", anchor="end")
        for column, head in enumerate(head for head in heads if head["layer"] == layer):
            rate = head.get("event_rate")
            x, y = left + column * wide, 24 + row * tall
            drawing.rect(x, y, wide - 1.5, tall - 1.5, FAINT if rate is None else cividis(rate / most))
            if wide > 30 and rate is not None:
                shade = INK if rate / most > 0.55 else "#fff"
                drawing.text(x + wide / 2, y + tall / 2, f"{100 * rate:.1f}", anchor="middle", size=10, fill=shade)
            if row == 0 and wide > 20:
                drawing.text(x + wide / 2, 12, f"{head['kv']}.{head['group']}", anchor="middle", size=9)
    drawing.text(left, drawing.height - 12, "steps at which the head turns to one distant place, %")
    return drawing


def _busiest(collected: Collected) -> dict[str, Any]:
    first: dict[str, Any] = min(collected.about["heads"], key=lambda head: head["rank"])
    return first


def _queries(collected: Collected) -> Drawing | None:
    head = _busiest(collected)
    name = f"space.{head['number']}"
    space = next((each for each in ("pre-rope", "post-rope") if f"{name}.{each}.x" in collected.pack.manifest), None)
    if space is None:
        return None
    position = collected.pack.array(f"{name}.position")
    x, y = (collected.pack.numbers(f"{name}.{space}.{axis}")[: len(position)] for axis in "xy")
    side, pad = 520.0, 24.0
    drawing = Drawing(side, side + 26)

    def scale(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        low, high = values.min(), values.max()
        scaled: npt.NDArray[np.float64] = pad + (values - low) / max(high - low, 1e-12) * (side - 2 * pad)
        return scaled

    xs, ys = scale(x), side - scale(y)
    revisits = {row["position"] for row in collected.about["revisits"]}
    length = collected.about["trace"]["length"]
    for at, px, py in zip(position.tolist(), xs, ys, strict=True):
        # The bright end cannot be seen on white.
        drawing.circle(float(px), float(py), 2.2, cividis(_DARK * at / length), opacity=0.8)
        if at in revisits:
            drawing.circle(float(px), float(py), 4.2, "none", stroke=LOSS, stroke_width=1.2)
    if f"beacons.{head['number']}.source" in collected.pack.manifest:
        last = int(collected.pack.array(f"beacons.{head['number']}.count")[-1])
        place = {at: index for index, at in enumerate(position.tolist())}
        for source in collected.pack.array(f"beacons.{head['number']}.source")[-last:].astype(np.int64) - 1:
            if int(source) in place:
                px, py = float(xs[place[int(source)]]), float(ys[place[int(source)]])
                diamond = [(px, py - 6), (px + 6, py), (px, py + 6), (px - 6, py)]
                drawing.shape(diamond, "#fff", stroke=INK, stroke_width=1.4)
    method = collected.pack.manifest[f"{name}.{space}.x"]["method"]
    said = f"head {head['name']}, {space}, {method}; dark early, bright late; rings revisits, diamonds last beacons"
    drawing.text(side / 2, side + 10, said, anchor="middle")
    return drawing


def _beacons(collected: Collected) -> Drawing | None:
    head = _busiest(collected)
    name = f"beacons.{head['number']}"
    if f"{name}.step" not in collected.pack.manifest:
        return None
    steps, counts = collected.pack.array(f"{name}.step"), collected.pack.array(f"{name}.count")
    entries = np.split(collected.pack.array(f"{name}.source").astype(np.int64) - 1, np.cumsum(counts)[:-1])
    length = collected.about["trace"]["length"]
    # A change at a step is in force from the next position on. A centroid is known by its number, which is kept apart
    # from positions by its sign.
    lives: list[tuple[int, int, int]] = []
    alive: dict[int, int] = {}
    for step, sources in zip(steps.tolist(), entries, strict=True):
        now = {int(source) if source >= 0 else -1 - index for index, source in enumerate(sources)}
        for gone in set(alive) - now:
            lives.append((alive.pop(gone), step + 1, gone))
        for new in now - set(alive):
            alive[new] = step + 1
    lives += [(birth, length, key) for key, birth in alive.items()]
    every = len(lives)
    lives = sorted(lives, key=lambda life: (life[0], life[2] if life[2] >= 0 else -1 - life[2]))[:_MOST_LIVES]
    left, right, bar = 104.0, _WIDTH - 14, 9.0
    drawing = Drawing(_WIDTH, 20 + bar * len(lives) + 44)
    for row, (birth, end, key) in enumerate(lives):
        x = left + birth / length * (right - left)
        drawing.rect(x, 10 + row * bar, max(1.5, (end - birth) / length * (right - left)), bar - 2, ACCENT)
        label = f"{_word(collected, key)} {key:,}" if key >= 0 else f"centroid {-1 - key}"
        drawing.text(left - 6, 10 + row * bar + bar / 2 - 1, label, anchor="end", size=8)
    said = f"beacons of head {head['name']}: the query that each was taken from, and when it was in force, by position"
    if len(lives) < every:
        said += f"; the first {len(lives)} of {every:,}"
    _axis(drawing, 0, length, left, right, 12 + bar * len(lives), said)
    return drawing


def _word(collected: Collected, position: int) -> str:
    """The text of a token on one line, short."""
    text = str(collected.about["dictionary"][int(collected.pack.array("text")[position])])
    line = " ".join(text.split())
    if not line:
        return "↵" if "\n" in text else "(blank)"
    return line if len(line) <= _WORD else f"{line[:_WORD].rstrip()} …"


def _tradeoff(replay: dict[str, Any] | None) -> Drawing | None:
    if replay is None:
        return None
    figure = str(replay["ranked_by"])
    rows = [
        row
        for row in replay["settings"]
        if row["policy"] != "full" and row.get(figure) is not None and row.get("kv_bytes") is not None
    ]
    if not rows:
        return None
    left, right, top, bottom = 66.0, 520.0, 14.0, 330.0
    drawing = Drawing(_WIDTH, 414 if replay.get("missing") else 400)
    low, high = min(row["kv_bytes"] for row in rows), max(row["kv_bytes"] for row in rows)
    span = math.log(high / low) or 1.0

    def place(row: dict[str, Any]) -> tuple[float, float]:
        x = left + math.log(row["kv_bytes"] / low) / span * (right - left)
        return x, bottom - row[figure] * (bottom - top)

    for tick in ticks(0, 1, 5):
        y = bottom - tick * (bottom - top)
        drawing.line([(left, y), (right, y)], FAINT)
        drawing.text(left - 6, y, f"{100 * tick:.0f} %", anchor="end")
    last = -math.inf
    for size in sorted({row["kv_bytes"] for row in rows}):
        x = left + math.log(size / low) / span * (right - left)
        if x - last < 40:
            continue
        last = x
        drawing.text(x, bottom + 12, f"{size / 1e6:.3g}", anchor="middle", size=9)
    names = list(dict.fromkeys(_curve(row) for row in rows))
    own = [name for name in names if name not in ("oracle", "random")]
    for index, name in enumerate(names):
        mine = sorted((row for row in rows if _curve(row) == name), key=lambda row: row["kv_bytes"])
        control = name in ("oracle", "random")
        colour = MUTED if control else OKABE_ITO[own.index(name) % len(OKABE_ITO)]
        dashes = ("1.5 3" if name == "random" else "6 4") if control else _DASHES[own.index(name) % len(_DASHES)]
        dash = {"stroke_dasharray": dashes} if dashes else {}
        drawing.line([place(row) for row in mine], colour, 1.2 if control else 2.0, **dash)
        for row in mine:
            x, y = place(row)
            _mark(drawing, x, y, name, colour)
            if row.get("spread"):
                reach = row["spread"] * (bottom - top)
                drawing.line([(x, y - reach), (x, y + reach)], colour)
        drawing.line([(right + 16, top + 8 + 16 * index), (right + 34, top + 8 + 16 * index)], colour, 2.0, **dash)
        _mark(drawing, right + 25, top + 8 + 16 * index, name, colour)
        drawing.text(right + 40, top + 8 + 16 * index, name, fill=INK)
    drawing.text((left + right) / 2, bottom + 30, "keys and values, MB (log)", anchor="middle")
    what = "attention of revisits kept" if figure == "mass_trt" else "attention kept"
    drawing.text(16, (top + bottom) / 2, what, anchor="middle", turn=-90)
    drawing.text(
        left, bottom + 52, "Teacher-forced: the queries are those of the recording. Bars: standard deviation.", size=9
    )
    if replay.get("missing"):
        said = f"Queries of {len(replay['missing'])} KV heads are left out, because the recording is not finite there."
        drawing.text(left, bottom + 66, said, size=9)
    return drawing


def _mark(drawing: Drawing, x: float, y: float, name: str, colour: str) -> None:
    """A point of a curve: the controls are triangles, up what nothing exceeds, down what any policy has to beat."""
    if name not in ("oracle", "random"):
        drawing.circle(x, y, 3, colour)
        return
    up = -1 if name == "oracle" else 1
    corners = [(x - 4, y - 3 * up), (x + 4, y - 3 * up), (x, y + 4 * up)]
    drawing.shape(corners, "#fff", stroke=colour, stroke_width=1.2)


def _curve(row: dict[str, Any]) -> str:
    """The curve that a setting belongs to: its policy, and for beacons what they are."""
    params = row.get("params") or {}
    if row["policy"] != "beacon":
        return str(row["policy"])
    if params.get("selector") == "none" or params.get("beacons") == 0:
        return "beacon, recent only"
    return (
        "beacon, random queries" if params.get("selector") == "random" else f"beacon, {params.get('beacons')} beacons"
    )
