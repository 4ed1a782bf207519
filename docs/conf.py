"""Settings of the documentation: ``make docs``."""

import adahessian

project = "adahessian"
release = adahessian.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
autodoc_typehints = "description"
html_theme = "furo"
