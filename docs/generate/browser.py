"""Chromium looks at a page: ``python docs/generate/browser.py PAGE WIDTH SCHEME``.

It prints a JSON of the faults that a reader would see. A further argument is the file of
a picture of the page's top. Needs the extra ``browser``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "QT_QPA_PLATFORM": "offscreen",
    "QT_LOGGING_RULES": "*=false",
    "QTWEBENGINE_DISABLE_SANDBOX": "1",
}
FLAGS = "--no-sandbox --disable-gpu --hide-scrollbars --log-level=3"
SCHEMES = {"light": "", "dark": " --blink-settings=preferredColorScheme=0"}
LOOK = r"""
(() => {
  document.querySelectorAll('details').forEach(one => { one.open = true });
  const channel = x => { x /= 255; return x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4 };
  const light = c => .2126 * channel(c[0]) + .7152 * channel(c[1]) + .0722 * channel(c[2]);
  const numbers = text => (text.match(/[\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const c = numbers(getComputedStyle(element).backgroundColor);
      if (c.length < 4 || c[3] > .99) return c;
    }
    return [255, 255, 255];
  };
  const faint = [], cut = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode.textContent.trim(), element = texts.currentNode.parentElement;
    if (!text || !element.getClientRects().length) continue;
    const style = getComputedStyle(element), svg = element.closest('svg');
    const ends = [light(numbers(svg ? style.fill : style.color)), light(behind(element))].sort((a, b) => b - a);
    const contrast = (ends[0] + .05) / (ends[1] + .05);
    if (contrast < 4.5) faint.push([text, contrast]);
    if (svg) {
      const own = element.getBoundingClientRect(), all = svg.getBoundingClientRect();
      if (own.left < all.left - 1 || own.right > all.right + 1 || own.top < all.top - 1 || own.bottom > all.bottom + 1)
        cut.push(text);
    } else
      for (let box = element; box && box !== document.body; box = box.parentElement)
        if (box.scrollWidth > box.clientWidth + 1 && box.clientWidth && getComputedStyle(box).overflowX === 'hidden') {
          cut.push(text);
          break;
        }
  }
  return JSON.stringify({texts: document.body.innerText.length, faint: faint, cut: cut,
    sideways: document.documentElement.scrollWidth > innerWidth, width: innerWidth});
})()
"""


def look(page: Path, width: int, scheme: str, picture: str = "") -> None:
    """Print the faults of a page, and write the picture of its top."""
    os.environ["QTWEBENGINE_CHROMIUM_FLAGS"] = FLAGS + SCHEMES[scheme]
    from PyQt6.QtCore import QTimer, QUrl
    from PyQt6.QtWebEngineCore import QWebEnginePage
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    app = QApplication(["browser"])
    messages: list[str] = []

    class Page(QWebEnginePage):  # type: ignore[misc]
        def javaScriptConsoleMessage(self, *message: object) -> None:  # noqa: N802
            messages.append(str(message[1]))

    def show(found: str) -> None:
        print(json.dumps({**json.loads(found), "messages": messages}))
        app.quit()

    def examine(loaded: bool) -> None:
        if picture:
            view.grab().save(picture)
        shown.runJavaScript(LOOK, show)

    view = QWebEngineView()
    shown = Page(view)
    view.setPage(shown)
    view.resize(width, 900)
    # wait for the first paint
    view.loadFinished.connect(
        lambda loaded: QTimer.singleShot(500, lambda: examine(loaded))
    )
    view.setUrl(QUrl.fromLocalFile(str(page.absolute())))
    view.show()
    QTimer.singleShot(60_000, app.quit)
    app.exec()


if __name__ == "__main__":
    look(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
