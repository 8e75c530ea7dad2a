"""LOOK before you train."""
