"""The control tower's core: which sequences run in the next step, and where their keys and values live. No torch."""
