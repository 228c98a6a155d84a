"""Check the report's page in a real browser: light and dark, wide and narrow, with trees on hover.

    make check-page
    python tests/interop/check_page.py runs/tiny/report/report.html chromium FOLDER

Needs playwright and a system Chromium. Prints every problem and saves screenshots to FOLDER. Exit code 1 if there is a
problem.
"""

import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

WIDTHS = {"wide": 1280, "narrow": 390}
READABLE = 4.5  # the contrast between text and background that WCAG 2 requires
STEPS = 12  # how many of the page's decoding steps to hover over, spread over all of them
SVG_WITHOUT_MARKS = """() => [...document.querySelectorAll('svg.plot')]
    .filter(plot => !plot.querySelector("use") || plot.getBoundingClientRect().height < 100)
    .map(plot => plot.getAttribute('aria-label'))"""
CONTRASTS = """() => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = colour => {
        const [red, green, blue] = numbers(colour).map(c => c / 255)
            .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const background = element => {
        for (let at = element; at; at = at.parentElement) {
            const colour = getComputedStyle(at).backgroundColor;
            if (numbers(colour).length < 4 || numbers(colour)[3] > 0) return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    const least = {};
    for (const element of document.querySelectorAll('h1, td, th, p, pre, .prompt, .bonus, svg text, [class^=d]')) {
        const style = getComputedStyle(element);
        const ink = light(element instanceof SVGElement ? style.fill : style.color), paper = light(background(element));
        const kind = element.getAttribute('class');
        const name = element.tagName.toLowerCase() + (kind ? '.' + kind : '');
        const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
        least[name] = Math.min(least[name] ?? 99, ratio);
    }
    return least;
}"""


def look(page: Page, name: str, folder: Path) -> Iterator[str]:
    """The problems of an open page."""
    page.screenshot(path=folder / f"{name}.png", full_page=True)
    if not page.locator("svg.plot").count():
        yield "no plot"
    for title in page.evaluate(SVG_WITHOUT_MARKS):
        yield f"plot without marks: {title}"
    across, room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    if across > room:
        yield f"the page is {across} pixels wide but only {room} fit"
    for what, ratio in page.evaluate(CONTRASTS).items():
        if ratio < READABLE:
            yield f"{what} has a contrast of {ratio:.1f}; {READABLE} or more is required"
    yield from hover_over_steps(page, name, folder)


def hover_over_steps(page: Page, name: str, folder: Path) -> Iterator[str]:
    """Hovering over a step must show its whole tree, and leaving it must hide the tree."""
    steps = page.locator(".step")
    if not steps.count():
        yield "no decoding step to hover over"
    for number in range(0, steps.count(), max(steps.count() // STEPS, 1)):
        step, tree = steps.nth(number), steps.nth(number).locator(".tree")
        step.locator("span").first.hover()
        if not tree.is_visible():
            yield f"step {number} shows no tree"
            continue
        box, view = tree.bounding_box(), page.viewport_size
        assert box is not None
        assert view is not None
        if box["x"] < 0 or box["y"] < 0 or box["x"] + box["width"] > view["width"]:
            yield f"the tree of step {number} is cut off"
        if number == steps.count() // STEPS * (STEPS // 2):
            page.screenshot(path=folder / f"{name}-tree.png")
        page.mouse.move(0, 0)
        if tree.is_visible():
            yield f"the tree of step {number} stays"


def check(path: Path, browser: str, folder: Path) -> list[str]:
    found: list[str] = []
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        schemes: tuple[Any, ...] = ("light", "dark")
        for scheme, (name, width) in product(schemes, WIDTHS.items()):
            page = running.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
            said: list[str] = []
            page.on("console", lambda message, said=said: said.append(f"console: {message.text}"))
            page.on("pageerror", lambda error, said=said: said.append(f"error: {error}"))
            page.on("request", lambda request, said=said: said.append(f"fetches {request.url[:80]}"))
            page.goto(path.resolve().as_uri())
            said.remove(f"fetches {path.resolve().as_uri()[:80]}")
            found += [f"{scheme}, {name}: {line}" for line in [*said, *look(page, f"{scheme}-{name}", folder)]]
            page.close()
        running.close()
    return found


def main() -> None:
    path, browser, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    found = check(path, browser, folder)
    print("\n".join(found) or f"no problems; screenshots in {folder}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
