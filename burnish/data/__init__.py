"""ROWS become batches. numpy and pyarrow, no torch."""
