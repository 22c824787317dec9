"""What operators and developers run beside the server: plan, simulate, profile, bench, plot, quantize.

The core never imports this package; only the command line does.
"""
