"""Tests of bloomery.executors: ranks as processes and as Ray actors."""
