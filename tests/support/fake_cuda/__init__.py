"""A fake CUDA device, which shows what eager code, FSDP2, TP and compilers would do on a GPU.

Tensors are fake (shapes, strides, devices, no data) and on "cuda". A small device guard
(``guard.cpp``) answers in place of the driver, so that this works in a CPU build of torch. The
guard must be loaded before torch is imported, so it needs its own process (:mod:`.process`).
Dispatch modes record what would happen; :mod:`.counter` counts kernels and bytes.
"""
