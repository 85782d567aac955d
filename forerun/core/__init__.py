"""Decisions in plain Python and numpy: no torch, no grpc, no ray, no opentelemetry (tested)."""
