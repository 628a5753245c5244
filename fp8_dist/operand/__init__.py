"""The one door for operands: :func:`fp8_dist.operand.prepare.cast_local` casts and tells observers.

Statistics are an argument of the cast. Those that Python state decides come from a
:class:`fp8_dist.operand.state.State`.
"""
