"""Codecs: chunks to bytes and back."""
