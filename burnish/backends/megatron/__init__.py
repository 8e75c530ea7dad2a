"""The Megatron Core backend: its own model, schedules and optimizer, fed with the same plan as any other."""
