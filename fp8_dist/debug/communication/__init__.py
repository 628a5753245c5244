"""Audits of a step's collectives: kinds, bytes, times."""
