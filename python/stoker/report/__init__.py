"""What a run wrote down, told: its ledger on disk, the report, advice, the live view, metrics."""
