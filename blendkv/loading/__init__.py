"""The road from a store to the layer that needs the bytes."""
