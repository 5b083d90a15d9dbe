"""Makes the pictures of docs/gallery.md that are not measurements: short runs, and their report in a real Chromium.

python docs/pictures.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "gallery"
COMMANDS = (
    "compare --methods fedrts,random,fedavg --densities 0.1 --seeds 0,1 --out compared",
    "report compared --no-png",
    "data show digits --clients 20 --alpha 0.3 --out {folder}/clients.png",
    "regret --steps 2000 --out regret",
)
VIEWS = {
    "report": (1280, 900, False, "#digits-mlp-accuracy-rounds"),
    "report_dark": (1280, 900, True, "#digits-mlp-section-topology"),
    "report_phone": (390, 760, False, "#content"),
}
"""Pictures of the report: width and height of the window, dark or not, and what it is scrolled to."""


def main() -> None:
    """Write all of them."""
    sys.path.insert(0, str(ROOT / "tests"))
    from browser import Browser, executable

    chromium = executable()
    if chromium is None:
        sys.exit("there is no Chromium here")
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        for command in COMMANDS:
            words = command.format(folder=FOLDER).split()
            subprocess.run([sys.executable, "-m", "fedrts", *words], cwd=work, check=True)
        (FOLDER / "regret.png").write_bytes((Path(work) / "regret" / "regret.png").read_bytes())
        browser = Browser(chromium)
        for name, (width, height, dark, place) in VIEWS.items():
            browser.open(Path(work) / "compared" / "report.html", width, height, dark)
            browser.js(f"document.querySelector({place!r}).scrollIntoView()")
            time.sleep(1)  # it scrolls smoothly
            browser.screenshot(FOLDER / f"{name}.png", whole=False)
        browser.close()
    for picture in FOLDER.glob("*.png"):  # flat colours: a palette says it all in a third of the bytes
        Image.open(picture).convert("RGB").quantize(128).save(picture, optimize=True)


if __name__ == "__main__":
    main()
