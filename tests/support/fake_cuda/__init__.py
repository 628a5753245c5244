"""A CUDA device without a GPU: what eager code, FSDP2, TP and compilers would do there.

Tensors are fake (shapes, strides, devices, no data) and on "cuda". A small device guard answers
where torch would ask the driver (``guard.cpp``), so that it works in a build for CPUs. The guard
must be loaded before torch is imported, hence in a process of its own (:mod:`.process`). Dispatch
modes tell what would happen: :mod:`.counter` counts kernels and bytes.
"""
