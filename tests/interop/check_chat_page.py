"""Check the chat page in a real browser: a chat, its trees, side by side, light and dark, wide and narrow.

    make check-page
    python tests/interop/check_chat_page.py HEADSTART chromium FOLDER

HEADSTART is the command that serves; it is started on the bundled target. Needs playwright, axe-playwright-python and a
system Chromium. Prints every problem and saves screenshots to FOLDER. Exit code 1 if there is a problem.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, sync_playwright

SIZES = {"wide": (1360, 860), "narrow": (390, 844)}
GRAVE = ("serious", "critical")
TEXT = "def is_valid(self, name):\n    if"
BEFORE_MARK = """id => {
    const spans = [...document.getElementById(id).querySelectorAll('.t')];
    const mark = spans.findIndex(span => span.classList.contains('parted'));
    return mark < 0 ? null : spans.slice(0, mark).map(span => span.textContent).join('');
}"""
MODEL = ("--target", "assets/demo_target", "--head", "assets/demo_head", "--dtype", "float32", "--always-draft")


def look(page: Page, name: str, folder: Path) -> Iterator[str]:
    """The problems of the page as it stands."""
    page.screenshot(path=folder / f"{name}.png")
    for fault in Axe().run(page).response["violations"]:
        if fault["impact"] in GRAVE:
            yield f"{fault['impact']}: {fault['id']} at {fault['nodes'][0]['html'][:80]}"
    across, room = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    if across > room:
        yield f"the page is {across} pixels wide but only {room} fit"


def send(page: Page, text: str) -> None:
    page.fill("#question", text)
    page.keyboard.press("Enter")
    page.wait_for_selector(".busy", state="detached", timeout=120_000)


def use(page: Page, url: str, name: str, folder: Path) -> Iterator[str]:
    """Use the page as a visitor would; yields the problems."""
    page.goto(url)
    page.wait_for_selector("#ideas button")
    yield from look(page, f"{name}-start", folder)
    send(page, TEXT)
    if not page.locator(".talk .d1").count():
        yield "no token is coloured as drafted"
    page.locator(".talk .d1").first.click()
    if not page.locator("#tree svg path.taken").count():
        yield "a drafted token shows no tree with an accepted path"
    yield from look(page, f"{name}-chat", folder)
    page.click("#mode-compare")
    send(page, TEXT)
    verdict = page.inner_text("#verdict h2")
    if "equal" not in verdict:
        yield f"in float32 the texts must be equal, but the page says: {verdict}"
    yield from look(page, f"{name}-side-by-side", folder)
    yield from part(page)
    yield from look(page, f"{name}-parted", folder)
    page.click("#open-settings")
    yield from look(page, f"{name}-settings", folder)


def part(page: Page) -> Iterator[str]:
    """Let the plain text be another one, by a penalty; the page must mark where the two part, and tell the margin."""

    def penalise(route: Route) -> None:
        body = json.loads(route.request.post_data or "{}")
        route.continue_(post_data=json.dumps({**body, **({} if body["speculative"] else {"presence_penalty": 2})}))

    page.route("**/v1/**", penalise)
    send(page, TEXT)
    page.unroute("**/v1/**")
    told = page.inner_text("#verdict")
    if "differ by" not in told or "more than rounding in float32 explains" not in told:
        yield f"the margin is not told where two texts part: {told}"
    before, other = (page.evaluate(BEFORE_MARK, f"{side}-text") for side in ("with", "plain"))
    if before is None or before != other:
        yield f"the texts before the marks must be equal: {before!r} and {other!r}"


def check(url: str, browser: str, folder: Path) -> list[str]:
    found: list[str] = []
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        schemes: tuple[Any, ...] = ("light", "dark")
        for scheme, (size, (width, height)) in product(schemes, SIZES.items()):
            page = running.new_page(color_scheme=scheme, viewport={"width": width, "height": height})
            said: list[str] = []
            page.on("console", lambda message, said=said: said.append(f"console: {message.text}"))
            page.on("pageerror", lambda error, said=said: said.append(f"error: {error}"))
            name = f"chat-{scheme}-{size}"
            found += [f"{name}: {line}" for line in [*use(page, url, name, folder), *said]]
            page.close()
        running.close()
    return found


def main() -> None:
    headstart, browser, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    folder.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen([headstart, "serve", *MODEL, "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = check(server.stdout.readline().split()[0], browser, folder)
        finally:
            server.kill()
    print("\n".join(found) or f"no problems; screenshots in {folder}")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
