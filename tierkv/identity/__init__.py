"""What makes two pieces of cached state the same: the model, the tenant and every token before.

A block's key is made in ``blocks.block_key``; a model's root in ``model.ModelIdentity.digest``.
"""
