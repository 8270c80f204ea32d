"""TierKV keeps the KV cache that an LLM engine evicts on other machines, and gives it back.

Importing this package imports nothing else: the engine's hook, a vault and the console each load
only what they need.
"""

__version__ = "0.1.0"
