"""Tools for operators and developers: plan, simulate, profile, bench, plot, quantize.

The core must not import this package. Only the command line does.
"""
