"""The segment log: records in append-only files, each proving where it begins, ends and whether it is in sight."""
