"""THE LOOP and what hangs on it. Read trainer.py first."""
