"""The command line. One small module a group of commands; each imports what it needs only when it runs."""
