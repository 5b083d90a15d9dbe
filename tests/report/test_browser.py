"""The report in a real Chromium: quiet, complete, usable by mouse and keyboard, and it fits."""

import pytest

WIDTHS = [360, 1600]
WAIT = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"


@pytest.fixture
def page(browser, written):
    """`page(width, dark)` opens the report."""

    def opened(width=1600, dark=False):
        browser.open(written[0], width, dark=dark)
        browser.js(WAIT)
        return browser

    return opened


def box(browser, selector):
    """Left, top, right and bottom of an element."""
    found = browser.js(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
    return [found[side] for side in ("left", "top", "right", "bottom")]


def centre(browser, selector):
    """The middle of an element, after scrolling to it."""
    browser.js(f"document.querySelector('{selector}').scrollIntoView({{block: 'center', behavior: 'instant'}})")
    left, top, right, bottom = box(browser, selector)
    return (left + right) / 2, (top + bottom) / 2


def tooltip(browser, figure):
    """What the tooltip of a figure says; None while it is hidden."""
    return browser.js(f"(() => {{ const t = document.querySelector('#{figure} .tip'); return t.hidden ? null : t.innerText }})()")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_quiet_complete_and_fits(page, written, width, dark):
    browser = page(width, dark)
    assert browser.complaints() == []
    assert browser.requests() == [written[0].absolute().as_uri()]  # the file itself and nothing else
    count = "(f) => [f.id, f.querySelectorAll('.line, .mark, .cell, .bar').length]"
    drawn = browser.js(f"Object.fromEntries([...document.querySelectorAll('figure')].map({count}))")
    assert set(drawn) == {figure.id for figure in written[1].figures}
    assert len(drawn) >= 20
    assert all(drawn.values()), drawn
    expected = {f.id: len(f.rows) * len(f.columns) for f in written[1].figures if f.kind == "heat"}
    assert {name: drawn[name] for name in expected} == expected
    assert browser.js("[document.documentElement.scrollWidth, document.body.scrollWidth]") == [width, width]
    outside = browser.js(
        "[...document.querySelectorAll('figure, .table, h1, h2, h3, h4, p, .legend button')]"
        ".filter((e) => e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 80))"
    )
    assert outside == []
    spilled = browser.js(
        """[...document.querySelectorAll('figure')].filter((figure) => {
          const {left, right} = figure.getBoundingClientRect();
          const texts = [...figure.querySelectorAll('.chart text')].map((text) => text.getBoundingClientRect());
          return texts.some((text) => text.left < left - 1 || text.right > right + 1);
        }).map((figure) => figure.id)"""
    )
    assert spilled == []


def test_light_and_dark_follow_the_system_and_the_button(page):
    def background():
        return browser.js("getComputedStyle(document.body).backgroundColor")

    browser = page(dark=False)
    light = background()
    browser = page(dark=True)
    dark = background()
    assert light != dark
    browser.js("document.getElementById('theme').click()")
    assert (browser.js("document.getElementById('theme').textContent"), background()) == ("Light", light)
    browser.js("document.getElementById('theme').click()")
    assert (browser.js("document.getElementById('theme').textContent"), background()) == ("Dark", dark)
    browser.js("document.getElementById('theme').click()")
    assert browser.js("document.getElementById('theme').textContent") == "Auto"


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_contrast(page, dark):
    """WCAG AA (4.5 : 1) for body text, captions, and axis labels, on the cards."""
    browser = page(dark=dark)
    worst = browser.js(
        """(() => {
          const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
          const light = (colour) => {
            canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
            const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((v) => linear(v / 255));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const card = light(getComputedStyle(document.querySelector('figure')).backgroundColor);
          const words = document.querySelectorAll('figure h4, figure .caption, .legend button, td');
          const inks = [...words].map((e) => getComputedStyle(e).color);
          inks.push(...[...document.querySelectorAll('.chart text:not(.on-high):not(.on-low)')].map((e) => getComputedStyle(e).fill));
          return Math.min(...[...new Set(inks)].map(light).map((ink) => (Math.max(ink, card) + 0.05) / (Math.min(ink, card) + 0.05)));
        })()"""
    )
    assert worst >= 4.5


def test_curves_are_named_at_their_ends_in_their_colours(page):
    browser = page()
    figure = "document.getElementById('digits-mlp-accuracy-rounds')"
    named = browser.js(
        f"Object.fromEntries([...{figure}.querySelectorAll('.chart text.name')].map((t) => [t.textContent, getComputedStyle(t).fill]))"
    )
    buttons = (
        f"Object.fromEntries([...{figure}.querySelectorAll('.legend button')]"
        ".map((b) => [b.textContent, getComputedStyle(b.querySelector('.line')).stroke]))"
    )
    curves = browser.js(buttons)
    assert sorted(named.values()) == sorted(curves.values())
    assert {name: named[name] for name in curves if name in named} == {name: curves[name] for name in named if "…" not in name}
    assert len(set(named.values())) == 3


@pytest.mark.parametrize("figure", ["digits-mlp-accuracy-rounds", "digits-mlp-classes", "digits-mlp-sent"])
def test_a_tooltip_follows_the_mouse(page, figure):
    browser = page()
    mark = {"rounds": ".chart .mark", "classes": ".cell", "sent": ".chart .bar"}[figure.rpartition("-")[2]]
    assert tooltip(browser, figure) is None
    browser.hover(*centre(browser, f"#{figure} {mark}"))
    assert tooltip(browser, figure)
    left, _, right, _ = box(browser, f"#{figure} .tip")
    assert 0 <= left <= right <= 1600
    browser.hover(2, 2)
    assert tooltip(browser, figure) is None


def test_a_tooltip_says_what_the_data_says(page, written):
    (figure,) = [figure for figure in written[1].figures if figure.id == "digits-mlp-accuracy-rounds"]
    browser = page()
    browser.hover(*centre(browser, f'#{figure.id} g[data-series="0"] .mark'))
    shown = tooltip(browser, figure.id).splitlines()
    series = figure.series[0]
    assert shown[0] == series.name
    number = int(shown[1].removeprefix("rounds: "))
    (point,) = [point for point in series.points if point.x == number]
    assert shown[2] == f"test accuracy: {100 * point.y:.1f} % ± {100 * point.error:.1f} %"
    assert shown[3] == "mean of 2 runs"


def test_arrow_keys_walk_through_the_values(page, written):
    (figure,) = [figure for figure in written[1].figures if figure.id == "digits-mlp-accuracy-rounds"]
    browser = page()
    browser.js(f"document.querySelector('#{figure.id} .legend button:last-child').focus()")
    browser.press("Tab")
    assert browser.js("document.activeElement.closest('figure').id") == figure.id
    names = [series.name for series in figure.series]
    rounds = [point.x for point in figure.series[0].points]
    first = tooltip(browser, figure.id)
    assert first.startswith(f"{names[0]}\nrounds: {rounds[0]:.0f}\n")
    browser.press("ArrowRight")
    assert tooltip(browser, figure.id).startswith(f"{names[0]}\nrounds: {rounds[1]:.0f}\n")
    browser.press("ArrowDown")
    assert tooltip(browser, figure.id).startswith(f"{names[1]}\nrounds: {rounds[1]:.0f}\n")
    browser.press("End")
    assert tooltip(browser, figure.id).startswith(f"{names[1]}\nrounds: {rounds[-1]:.0f}\n")
    browser.press("ArrowUp")
    browser.press("Home")
    assert tooltip(browser, figure.id) == first
    browser.press("Escape")
    assert tooltip(browser, figure.id) is None


def test_every_chart_answers_to_the_keyboard(page, written):
    browser = page(360)
    for figure in written[1].figures:
        browser.js(f"document.querySelector('#{figure.id} .chart svg').focus()")
        browser.press("ArrowRight")
        assert tooltip(browser, figure.id), figure.id
    assert browser.complaints() == []


def test_the_legend_hides_a_series(page):
    figure = "digits-mlp-accuracy-rounds"
    browser = page()
    count = f"document.querySelectorAll('#{figure} .line').length - document.querySelectorAll('#{figure} .legend .line').length"
    before = browser.js(count)
    browser.js(f"document.querySelector('#{figure} .legend button').focus()")
    browser.press("Enter")
    assert browser.js(count) == before - 1
    assert browser.js(f"document.querySelector('#{figure} .legend button').getAttribute('aria-pressed')") == "false"
    browser.js(f"[...document.querySelectorAll('#{figure} .legend button')].slice(1).forEach((b) => b.click())")
    assert browser.js(count) == 0  # an empty chart is no error
    assert browser.complaints() == []


def test_tables_sort_by_their_headings(page):
    browser = page()
    column = "[...document.querySelectorAll('#digits-mlp-results tbody tr')].map((r) => r.cells[3].dataset.value)"
    head = "document.querySelectorAll('#digits-mlp-results thead th')[3]"
    browser.js(f"{head}.querySelector('button').focus()")
    browser.press("Enter")
    assert browser.js(f"{head}.getAttribute('aria-sort')") == "ascending"
    numbers = [float(value) for value in browser.js(column)]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 3
    browser.press("Enter")
    assert browser.js(f"{head}.getAttribute('aria-sort')") == "descending"
    assert [float(value) for value in browser.js(column)] == sorted(numbers, reverse=True)
    browser.js("document.querySelector('#digits-mlp-results thead th button').click()")
    names = browser.js("[...document.querySelectorAll('#digits-mlp-results tbody th')].map((r) => r.textContent)")
    assert names == sorted(names)
    assert browser.js(f"{head}.getAttribute('aria-sort')") == "none"


def test_empty_cells_sort_last(page):
    browser = page()
    column = "[...document.querySelectorAll('#digits-mlp-target tbody tr')].map((r) => r.cells[3].dataset.value)"
    for _ in range(2):
        browser.js("document.querySelectorAll('#digits-mlp-target thead button')[3].click()")
        values = browser.js(column)
        assert values == sorted(values, key=lambda value: value == "")


def test_numbers_behind_a_chart_are_a_table(page, written):
    browser = page()
    (figure,) = [figure for figure in written[1].figures if figure.id == "digits-mlp-accuracy-rounds"]
    browser.js(f"document.querySelector('#{figure.id} details.data').open = true")
    browser.js("new Promise((done) => setTimeout(done, 50))")
    assert browser.js(f"document.querySelectorAll('#{figure.id} tbody tr').length") == sum(len(series.points) for series in figure.series)


def test_it_is_redrawn_when_the_window_changes(page):
    browser = page(1600)
    wide = browser.js("document.querySelector('.chart svg').viewBox.baseVal.width")
    browser.call("Emulation.setDeviceMetricsOverride", width=360, height=800, deviceScaleFactor=1, mobile=False)
    browser.js(WAIT)
    assert browser.js("document.querySelector('.chart svg').viewBox.baseVal.width") < min(wide, 360)
    assert browser.js("document.documentElement.scrollWidth") == 360


def test_failures_are_shown(page, written):
    browser = page(360)
    shown = browser.js("[...document.querySelectorAll('#failures li')].map((e) => e.textContent)")
    assert shown == list(written[1].problems)
    assert any("damaged: left out: experiment.toml is damaged" in entry for entry in shown)
    assert any("unfinished after 12 of 12 rounds" in entry for entry in shown)


def test_it_prints_in_light_colours_without_controls(page):
    browser = page(dark=True)
    browser.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert browser.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.js("getComputedStyle(document.querySelector('nav')).display") == "none"
    browser.call("Emulation.setEmulatedMedia", media="")
