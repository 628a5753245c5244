"""Settings of Sphinx, for the sources that `scripts.site` writes."""

from sphinx.application import Sphinx

import fp8_dist

project = "fp8_dist"
author = project_copyright = "The fp8_dist authors"
version = release = fp8_dist.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
autodoc_mock_imports = ["torchtitan"]
python_use_unqualified_type_names = True
add_module_names = False
napoleon_use_ivar = True
napoleon_custom_sections = [("Collectives", "notes_style"), ("Shapes", "notes_style")]
myst_heading_anchors = 4


def _skips(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object) -> bool:
    """Whether to skip a member: docstrings of named tuples already describe their fields."""
    return skip or str(obj.__doc__).startswith("Alias for field number")


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", _skips)


html_theme = "furo"
html_title = "fp8_dist"
html_static_path = ["static"]
html_css_files = ["code.css"]
html_copy_source = False
html_show_sphinx = False
