"""The coordinator: turns one request into a stream of tokens and keeps the ledger."""
