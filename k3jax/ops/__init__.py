"""The operations of the layer, one folder each: `reference.py` is the specification of its op."""
