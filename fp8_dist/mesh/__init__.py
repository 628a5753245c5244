"""Where tensors live on a mesh: placements of a linear layer, amax reductions, process groups.

Amaxes are reduced over a mesh in this room only. Below it: torch's DTensor.
"""
