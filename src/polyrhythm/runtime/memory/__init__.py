"""Memory of a run: the arena of samples and the channel of published weights."""
