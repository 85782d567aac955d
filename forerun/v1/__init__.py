"""Generated from proto/forerun/v1 by `make proto`; only this file is written by hand."""
