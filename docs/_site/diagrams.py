"""State diagrams in mermaid's language, drawn as SVG, so that a page needs no script from elsewhere to show them.

States stand in a column, in the order in which the text names them. An arrow to the next state goes straight down.
Every other arrow leaves on the right, with its label above the line, and comes back on the right. So no part
of a diagram covers another one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape

ROW, PAD, GAP, LANE, CHAR = 22, 14, 46, 16, 7.2
START, END = "(start)", "(end)"


@dataclass
class State:
    """A box, and the arrows that leave it or come to it on its right side.

    Args:
        name: as the diagram calls it.
        text: what the box says.
        ports: the arrows of the right side, from the top.
    """

    name: str
    text: str
    ports: list[tuple[Arrow, str]] = field(default_factory=list)
    top: float = 0.0

    @property
    def height(self) -> float:
        return max(ROW * 1.6, ROW * len(self.ports) + PAD)

    @property
    def bare(self) -> bool:
        return self.name in (START, END)


@dataclass
class Arrow:
    """An arrow between two states.

    Args:
        source: name of the state that it leaves.
        target: name of the state that it leads to.
        label: words beside it.
    """

    source: str
    target: str
    label: str
    lane: float = 0.0


def parse(text: str) -> tuple[list[State], list[Arrow]]:
    """Return the states, in order, and the arrows of a ``stateDiagram-v2``."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("%%")]
    if not lines or lines[0] != "stateDiagram-v2":
        raise ValueError(f"a diagram must begin with stateDiagram-v2, not {lines[:1]}")
    states: dict[str, State] = {}
    arrows: list[Arrow] = []

    def state(name: str, end: bool = False) -> str:
        name = (END if end else START) if name == "[*]" else name
        states.setdefault(name, State(name, name))
        return name

    for line in lines[1:]:
        if re.match(r"direction \w+$", line):
            continue
        if match := re.match(r"(\[\*\]|\w+) *--> *(\[\*\]|\w+) *(?::(.*))?$", line):
            source, target, label = match.groups()
            arrows.append(Arrow(state(source), state(target, end=True), (label or "").strip()))
        elif (match := re.match(r'state "(?P<text>.+)" as (?P<name>\w+)$', line)) or (
            match := re.match(r"(?P<name>\w+) *: *(?P<text>.+)$", line)
        ):
            states[state(match["name"])].text = match["text"]
        else:
            raise ValueError(f"a diagram cannot hold this line: {line}")
    if END in states:
        states[END] = states.pop(END)  # the last one of the column
    return list(states.values()), arrows


def svg(text: str) -> str:
    """Return a state diagram as an SVG element, whose colours are the page's."""
    states, arrows = parse(text)
    order = {state.name: place for place, state in enumerate(states)}
    by_name = {state.name: state for state in states}
    straight = {}
    for arrow in arrows:
        if order[arrow.target] == order[arrow.source] + 1 and arrow.source not in straight:
            straight[arrow.source] = arrow
    around = [arrow for arrow in arrows if straight.get(arrow.source) is not arrow]
    for arrow in around:
        by_name[arrow.source].ports.append((arrow, "out"))
        by_name[arrow.target].ports.append((arrow, "in"))
    width = max([48.0, *(len(state.text) * CHAR + 2 * PAD for state in states if not state.bare)])
    y = 4.0
    for state in states:
        state.top = y
        y += (ROW if state.bare and not state.ports else state.height) + GAP
    right = 4 + width
    labels = [len(arrow.label) * CHAR for arrow in around]
    below = [len(arrow.label) * CHAR - width / 2 for arrow in straight.values()]
    first = right + max([24.0, *labels, *below]) + 2 * PAD
    for place, arrow in enumerate(sorted(around, key=lambda each: abs(order[each.target] - order[each.source]))):
        arrow.lane = first + place * LANE
    total = max([first, *(arrow.lane for arrow in around)]) + 8
    parts = [part for state in states for part in box(state, width)]
    parts += [part for arrow in straight.values() for part in down(arrow, by_name, 4 + width / 2)]
    parts += [part for arrow in around for part in round_about(arrow, by_name, right)]
    height = y - GAP + 4
    head = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" class="head"/></marker></defs>'
    )
    return (
        f'<svg class="diagram" role="img" viewBox="0 0 {total:.0f} {height:.0f}" width="{total:.0f}" '
        f'height="{height:.0f}" xmlns="http://www.w3.org/2000/svg">{head}{"".join(parts)}</svg>'
    )


def box(state: State, width: float) -> list[str]:
    """Return the parts of one state."""
    if state.bare:
        x, y = 4 + width / 2, state.top + ROW / 2
        ring = f'<circle cx="{x}" cy="{y}" r="9" class="ring"/>' if state.name == END else ""
        return [ring, f'<circle cx="{x}" cy="{y}" r="6" class="dot"/>']
    rect = f'<rect x="4" y="{state.top}" width="{width:.0f}" height="{state.height:.0f}" rx="6" class="state"/>'
    middle = state.top + state.height / 2 + 5
    return [rect, f'<text x="{4 + width / 2:.0f}" y="{middle:.0f}" text-anchor="middle">{escape(state.text)}</text>']


def down(arrow: Arrow, states: dict[str, State], x: float) -> list[str]:
    """Return the parts of an arrow to the state below."""
    source, target = states[arrow.source], states[arrow.target]
    begin = source.top + (ROW / 2 + 6 if source.bare else source.height)
    end = target.top + (1 if target.bare else 0)
    line = f'<path d="M{x:.0f} {begin:.0f}V{end:.0f}" class="arrow" marker-end="url(#arrow)"/>'
    return [line, f'<text x="{x + 8:.0f}" y="{(begin + end) / 2 + 4:.0f}" class="label">{escape(arrow.label)}</text>']


def round_about(arrow: Arrow, states: dict[str, State], right: float) -> list[str]:
    """Return the parts of an arrow that goes by its lane on the right."""

    def port(state: State, way: str) -> tuple[float, float]:
        if state.bare:
            return right - (right - 4) / 2 + 10, state.top + ROW / 2
        place = state.ports.index((arrow, way))
        return right, state.top + (state.height - ROW * len(state.ports)) / 2 + ROW * (place + 0.5) + 4

    (x0, y0), (x1, y1) = port(states[arrow.source], "out"), port(states[arrow.target], "in")
    line = f'<path d="M{x0:.0f} {y0:.0f}H{arrow.lane:.0f}V{y1:.0f}H{x1:.0f}" class="arrow" marker-end="url(#arrow)"/>'
    return [line, f'<text x="{right + 10:.0f}" y="{y0 - 5:.0f}" class="label">{escape(arrow.label)}</text>']
