"""The command line: parse, read the config, call one function of the API."""
