"""CPU kernels in C: compiled with the system's compiler at first use and called through ctypes.

Each kernel has a slower equivalent in torch. Without a C compiler there is no thread pool, and the
rest of the program runs in torch.
"""
