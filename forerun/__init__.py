"""Forerun: speculative decoding as a distributed service.

This package holds what the three roles share and imports none of them.
"""

__version__ = "0.1.0"
