"""Sphinx configuration of the documentation site: ``make docs`` builds it into build/docs."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # for the two modules beside this file

import drawing  # noqa: E402
import reference  # noqa: E402

from ddp_slurm import __version__  # noqa: E402

project = "ddp_slurm"
author = "the ddp_slurm developers"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "ddp_slurm"
exclude_patterns = ["recipes/*.py", "tutorial/*.py"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
# Links to files outside docs/ are for readers of the repository; a prompt in a console block may
# hold what no lexer of a shell understands.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]

reference.write_pages(HERE / "reference")
drawing.write_svg(HERE / "reference" / "rooms.svg")
