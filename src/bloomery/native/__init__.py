"""Kernels for the CPU in C: built with the system's compiler at first use, called through ctypes, run on one team.

Everything here has a slower twin in torch and may be missing: without a compiler, or on a machine it does not know, the
rest of the program asks `team().active`, hears no, and goes on with torch.
"""
