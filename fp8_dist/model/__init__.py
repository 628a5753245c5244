"""A whole model: its conversion, filters and report, its checkpoints and export."""
