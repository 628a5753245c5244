"""The site of the documentation: pages and docstrings as HTML."""
