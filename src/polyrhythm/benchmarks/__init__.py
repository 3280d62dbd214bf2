"""What `polyrhythm bench` measures, one module per benchmark. Like `cli` and `pipeline` it may reach everything."""
