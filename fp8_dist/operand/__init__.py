"""The one door for operands: statistics from a source, a cast, a move.

A :class:`fp8_dist.operand.sources.Source` supplies statistics.
:func:`fp8_dist.operand.prepare.cast_local` alone casts with them, and notifies observers.
"""
