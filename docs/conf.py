"""Settings of the documentation: ``make docs``."""

import os

import adahessian

# The build of the gallery runs its scripts on one core, with the same results everywhere.
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
    "thumbnail_size": (480, 320),
    "within_subsection_order": "FileNameSortKey",
}
html_theme = "furo"
html_title = "adahessian"
