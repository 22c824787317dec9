"""Randomized simulation of engine, client and server in virtual time."""
