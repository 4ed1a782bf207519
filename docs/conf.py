"""Settings of the documentation: ``make docs``."""

import os
import re

import adahessian

# Run the scripts of the gallery on one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

project = "adahessian"
release = adahessian.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
]
# Formulas are written as GitHub reads them: $inline$, and fences of the language "math".
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3
autodoc_typehints = "description"
# References to names in this library must resolve. References to other libraries are not linked.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!adahessian).*")]
sphinx_gallery_conf = {
    "examples_dirs": "../examples/gallery",
    "gallery_dirs": "gallery",
    "abort_on_example_error": True,
    "download_all_examples": False,
    "ignore_pattern": r"_worker\.py$",
    "image_srcset": ["2x"],
    "min_reported_time": 1e9,
    "show_memory": False,
    "show_signature": False,
    "thumbnail_size": (720, 400),
    "within_subsection_order": "FileNameSortKey",
}
html_theme = "furo"
html_title = "adahessian"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}


def link_to_gallery(app, page, text):
    """Point links to scripts of the gallery at their pages. On GitHub, the same links open the scripts."""
    text[0] = re.sub(
        r"\]\(\.\./examples/gallery/(\w*)(?:\.py)?\)", lambda link: f"](gallery/{link[1] or 'index'}.rst)", text[0]
    )


def setup(app):
    """Register the hook that rewrites links."""
    app.connect("source-read", link_to_gallery)
