"""The engine: scheduler, policies, KV cache block pool, engine loop, and its client.

An engine decides which sequences run in the next step and where their keys and values are stored.
An executor (bloomery.executors) computes the steps. No module here imports torch.
"""
