"""What a person runs: the command line, web pages, HTTP services, benchmarks and the built-in models."""
