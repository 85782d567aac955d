"""The tensor side of the workers: models, KV, forward passes, sampling and simulated models."""
