"""The wire: codecs that validate, channel and server options, the worker's side of Attach, fakes."""
