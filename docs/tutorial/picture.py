"""Draws what each rank did, from the output of two runs of train.py.

python picture.py equal.txt measured.txt > split.svg
"""

import re
import sys
from pathlib import Path

WIDTH, ROW, LEFT = 420, 26, 70


def bars(title: str, text: str, top: int) -> list[str]:
    """A bar for each rank: the part of the time in which it computes, the rest empty."""
    rates = re.findall(r"([\d,]+) samples a second", text)
    lines = [f'<text x="10" y="{top + 14}" font-weight="bold">{title}: {rates[0]} samples/s</text>']
    for rank, share, percent in re.findall(r"rank (\d+): (\d+) samples.* computing (\d+) %", text):
        y = top + ROW * (int(rank) + 1)
        busy = WIDTH * int(percent) // 100
        lines += [
            f'<text x="10" y="{y + 15}">rank {rank}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="20" fill="#eee"/>',
            f'<rect x="{LEFT}" y="{y}" width="{busy}" height="20" fill="#3b82f6"/>',
            f'<text x="{LEFT + 6}" y="{y + 15}" fill="white">{share} samples</text>',
        ]
    return lines


def main() -> None:
    equal, measured = (Path(name).read_text() for name in sys.argv[1:3])
    height = 2 * 4 * ROW + 50
    print(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}"'
        ' font-family="sans-serif" font-size="13">'
    )
    print('<rect width="100%" height="100%" fill="white"/>')
    print("\n".join([*bars("equal", equal, 10), *bars("measured", measured, 4 * ROW + 30)]))
    print("</svg>")


if __name__ == "__main__":
    main()
