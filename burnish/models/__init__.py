"""THE NETWORK and its loss. Knows no ranks and no data files."""
