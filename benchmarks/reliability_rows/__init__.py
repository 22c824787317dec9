"""The rows of benchmarks/reliability.py: one function for each, grouped by subject.

A function takes the command's arguments, prints its figures as JSON and returns whether the promise
of docs/reliability.md is kept.
"""
