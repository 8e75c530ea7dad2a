"""Config in, parts out: below the API and the command line, the only reader of an ``SFTConfig``."""
