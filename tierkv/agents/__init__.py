"""The processes: what all roles share (``runtime``) and one module a role."""
