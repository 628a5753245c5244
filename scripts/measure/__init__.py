"""Measures what does not depend on a machine's speed: messages, bytes, accuracy, order."""
