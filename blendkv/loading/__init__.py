"""The road in: from where chunks are kept to the layer that needs them."""
