"""The pictures of the README and of docs/performance.md, out of `benchmarks/results`: ``python tools/pictures.py``.

An SVG is small, has its data inside (`described`), no date, and ids that depend on nothing but what is drawn. Colours
are of middling lightness on no background, so that they are seen on a light page and on a dark one.
"""

from __future__ import annotations

import html
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from performance.pictures import PICTURES, Panel, Picture
from performance.results import ROOT

FOLDER = ROOT / "docs" / "pictures"
_INK = "#7d8590"
_COLOURS = ("#3b82c4", "#d9822b", "#4a9d5f", "#b0609c", "#8a7bd1", "#a08a3c")
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bateleur",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
}


def described(svg: str) -> Any:
    """The data that a picture was made of, as it says itself; None of one that does not say."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", svg, re.DOTALL)
    return None if found is None else json.loads(html.unescape(found[1]))


def plain(picture: Picture) -> Any:
    """A picture's data as JSON brings it back."""
    return json.loads(json.dumps(picture.data()))


def draw(picture: Picture, file: Path) -> None:
    """Write it, with its data inside."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        panels = picture.panels()
        figure, axes = pyplot.subplots(1, len(panels), figsize=(9.6, 3.0), squeeze=False)
        figure.subplots_adjust(left=0.07, right=0.985, bottom=0.17, top=0.9, wspace=0.22)
        for index, (panel, at) in enumerate(zip(panels, axes[0], strict=True)):
            _fill(at, panel)
            if len(panel.series) > 1 and (index == 0 or panel.series.keys() != panels[0].series.keys()):
                at.legend(loc="best" if panel.bars else "upper left")
        metadata = {"Date": None, "Creator": None, "Title": picture.title}
        metadata["Description"] = json.dumps(picture.data())
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
        pyplot.close(figure)
    text = file.read_text(encoding="utf-8")
    file.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def _fill(at: Any, panel: Panel) -> None:
    places = range(len(panel.places))
    width = 0.8 / len(panel.series)
    for index, (name, values) in enumerate(panel.series.items()):
        colour = _COLOURS[index // len(panel.dashes) % len(_COLOURS)]
        if panel.bars:
            middle = [place + (index - (len(panel.series) - 1) / 2) * width for place in places]
            drawn = at.bar(middle, values, width * 0.94, label=name, color=colour)
            at.bar_label(drawn, [_brief(value) for value in values], fontsize=7, padding=1)
        else:
            at.plot(places, values, panel.dashes[index % len(panel.dashes)], label=name, color=colour, marker="o", ms=3)
    if panel.log:
        at.set_yscale("log")
        at.set_ylim(1, 1000)
    else:
        at.set_ylim(0, 1.12 * max(max(values) for values in panel.series.values()))
    if panel.line_at is not None:
        at.axhline(panel.line_at, color=_INK, lw=0.8, ls=":")
    at.set_xticks(list(places), panel.places)
    at.set_xlabel(panel.below)
    at.set_ylabel(panel.left)
    at.set_title(panel.title)


def _brief(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, picture in PICTURES.items():
        draw(picture, FOLDER / f"{name}.svg")


if __name__ == "__main__":
    main()
