"""The target worker: a complete continuous-batching decoder that hints make faster."""
