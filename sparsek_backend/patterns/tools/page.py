"""Heat maps of a model's patterns: a PNG for each layer, and one HTML page with all of them."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable
from pathlib import Path

from sparsek_backend.patterns.model_file import ModelPatterns
from sparsek_backend.patterns.tools.statistics import Statistics, pattern_statistics

COLUMNS: dict[str, Callable[[Statistics], str]] = {
    "density": lambda s: f"{s.density:.2%}",
    "sparsity": lambda s: f"{s.sparsity:.2%}",
    "blocks a row": lambda s: f"{s.row_mean:.1f} ± {s.row_std:.1f}, at most {s.row_max}",
    "overlap": lambda s: f"{s.overlap:.2f}",
    "weights, 0 to 1": lambda s: _bars(s.importance),
    "bytes": lambda s: f"{s.bytes:,}",
    "GFLOP": lambda s: f"{s.flops / 1e9:.3g}",
    "on tensor cores": lambda s: f"{s.tensor_core_share:.1%}",
}
"""Statistics in the order of the table, as text."""

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }}
table {{ border-collapse: collapse; }}
td, th {{ border-bottom: 1px solid #ccc; padding: .2em .8em; text-align: right; }}
img {{ max-width: 100%; }}
</style>
<h1>{title}</h1>
<p>{about}</p>
<table><tr><th>layer</th>{heads}</tr>
{rows}
</table>
{figures}
</html>
"""


def write_page(patterns: ModelPatterns, folder: Path, *, head_dim: int = 64) -> list[Path]:
    """Write ``layer_000.png`` and so on, and last ``index.html``, which needs no other file."""
    folder.mkdir(parents=True, exist_ok=True)
    written, rows, figures = [], [], []
    for layer, pattern in patterns.patterns.items():
        figure = pattern.show(range(pattern.num_patterns))
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=90)
        written.append(folder / f"layer_{layer:03d}.png")
        written[-1].write_bytes(buffer.getvalue())
        statistics = pattern_statistics(pattern, head_dim=head_dim)
        cells = "".join(f"<td>{text(statistics)}</td>" for text in COLUMNS.values())
        rows.append(f'<tr><td><a href="#layer{layer}">{layer}</a></td>{cells}</tr>')
        image = base64.b64encode(buffer.getvalue()).decode()
        figures.append(
            f'<h2 id="layer{layer}">layer {layer}</h2>\n'
            f'<img alt="patterns of layer {layer}" src="data:image/png;base64,{image}">'
        )
    about = (
        f"{len(patterns.patterns)} layers, {patterns.shape[0]} x {patterns.shape[1]} blocks of "
        f"{patterns.block_size} tokens. Darker blocks weigh more."
    )
    page = folder / "index.html"
    page.write_text(
        _PAGE.format(
            title=html.escape(f"Patterns of {patterns.model}" if patterns.model else "Patterns"),
            about=about,
            heads="".join(f"<th>{name}</th>" for name in COLUMNS),
            rows="\n".join(rows),
            figures="\n".join(figures),
        ),
        encoding="utf-8",
    )
    return [*written, page]


def _bars(counts: list[int]) -> str:
    steps = "▁▂▃▄▅▆▇█"
    most = max(counts, default=0)
    return "".join(steps[round((len(steps) - 1) * count / max(most, 1))] for count in counts)
