"""Just enough SVG to draw charts for a paper: shapes and escaped text on a white page."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from xml.sax.saxutils import quoteattr

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#B8A800")
INK, MUTED, FAINT, ACCENT, LOSS = "#1b1d20", "#696d73", "#e9eae7", "#0072b2", "#d55e00"
# Support points of cividis (Nuñez, Anderton, Renslow 2018), from low to high.
_CIVIDIS = (
    (0, 34, 78), (0, 45, 103), (19, 56, 110), (44, 67, 108), (64, 78, 107), (81, 89, 109), (97, 100, 112),
    (112, 112, 116), (128, 123, 121), (144, 136, 120), (161, 148, 117), (179, 161, 112), (198, 175, 103),
    (218, 190, 90), (238, 205, 71), (254, 232, 56),
)  # fmt: skip
_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def cividis(share: float) -> str:
    """The colour of a share from 0 to 1."""
    place = min(1.0, max(0.0, share)) * (len(_CIVIDIS) - 1)
    below = min(len(_CIVIDIS) - 2, int(place))
    rest = place - below
    mixed = (round(a + rest * (b - a)) for a, b in zip(_CIVIDIS[below], _CIVIDIS[below + 1], strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


@dataclass
class Drawing:
    """A picture of a width and a height, in pixels of 1/96 inch."""

    width: float
    height: float
    _parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str, **more: object) -> None:
        """A filled box."""
        self._put("rect", {"x": x, "y": y, "width": width, "height": height, "fill": fill, **more})

    def circle(self, x: float, y: float, radius: float, fill: str, **more: object) -> None:
        """A disc."""
        self._put("circle", {"cx": x, "cy": y, "r": radius, "fill": fill, **more})

    def line(self, points: list[tuple[float, float]], stroke: str, width: float = 1.0, **more: object) -> None:
        """An open line through points."""
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        self._put("polyline", {"points": path, "fill": "none", "stroke": stroke, "stroke_width": width, **more})

    def shape(self, points: list[tuple[float, float]], fill: str, **more: object) -> None:
        """A closed shape."""
        self._put("polygon", {"points": " ".join(f"{x:.2f},{y:.2f}" for x, y in points), "fill": fill, **more})

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: int = 11,
        fill: str = MUTED,
        turn: float = 0,
    ) -> None:
        """A line of text, its middle at the height ``y``."""
        how = {"x": x, "y": y, "text_anchor": anchor, "font_size": size, "fill": fill, "dominant_baseline": "central"}
        if turn:
            how["transform"] = f"rotate({turn} {x:.2f} {y:.2f})"
        safe = _NOT_XML.sub("\ufffd", text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        self._put("text", how, safe)

    def __str__(self) -> str:
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" font-family="Helvetica, Arial, sans-serif">'
            f'<rect width="100%" height="100%" fill="#fff"/>{"".join(self._parts)}</svg>\n'
        )

    def _put(self, name: str, how: dict[str, object], text: str | None = None) -> None:
        said = " ".join(
            f"{key.replace('_', '-')}={quoteattr(f'{value:.2f}' if isinstance(value, float) else str(value))}"
            for key, value in how.items()
        )
        self._parts.append(f"<{name} {said}/>" if text is None else f"<{name} {said}>{text}</{name}>")


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers from low to high."""
    if high <= low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** int(f"{raw:e}".split("e")[1])
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    # A hair's breadth more, because 1 / 0.2 is not always 5.
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]
