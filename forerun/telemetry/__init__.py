"""Traces and metrics. Nothing here is ever waited for."""
