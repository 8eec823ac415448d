"""A report in a real browser: every view draws, every control works, nothing leaves the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from beaconscope.trace import Trace
from tests.browser.conftest import Watched, wait_until

CANVASES = ["minimap", "looks", "attention", "heads", "space", "beacons"]
VIEWS = [*CANVASES, "text", "revisits", "clusters", "tradeoff", "card"]


def state(page: Any, name: str) -> Any:
    return page.evaluate(f"window.beaconscope.state.{name}")


def settle(page: Any) -> None:
    page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done))))"
    )


def colours(page: Any, view: str) -> int:
    """How many colours a view's canvas shows."""
    return int(
        page.evaluate(
            """(view) => { const c = document.querySelector(`#view-${view} canvas`);
            const { data } = c.getContext("2d").getImageData(0, 0, c.width, c.height);
            return new Set(new Uint32Array(data.buffer)).size }""",
            view,
        )
    )


def test_every_view_draws_in_both_themes(watched: Watched, balcony_page: Path) -> None:
    page = watched.open(balcony_page)
    for view in VIEWS:
        page.locator(f"#view-{view}").scroll_into_view_if_needed()
        settle(page)
        if view in CANVASES:
            wait_until(page, f"document.querySelector('#view-{view} canvas').dataset.painted")
            assert colours(page, view) > 5, view
    for view in ("clusters", "tradeoff"):
        page.locator(f"#view-{view}").scroll_into_view_if_needed()
        page.wait_for_selector(f"#view-{view} .plot[data-drawn=yes] .main-svg")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    settle(page)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    watched.clean()


def test_what_is_drawn_is_what_is_in_the_trace(watched: Watched, balcony: Trace, balcony_page: Path) -> None:
    tokens = balcony.tokens
    head = balcony.head(18, 2)
    step = 250
    page = watched.open(balcony_page, f"#t={step}&l=18&h=2.0&p=0&o=recorded")
    # The numbers in the panel beside the text.
    facts = page.evaluate(
        """() => { const all = [...document.querySelectorAll("#detail .facts > *")].map((node) => node.textContent);
        return Object.fromEntries(all.map((name, i) => [name, all[i + 1]]).filter((_, i) => i % 2 === 0)) }"""
    )
    assert facts["position"] == str(step)
    assert abs(float(facts["entropy"]) - tokens["entropy"][step]) < 0.011
    assert abs(float(facts["surprise"]) + tokens["logprob"][step]) < 0.011
    # The attention behind the arcs.
    page.locator("#view-looks .tools button", has_text="Data").click()
    rows = page.evaluate(
        """() => [...document.querySelectorAll("#view-looks tbody tr")].map(
        (row) => [...row.children].map((cell) => cell.textContent))"""
    )
    drawn = [(int(row[1]), int(row[2]), float(row[3])) for row in rows if row[0] == "looks at"]
    for position, mass in zip(head.hit_position[step, 0], head.hit_mass[step, 0], strict=True):
        if mass < 0.5 / 255:
            continue
        assert any(start <= position < stop for start, stop, _ in drawn)
    total = sum(float(mass) for mass in head.hit_mass[step, 0])
    assert abs(sum(mass for *_, mass in drawn) - total) < 8 * 0.5 / 255 + 1e-3
    # Whether an entry is held, for every position of a head, after the last step.
    held = page.evaluate(
        """(last) => { const d = window.beaconscope.traces[0]; const head = d.headByName.get("18.2.0");
        return Array.from({ length: last + 1 }, (_, p) => p).filter((p) => { const at = d.evictedAt(head, p);
        return at === null || at > last }) }""",
        balcony.length - 1,
    )
    assert held == balcony.kept(18, 2, balcony.length - 1).tolist()
    # The text that is on the screen.
    shown = page.evaluate("[...document.querySelectorAll('#pane .tok')].map((t) => [+t.dataset.t, t.textContent])")
    assert len(shown) > 50
    for position, text in shown:
        assert text.replace("↵", "\n").strip() in (str(tokens["token"][position]).strip(), "·")
    watched.clean()


def test_a_pixel_of_the_map_is_a_hit(watched: Watched, balcony: Trace, balcony_page: Path) -> None:
    page = watched.open(balcony_page, "#t=250&l=18&h=2.0&p=0&o=recorded&z=240-260")
    page.locator("#view-attention").scroll_into_view_if_needed()
    settle(page)
    cells = page.evaluate(
        "(() => { const { most, size, start } = window.beaconscope.views.attention.cells();"
        " return { most: [...most], size, start } })()"
    )
    assert (cells["size"], cells["start"]) == (20, 240)
    head = balcony.head(18, 2)
    for row in range(20):
        meant = [0] * 20
        for position, mass in zip(head.hit_position[240 + row, 0], head.hit_mass[240 + row, 0], strict=True):
            if 240 <= position < 260:
                meant[position - 240] = round(float(mass) * 255)
        assert cells["most"][row * 20 : row * 20 + 20] == meant


@pytest.mark.parametrize("width", [1440, 390])
def test_bars_and_places_are_drawn_where_they_are(watched: Watched, balcony_page: Path, width: int) -> None:
    watched.page.set_viewport_size({"width": width, "height": 900})
    page = watched.open(balcony_page)
    settle(page)
    # Every bar of the revisits covers a revisit, and every revisit has its bar.
    bars, revisits, length = page.evaluate(
        """(() => { const { minimap } = window.beaconscope.views; const data = window.beaconscope.traces[0];
        const svg = new DOMParser().parseFromString(minimap.toSvg(), "image/svg+xml");
        const accent = getComputedStyle(document.documentElement).getPropertyValue("--accent").trim();
        const bars = [...svg.querySelectorAll("rect")]
          .filter((r) => r.getAttribute("fill") === accent && !r.hasAttribute("opacity"));
        const wide = minimap.width; const [left, right] = wide < 620 ? [8, 8] : [88, 14];
        const place = (x) => (x - left) / (wide - left - right) * data.length;
        return [bars.map((r) => [place(+r.getAttribute("x")), place(+r.getAttribute("x") + +r.getAttribute("width"))]),
          data.revisitPositions, data.length] })()"""
    )
    assert bars
    slack = 0.01 * length / width + 0.5
    assert all(any(low - slack <= at + 0.5 <= high + slack for low, high in bars) for at in revisits)
    assert all(any(low - slack <= at + 0.5 <= high + slack for at in revisits) for low, high in bars)
    rows = page.evaluate("window.beaconscope.views.minimap.spec.table().rows")
    assert [row["first"] for row in rows] == list(range(0, length, rows[0]["last"] + 1))
    assert rows[-1]["last"] == length - 1
    scored = [(row["first"], row["last"]) for row in rows if row["score"] > 0]
    assert all(any(first <= at <= last for first, last in scored) for at in revisits)
    # The words of the places that are looked at are over the arcs to them, not on the line of who looks at the token.
    words, line, height = page.evaluate(
        """(() => { const { chart } = window.beaconscope.views.arcs;
        const svg = new DOMParser().parseFromString(chart.toSvg(), "image/svg+xml");
        const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
        const texts = [...svg.querySelectorAll("text")];
        const words = texts.filter((t) => [colour("--accent"), colour("--loss")].includes(t.getAttribute("fill")));
        const own = texts.find((t) => t.textContent === "looks at");
        const line = own ? +own.getAttribute("y") : chart.height / 2;
        return [words.map((t) => +t.getAttribute("y")), line, chart.height] })()"""
    )
    assert words
    assert all(y < line for y in words)
    assert line < height / 2 + 10
    watched.clean()


def test_words_of_the_page_say_what_they_are_of(watched: Watched, balcony_page: Path) -> None:
    page = watched.open(balcony_page)
    readout = page.locator("#readout")
    assert "attention of all heads; beacons and queries of layer" in readout.inner_text()
    page.keyboard.press("a")
    wait_until(page, "!document.querySelector('#readout').textContent.includes('all heads')")
    assert "distant attention of the heads that turn back" in page.locator("[aria-labelledby=q-lost]").inner_text()
    page.locator("#view-tradeoff").scroll_into_view_if_needed()
    page.wait_for_selector("#view-tradeoff .plot[data-drawn=yes]")
    marks = page.evaluate(
        "Object.fromEntries(document.querySelector('#view-tradeoff .plot').data.filter((t) => t.name)"
        ".map((t) => [t.name, t.marker.symbol]))"
    )
    assert len(set(marks.values())) == len(marks) == 3
    assert "The band lies between the two" in page.locator("#view-tradeoff figcaption").inner_text()
    command = page.locator("#view-card code").first.inner_text()
    assert "--dtype bfloat16" in command
    assert "--completion" in command
    watched.clean()


def test_the_list_of_beacons_is_cut_between_rows(watched: Watched, balcony_page: Path) -> None:
    page = watched.open(balcony_page)
    page.locator("#view-beacons").scroll_into_view_if_needed()
    settle(page)
    shown, whole = page.evaluate(
        "(() => { const { clientHeight, scrollHeight } = document.querySelector('#view-beacons .canvas');"
        " return [clientHeight, scrollHeight] })()"
    )
    # Twenty pixels of axis, then rows of thirteen.
    assert shown < whole
    assert (shown - 20) % 13 == 0
    watched.clean()


def test_one_selection_for_all_views(watched: Watched, balcony_page: Path) -> None:
    page = watched.open(balcony_page)
    first = page.locator("#view-revisits tbody tr").first
    first.scroll_into_view_if_needed()
    page.locator("#view-revisits tbody tr").nth(2).click()
    settle(page)
    token = state(page, "token")
    assert page.locator("#view-revisits tr[aria-selected=true]").get_attribute("data-position") == str(token)
    assert page.locator(".tok.chosen").get_attribute("data-t") == str(token)
    wait_until(page, f"location.hash.includes('t={token}&')")
    assert str(token) in page.locator("#readout").inner_text()
    page.locator(".tok").nth(40).click()
    settle(page)
    chosen = state(page, "token")
    assert chosen != token
    # A link to a finding opens at the finding.
    wait_until(page, f"location.hash.includes('t={chosen}&')")
    again = watched.open(balcony_page, page.url.split("html", 1)[1])
    assert state(again, "token") == chosen
    page.evaluate("location.hash = '#t=12&l=9&h=1.1&p=0'")
    wait_until(page, "window.beaconscope.state.token === 12")
    assert page.evaluate("window.beaconscope.store.head.name") == "9.1.1"
    watched.clean()


def test_the_chosen_token_is_in_view_whatever_was_clicked_before(watched: Watched, balcony_page: Path) -> None:
    page = watched.open(balcony_page, "#t=10")
    page.locator(".tok.chosen").click()
    settle(page)
    page.evaluate("window.beaconscope.store.set({ token: 300 })")
    settle(page)
    assert page.locator(".tok.chosen").is_visible()
    watched.clean()


def test_everything_by_keyboard(watched: Watched, balcony_page: Path) -> None:
    page = watched.open(balcony_page, "#t=200")
    keys = page.keyboard

    def after(key: str, name: str) -> Any:
        keys.press(key)
        settle(page)
        return state(page, name)

    assert after("ArrowRight", "token") == 201
    assert after("ArrowLeft", "token") == 200
    sentence = state(page, "sentence")
    assert after("]", "sentence") == sentence + 1
    assert after("ArrowUp", "sentence") == sentence
    revisits = page.evaluate("window.beaconscope.traces[0].revisitPositions")
    start = state(page, "token")
    assert after("n", "token") == next(position for position in revisits if position > start)
    start = state(page, "token")
    assert after("p", "token") == max([position for position in revisits if position < start] or revisits)
    head = state(page, "head")
    assert after("l", "head") != head
    assert state(page, "pooled") is False
    assert after("a", "pooled") is True
    assert after("h", "head") is not None
    assert after("o", "over") == "recorded"
    assert after("+", "zoom") is not None
    assert after("0", "zoom") is None
    until = page.evaluate("window.beaconscope.views.space.until()")
    keys.press(" ")
    wait_until(page, f"window.beaconscope.views.space.until() !== {until}")
    keys.press(" ")
    keys.press("?")
    assert page.locator("#help").is_visible()
    keys.press("Escape")
    assert page.locator("#help").is_hidden()
    keys.press("/")
    keys.type("budget")
    keys.press("Enter")
    settle(page)
    assert "budget" in page.evaluate(
        "(() => { const s = window.beaconscope.state.token; const d = window.beaconscope.traces[0];"
        " return d.token(s) + d.token(s + 1) })()"
    )
    keys.press("Escape")
    theme = page.evaluate("document.documentElement.dataset.theme")
    keys.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != theme
    # Every control can be reached and says what it is.
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, canvas")].filter((node) =>
        !(node.getAttribute("aria-label") || node.textContent.trim() || node.title || node.labels?.length)
        && node.offsetParent).map((node) => node.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []
    watched.clean()


def test_controls_of_the_views(watched: Watched, balcony_page: Path) -> None:
    page = watched.open(balcony_page)
    for option in ("distant_share", "entropy", "surprise", "lost_share", "beacon", "score"):
        page.select_option("#view-text select", option)
    page.click("#view-looks button[data-value=recorded]")
    page.click("#view-looks [aria-label='Heads'] button[data-value=false]")
    page.click("#view-looks [aria-label='Looked at'] button[data-value=true]")
    settle(page)
    assert (state(page, "over"), state(page, "pooled")) == ("recorded", False)
    page.locator("#view-heads").scroll_into_view_if_needed()
    for option in ("event_rate", "distant_share", "silhouette", "coverage", "retrieval", "kurtosis"):
        page.select_option("#view-heads select", option)
    before = state(page, "head")
    box = page.locator("#view-heads canvas").bounding_box()
    page.mouse.click(box["x"] + 70, box["y"] + 40)
    settle(page)
    assert state(page, "head") != before
    page.locator("#view-space").scroll_into_view_if_needed()
    page.click("#view-space button[data-value=post-rope]")
    for option in ("phase", "beacon", "trt"):
        page.select_option("#view-space select", option)
    page.locator("#view-space input[type=range]").evaluate(
        "(n) => { n.value = 200; n.dispatchEvent(new Event('input')) }"
    )
    assert page.evaluate("window.beaconscope.views.space.until()") == 200
    page.locator("#view-beacons canvas").focus()
    page.keyboard.press("ArrowDown")
    settle(page)
    assert state(page, "beacon").startswith("q")
    assert "Protects" in page.locator("#view-beacons .about").inner_text()
    page.locator("#view-attention").scroll_into_view_if_needed()
    box = page.locator("#view-attention canvas").bounding_box()
    page.mouse.move(box["x"] + 150, box["y"] + 150)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 280, steps=4)
    page.mouse.up()
    settle(page)
    assert state(page, "zoom") is not None
    page.fill("#view-revisits input", "zzz nothing")
    assert page.locator("#view-revisits tbody tr").count() == 0
    page.fill("#view-revisits input", "")
    page.click("#view-revisits th button[data-key=position]")
    positions = page.evaluate(
        "[...document.querySelectorAll('#view-revisits tbody tr')].map((r) => +r.dataset.position)"
    )
    assert positions == sorted(positions)
    box = page.locator("#view-minimap canvas").bounding_box()
    page.locator("#view-minimap").scroll_into_view_if_needed()
    box = page.locator("#view-minimap canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 20)
    settle(page)
    assert abs(state(page, "token") - 170) < 20
    watched.clean()


@pytest.mark.parametrize(
    ("view", "kind"), [("looks", "SVG"), ("attention", "PNG"), ("heads", "CSV"), ("tradeoff", "SVG")]
)
def test_charts_are_saved(watched: Watched, balcony_page: Path, view: str, kind: str) -> None:
    page = watched.open(balcony_page)
    page.locator(f"#view-{view}").scroll_into_view_if_needed()
    if view == "tradeoff":
        page.wait_for_selector("#view-tradeoff .plot[data-drawn=yes]")
    with page.expect_download() as download:
        page.locator(f"#view-{view} .tools button", has_text=kind).click()
    saved = Path(download.value.path()).read_bytes()
    assert download.value.suggested_filename == f"{view}.{kind.lower()}"
    assert saved.startswith({"SVG": b"<svg", "PNG": b"\x89PNG", "CSV": b"layer.KV head"}[kind])
    watched.clean()


def test_nothing_of_a_hostile_trace_is_executed(watched: Watched, hostile_page: Path) -> None:
    page = watched.open(hostile_page)
    for view in VIEWS:
        page.locator(f"#view-{view}").scroll_into_view_if_needed()
        for data in page.locator(f"#view-{view} .tools button", has_text="Data").all():
            data.click()
    page.locator(".tok").nth(2).hover()
    page.evaluate("location.hash = '#t=0&h=\"><img src=x onerror=window.hacked=9>'")
    settle(page)
    assert page.evaluate("window.hacked") is None
    assert page.locator("#main img, #main script, #tip img").count() == 0
    texts = page.evaluate("[...document.querySelectorAll('#pane .tok')].map((t) => t.textContent)")
    assert "</script><script>window.hacked = 1</script>" in texts
    assert "😀" in texts
    # What is forbidden by the page's own policy.
    refused = page.evaluate(
        """async () => { const tried = [];
        // What the test driver runs is above the policy; a timer's work is the page's own.
        await new Promise((done) => setTimeout(() => {
          try { eval("1"); tried.push("eval") } catch { /* refused */ }
          done() }));
        try { await fetch("https://example.org/"); tried.push("fetch") } catch { /* refused */ }
        const script = document.createElement("script"); script.textContent = "window.hacked = 8";
        document.body.append(script);
        return [...tried, window.hacked ?? "no"] }"""
    )
    assert refused == ["no"]
    assert watched.requests == [] or all("example.org" in url for url in watched.requests)


def test_a_tiny_trace_says_what_is_missing(watched: Watched, tiny_page: Path) -> None:
    page = watched.open(tiny_page)
    for view in VIEWS:
        page.locator(f"#view-{view}").scroll_into_view_if_needed()
        settle(page)
    for said in ("too short for revisits", "No replay was given", "no recorded beacons", "evicted nothing", "values"):
        wait_until(page, f"document.querySelector('main').textContent.includes('{said}')")
    watched.clean()


def test_two_traces_side_by_side(watched: Watched, pair_page: Path) -> None:
    page = watched.open(pair_page)
    assert "A: a.parquet" in page.inner_text("#view-compare")
    page.click("#traces button[data-value='1']")
    settle(page)
    assert page.evaluate("window.beaconscope.store.trace") == 1
    wait_until(page, "location.hash.includes('trace=1')")
    watched.clean()


def test_a_search_goes_on_in_the_trace_that_is_shown(watched: Watched, pair_page: Path) -> None:
    page = watched.open(pair_page)
    places = page.evaluate(
        "window.beaconscope.traces.map((trace) =>"
        " Array.from(trace.text, (_, at) => at).filter((at) => trace.token(at) === ' plan'))"
    )
    assert places[0][0] != places[1][0]
    page.fill("#query", " plan")
    page.click("#traces button[data-value='1']")
    page.locator("#query").press("Enter")
    settle(page)
    assert state(page, "token") == places[1][0]
    watched.clean()


def test_a_phone_scrolls_one_way_only(watched: Watched, balcony_page: Path) -> None:
    watched.page.set_viewport_size({"width": 390, "height": 844})
    page = watched.open(balcony_page)
    for view in VIEWS:
        page.locator(f"#view-{view}").scroll_into_view_if_needed()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    watched.clean()
