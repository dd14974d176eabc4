"""Draws `promise.svg`: how three replicas train what one device trains. `python docs/figures/promise.py`"""

from __future__ import annotations

from pathlib import Path

_COLORS = ("#4c78a8", "#c8662b", "#2f8a5b")
_CENTERS = (110, 320, 530)
_EXAMPLES = (3, 3, 2)
"""Of a batch of eight, as it is cut between three replicas."""


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{text}</text>'


def _box(x: float, y: float, width: float, height: float, color: str, text: str) -> str:
    fill = f'fill="{color}" rx="6"'
    middle = _text(x + width / 2, y + height / 2 + 5, text, 'fill="#fff"')
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" {fill}/>{middle}'


def _arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x} {y} L{to_x} {to_y}" stroke="#888" stroke-width="1.5" marker-end="url(#tip)"/>'


def drawing() -> str:
    """Returns the figure as SVG."""
    parts = [_text(320, 18, "the global batch of <tspan font-family='monospace'>fit</tspan>: eight examples", 'fill="#333"')]
    left = 320 - 34 * sum(_EXAMPLES) / 2
    for color, center, examples in zip(_COLORS, _CENTERS, _EXAMPLES, strict=True):
        for i in range(examples):
            parts.append(f'<rect x="{left + 34 * i + 3}" y="28" width="28" height="28" rx="4" fill="{color}"/>')
        parts.append(_arrow(left + 17 * examples, 60, center, 84))
        left += 34 * examples
        parts.append(_box(center - 92, 90, 184, 30, color, f"gradient of {examples} examples"))
        parts.append(_arrow(center, 122, 320 + (center - 320) * 0.72, 146))
    parts.append(_box(60, 152, 520, 30, "#444", "sum, weighed by examples: the gradient of one device"))
    for color, center in zip(_COLORS, _CENTERS, strict=True):
        parts.append(_arrow(320 + (center - 320) * 0.72, 184, center, 204))
        parts.append(_box(center - 92, 210, 184, 30, color, "one device's update"))
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return "\n".join(
        [
            '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 248" font-family="system-ui, sans-serif" font-size="15"'
            ' text-anchor="middle">',
            f'<defs>{tip}<path d="M0 0 L8 4 L0 8 z" fill="#888"/></marker></defs>',
            '<rect width="640" height="248" rx="8" fill="#fff"/>',
            *parts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(drawing(), "utf-8")
