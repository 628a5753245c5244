"""Plug-ins for other people's models and loops: one package each, with an extra of its own.

The library imports none of them; they import its public names.
"""
