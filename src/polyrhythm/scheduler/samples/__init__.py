"""Samples: admission, groups, the buffer that feeds the trainer, and the ledger. Part of the ticket half."""
