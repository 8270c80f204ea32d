"""Quantisers and lossless codecs, and the frame header that says how bytes were made.

``frame`` and ``record`` need no numba, so a vault can check what it stores; ``registry`` loads the kernels.
"""
