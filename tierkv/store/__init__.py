"""The vault's storage: records in RAM (and on disk), an index, and what to keep."""
