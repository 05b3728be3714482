"""The drawing of the architecture page, made from the imports of the code itself."""

import ast
import re
from collections.abc import Iterable
from html import escape
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "ddp_slurm"
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 132, 34, 18, 46, 20

LEFT_OUT = {"__init__", "__version__", "ask", "console", "errors", "files", "user"}
"""Small modules that nearly every room uses: their arrows would hide the others."""
TOP_FOLDERS = {"templates": "slurm"}
"""Folders beside the package that are installed in it under another name."""

Edges = dict[str, set[str]]


def room_of(module: str) -> str:
    """The room of ``ddp_slurm.plan.shares`` is ``plan``; a module of the top level is its own."""
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path) -> Iterable[str]:
    """Modules of the package that a file imports, also inside functions, or by their names in
    a string, as cli.py does."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and re.fullmatch(r"ddp_slurm\.[a-z_.]+", str(node.value)):
            yield str(node.value)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp_slurm"):
            for name in node.names:
                is_module = node.module == "ddp_slurm"
                yield f"ddp_slurm.{name.name}" if is_module else str(node.module)


def room_edges() -> Edges:
    """For each room the rooms that it imports from."""
    edges: Edges = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        room = relative.parts[0].removesuffix(".py")
        if room in LEFT_OUT:
            continue
        targets = {room_of(module) for module in imports_of(path)}
        edges.setdefault(room, set()).update(targets - LEFT_OUT - {room, ""})
    return edges


def layers_of(edges: Edges) -> list[list[str]]:
    """Rooms by the length of their longest way down, the lowest first."""
    depths: dict[str, int] = {}

    def depth(room: str, above: tuple[str, ...] = ()) -> int:
        if room in above:
            raise ValueError(f"the rooms {' -> '.join([*above, room])} import each other")
        if room not in depths:
            below = [depth(target, (*above, room)) for target in edges.get(room, ())]
            depths[room] = 1 + max(below, default=-1)
        return depths[room]

    for room in edges:
        depth(room)
    layers: list[list[str]] = [[] for _ in range(1 + max(depths.values()))]
    for room, level in sorted(depths.items()):
        layers[level].append(room)
    return layers


def direct_edges(edges: Edges) -> Edges:
    """Without the edges that a longer way implies: the drawing shows the order of the rooms."""

    def reachable(room: str) -> set[str]:
        found: set[str] = set()
        for target in edges.get(room, ()):
            found |= {target} | reachable(target)
        return found

    return {
        room: {t for t in targets if not any(t in reachable(o) for o in targets - {t})}
        for room, targets in edges.items()
    }


def svg(edges: Edges) -> str:
    """The rooms as boxes in layers, an arrow from each to those that it builds on."""
    layers = list(reversed(layers_of(edges)))
    widest = max(len(layer) for layer in layers)
    width = 2 * MARGIN + widest * BOX_WIDTH + (widest - 1) * GAP_X
    height = 2 * MARGIN + len(layers) * BOX_HEIGHT + (len(layers) - 1) * GAP_Y
    places: dict[str, tuple[float, float]] = {}
    for row, layer in enumerate(layers):
        row_width = len(layer) * BOX_WIDTH + (len(layer) - 1) * GAP_X
        for column, room in enumerate(layer):
            x = (width - row_width) / 2 + column * (BOX_WIDTH + GAP_X)
            places[room] = (x, MARGIN + row * (BOX_HEIGHT + GAP_Y))
    return "\n".join(
        [*_head(width, height), *_arrows(edges, places), *_boxes(places), "</svg>", ""]
    )


def _head(width: float, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}"'
        ' font-family="sans-serif" font-size="13">',
        '<rect width="100%" height="100%" fill="white"/>',
        '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
        ' orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#888"/></marker>',
    ]


def _arrows(edges: Edges, places: dict[str, tuple[float, float]]) -> Iterable[str]:
    for room, targets in sorted(direct_edges(edges).items()):
        for target in sorted(targets):
            (x1, y1), (x2, y2) = places[room], places[target]
            middle = BOX_WIDTH / 2
            yield (
                f'<line x1="{x1 + middle:g}" y1="{y1 + BOX_HEIGHT:g}"'
                f' x2="{x2 + middle:g}" y2="{y2 - 2:g}"'
                ' stroke="#888" marker-end="url(#tip)"/>'
            )


def _boxes(places: dict[str, tuple[float, float]]) -> Iterable[str]:
    for room, (x, y) in places.items():
        is_folder = not (PACKAGE / f"{room}.py").is_file()
        fill = "#dbeafe" if is_folder else "#f3f4f6"
        label = f"{TOP_FOLDERS.get(room, room)}/" if is_folder else f"{room}.py"
        yield (
            f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"'
            f' fill="{fill}" stroke="#555"/>'
            f'<text x="{x + BOX_WIDTH / 2:g}" y="{y + BOX_HEIGHT / 2 + 5:g}"'
            f' text-anchor="middle">{escape(label)}</text>'
        )


def write_svg(path: Path) -> None:
    """Write the drawing of the package as it is now."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg(room_edges()))


if __name__ == "__main__":
    print(svg(room_edges()), end="")
