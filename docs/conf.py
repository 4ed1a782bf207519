"""Settings of the documentation: ``make docs``."""

import adahessian

project = "adahessian"
release = adahessian.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
# Formulas are written as GitHub reads them: $inline$, and fences of the language "math".
myst_enable_extensions = ["dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 3
autodoc_typehints = "description"
html_theme = "furo"
