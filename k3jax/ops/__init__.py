"""The operations of the layer, one folder each."""
