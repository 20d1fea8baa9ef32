"""How `make site` builds these pages with Sphinx: Markdown, notebooks, and reference out of docstrings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from docutils.nodes import document
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.application import Sphinx

import forge_async
from forge_async.mesh.monarch_compat import show_endpoints
from forge_async.policy.actor import PolicyActor
from forge_async.trainer.actor import TrainerActor

project = "forge_async"
copyright = "the authors of forge_async"
release = forge_async.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "index"
exclude_patterns = ["images"]

myst_heading_anchors = 4  # links such as observability.md#traces, as on GitHub
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries = False
napoleon_numpy_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "forge_async"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2f5fa7", "color-brand-content": "#2f5fa7"},
    "dark_css_variables": {"color-brand-primary": "#8ab4f8", "color-brand-content": "#8ab4f8"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"


class NotebookParser(MystParser):
    """A notebook as a page: its text and its code. Outputs are not kept in git; the test suite runs the notebooks."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: document) -> None:
        super().parse(as_markdown(inputstring, Path(document["source"]).name), document)


def as_markdown(notebook: str, name: str) -> str:
    """The cells of a notebook as Markdown, with a line below its title that says how to get it."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    title, _, rest = parts[0].partition("\n")
    note = f"*This page is a notebook, {{download}}`{name} <{name}>`: its code without what it prints.*"
    return "\n\n".join([title, note, rest, *parts[1:]])


def setup(app: Sphinx) -> dict[str, Any]:
    for actor in (PolicyActor, TrainerActor):
        show_endpoints(actor)
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(NotebookParser)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
